"""FlashMask's plan against brute force: every tile's class, every program's walk, every head's turn, and what a plan costs the host."""

import itertools
import math
import tracemalloc
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca import catalogue
from pytest_longca.case import Case
from pytest_longca.intervals import columns_of
from pytest_longca.kernels import flashmask_stretches
from pytest_longca.kernels.flashmask import HOPPER, plan_case
from pytest_longca.kernels.flashmask_plan import WORTH_SPLITTING, Launch, Plan, Schedule, Tile, make_plan
from pytest_longca.kernels.flashmask_stretches import Stretches, cut
from pytest_longca.kernels.flashmask_tiles import FULL, PARTIAL
from tests.unit.dispatched import Dispatched

STATIC = catalogue.MASK_GROUPS["static"]


def is_canonical(row: list[int], seqlen_kv: int) -> bool:
    """Whether (start, end, start, end) are ascending intervals that do not touch, unused ones zero and last."""
    a, b, c, d = row
    second = (c, d) == (0, 0) or b < c < d <= seqlen_kv
    return row == [0, 0, 0, 0] or (0 <= a < b <= seqlen_kv and second)


@st.composite
def row_intervals(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Canonical row intervals `[1, 1, seqlen_q, 2, 2]`, and seqlen_kv: arbitrary rows, each followed by some that move on from it."""
    seqlen_q, seqlen_kv = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    cuts = st.lists(st.integers(0, seqlen_kv), min_size=4, max_size=4).map(sorted)
    rows: list[list[int]] = []
    while len(rows) < seqlen_q:
        a, b, c, d = draw(cuts)
        row = next(x for x in ([a, b, c, d], [a, d, 0, 0], [0, 0, 0, 0]) if is_canonical(x, seqlen_kv))
        slopes, count = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4)), draw(st.integers(1, 20))
        while count and len(rows) < seqlen_q and is_canonical(row, seqlen_kv):
            rows.append(row)
            used = [row[1] > 0] * 2 + [row[3] > 0] * 2
            row, count = [x + slope * is_used for x, slope, is_used in zip(row, slopes, used, strict=True)], count - 1
    return torch.tensor(rows, dtype=torch.int32).view(1, 1, seqlen_q, 2, 2), seqlen_kv


def dense(rows: torch.Tensor, seqlen_kv: int) -> torch.Tensor:
    key = torch.arange(seqlen_kv)
    return ((key >= rows[0, 0, :, :, :1]) & (key < rows[0, 0, :, :, 1:])).any(1)


def walk(plan: Plan, schedule: Schedule, entry: int, kind: int) -> list[int]:
    """The tiles that a program visits, as the kernels walk them."""
    (item,) = (item for item in schedule.items.tolist() if item[0] == entry)
    first, last, tiles, start, left = item[4 + 5 * kind : 9 + 5 * kind]
    assert tiles == 0 or plan.runs[first].tolist() == [start, left]
    visited = [t for start, length in plan.runs[first:last].tolist() for t in range(start, start + length)]
    assert len(visited) == tiles
    return visited


def classes(visible: torch.Tensor, block_q: int, block_kv: int, by_keys: bool) -> torch.Tensor:
    """The class of every tile, by the dense mask: `[entries, tiles]`."""
    kinds = torch.tensor([[kind(rows, block_kv) for rows in columns.split(block_q)] for columns in visible.split(block_kv, 1)])
    return kinds if by_keys else kinds.T


def check_walks(plan: Plan, visible: torch.Tensor, fwd: Tile, dkdv: Tile) -> None:
    """Every program visits exactly the full and the partial tiles of its block, in order; the map is computed from the dense mask."""
    assert plan.dkdv is not None
    for schedule, *sizes in ((plan.fwd, fwd.block, fwd.step, False), (plan.dkdv, dkdv.step, dkdv.block, True)):
        found = classes(visible, *sizes)
        assert len(schedule.items) == len(found)
        for entry, expected in enumerate(found):
            assert walk(plan, schedule, entry, 0) == (expected == FULL).nonzero()[:, 0].tolist()
            assert walk(plan, schedule, entry, 1) == (expected == PARTIAL).nonzero()[:, 0].tolist()


def plain_walks(found: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The runs, and (first, one past its last, tiles) of the full and the partial tiles of each entry, from the class of every tile."""
    runs: list[list[int]] = []
    walks: list[list[int]] = [[] for _ in found]
    for kind in (FULL, PARTIAL):
        for row, own in zip(found, walks, strict=True):
            first = len(runs)
            for is_kind, tiles in itertools.groupby(range(len(row)), lambda tile, row=row, kind=kind: row[tile] == kind):
                if is_kind:
                    begin, *more = tiles
                    runs.append([begin, 1 + len(more)])
            own += [first, len(runs), sum(length for _, length in runs[first:])]
    return [*runs, [0, 0]], walks


def plain_schedule(runs: list[list[int]], walks: list[list[int]], group: int, rate: float) -> dict[str, object]:
    """What a schedule is, number by number, from what its entries walk."""
    work = [group * (own[2] + own[5]) for own in walks]
    left, heads = sum(work), {}
    for entry in sorted(range(len(work)), key=lambda entry: -work[entry]):
        is_light = rate * work[entry] < WORTH_SPLITTING * max(1, sum(work))
        heads[entry] = group if is_light else -(-group // min(group, max(1, math.ceil(rate * work[entry] / max(left, 1)))))
        left -= work[entry]
    programs = [[entry, first, min(heads[entry], group - first)] for entry in range(len(work)) for first in range(0, group, heads[entry])]
    split = [program for program in programs if program[2] < group]
    for program in programs:
        program.append(split.index(program) if program in split else -1)
    sizes = [work[entry] // group * count for entry, _, count, _ in programs]
    order = sorted(range(len(programs)), key=lambda i: -sizes[i])
    slots = [[slot for owner, _, _, slot in programs if owner == entry and slot >= 0] for entry in range(len(work))]
    items = [
        programs[i] + [x for part in (0, 3) for x in (*walks[programs[i][0]][part : part + 3], *runs[walks[programs[i][0]][part]])]
        for i in order
    ]
    return {
        "items": [[*item, 0, 0] for item in items],
        "splits": [[entry, own[0], len(own)] for entry, own in enumerate(slots) if own],
        "slots": len(split),
        "whole": next((i for i, item in enumerate(items) if item[3] >= 0), len(items)),
        "longest": max(sizes) / (max(1, sum(sizes)) / len(sizes)),
    }


def kind(tile: torch.Tensor, block_kv: int) -> int:
    """A tile that reaches beyond the last key is not full; queries that do not exist are not missed."""
    return FULL if tile.shape[1] == block_kv and bool(tile.all()) else PARTIAL if bool(tile.any()) else 0


@given(row_intervals())
@settings(deadline=None, max_examples=60)
def test_the_rows_of_stretches_are_those_that_they_were_made_of(drawn):
    rows = drawn[0].view(-1, 4).numpy()
    table = np.full_like(rows, -1)
    Stretches.of(rows).fill(table)
    assert np.array_equal(table, rows)


@given(row_intervals(), st.sampled_from([1, 4, 16]))
@settings(deadline=None, max_examples=60)
def test_the_parts_of_a_cut_are_all_intervals_and_stay_inside_their_block(drawn, block):
    found = []
    intervals = Stretches.of(drawn[0].view(-1, 4).numpy()).intervals()
    parts, within, lines, ends = (x.T.tolist() for x in cut(intervals, np.full(intervals.shape[1], block)))
    assert sum(parts) == len(within) and all(parts)
    for own, (first, last), part in zip(within, lines, ends, strict=True):
        assert own == first // block == last // block
        for line in range(first, last + 1):
            found.append((line, *(begin + (end > begin) * (line - first) for begin, end in zip(*part, strict=True))))
            assert line < last or found[-1][1:] == tuple(part[1])
    rows = enumerate(drawn[0][0, 0].tolist())
    assert sorted(found) == [(line, *interval) for line, intervals in rows for interval in intervals if interval[1]]


def test_stretches_go_on_where_lines_are_compared_chunk_by_chunk(monkeypatch):
    """Chunks of 1 to 5 lines, so that every turn and every leap comes first and last in one."""
    rows = catalogue.load(catalogue.MASKS["prefix_lm_document"]).sample(Random(1), 200).row_intervals().view(-1, 4).numpy()
    whole = Stretches.of(rows)
    for chunk in range(1, 6):
        monkeypatch.setattr(flashmask_stretches, "CHUNK", chunk)
        assert np.array_equal(Stretches.of(rows).first, whole.first)


def test_a_document_is_one_stretch():
    rows = catalogue.load(catalogue.MASKS["causal_document"])((5, 40, 200, 2)).row_intervals()
    assert Stretches.of(rows.view(-1, 4).numpy()).first.tolist() == [0, 5, 45, 245]


@given(row_intervals(), st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]))
@settings(deadline=None, max_examples=100)
def test_programs_visit_exactly_the_full_and_the_partial_tiles_of_the_dense_mask_in_order(drawn, block, step):
    rows, seqlen_kv = drawn
    plan = make_plan(rows, seqlen_kv, fwd=Tile(block, step), dq=Tile(block, step), dkdv=Tile(block, step))
    assert (plan is None) == (columns_of(rows, seqlen_kv) is None)
    if plan is not None:
        assert plan.dq is plan.fwd
        check_walks(plan, dense(rows, seqlen_kv), Tile(block, step), Tile(block, step))


@given(row_intervals(), st.sampled_from([1, 4, 6]), st.sampled_from([1, 8, 100]))
@settings(deadline=None, max_examples=60)
def test_schedules_are_those_of_the_plain_computation_number_by_number(drawn, group, processors):
    rows, seqlen_kv = drawn
    fwd, dq, dkdv = Tile(8, 4), Tile(4, 8), Tile(12, 4)
    plan = make_plan(rows, seqlen_kv, fwd=fwd, dq=dq, dkdv=dkdv, group=group, heads=2, processors=processors)
    if plan is None:
        return
    visible = dense(rows, seqlen_kv)
    by_rows = [classes(visible, tile.block, tile.step, False).tolist() for tile in (fwd, dq)]
    by_keys = classes(visible, dkdv.step, dkdv.block, True).tolist()
    runs, walks = plain_walks([row for found in (*by_rows, by_keys) for row in found])
    assert plan.runs.tolist() == runs
    for schedule, found, *sharing in (
        (plan.fwd, by_rows[0], 1, 0.0),
        (plan.dq, by_rows[1], 1, 0.0),
        (plan.dkdv, by_keys, group, processors / 2),
    ):
        own, walks = walks[: len(found)], walks[len(found) :]
        plain = plain_schedule(runs, own, *sharing)
        values = {name: getattr(schedule, name) for name in plain}
        assert {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()} == plain


@pytest.mark.parametrize("seqlen", [1, 60, 128, 257])
@pytest.mark.parametrize("name", STATIC)
def test_the_tiles_of_static_masks_are_those_of_the_dense_mask(name, seqlen):
    mask = catalogue.load(catalogue.MASKS[name]).sample(Random(f"{name}:{seqlen}"), seqlen)
    fwd, dkdv = Tile(32, 8), Tile(16, 32)
    plan = make_plan(mask.row_intervals(), seqlen, fwd=fwd, dkdv=dkdv)
    assert plan is not None
    check_walks(plan, mask.dense()[0, 0], fwd, dkdv)
    assert torch.equal(plan.columns.view(1, 1, -1, 2, 2), mask.columns())


@given(row_intervals())
@settings(deadline=None, max_examples=100)
def test_the_column_form_is_that_of_the_row_intervals_or_none(drawn):
    rows, seqlen_kv = drawn
    plan, plain = make_plan(rows, seqlen_kv, fwd=Tile(4, 4)), columns_of(rows, seqlen_kv)
    assert (plan is None) == (plain is None)
    if plan is not None and plain is not None:
        assert torch.equal(plan.columns.view(plain.shape), plain)
        assert plan.row_pieces == 1 + bool(rows[..., 1, 1].any()) and plan.column_pieces == 1 + bool(plain[..., 1, 1].any())


def test_a_mask_without_column_form_is_refused_in_memory_that_grows_with_its_length():
    """Every run of marks covers ranges of keys, all runs together 35 million of them here."""
    seqlen = 10_000
    ends = np.sort(np.random.default_rng(0).integers(0, seqlen + 1, (seqlen, 2)))
    rows = torch.zeros(1, 1, seqlen, 2, 2, dtype=torch.int32)
    rows[0, 0, :, 0] = torch.from_numpy(ends * (ends[:, :1] < ends[:, 1:]))
    tracemalloc.start()
    assert make_plan(rows, seqlen, fwd=Tile(64, 64)) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 0), (0, 5), (5, 0)])
def test_sequences_without_queries_or_keys_have_plans(seqlen_q, seqlen_kv):
    plan = make_plan(torch.zeros(1, 1, seqlen_q, 2, 2, dtype=torch.int32), seqlen_kv, fwd=Tile(4, 4), dkdv=Tile(4, 4))
    assert plan is not None and plan.dkdv is not None
    assert (len(plan.fwd.items), len(plan.dkdv.items)) == (-(-seqlen_q // 4), -(-seqlen_kv // 4))
    assert plan.columns.shape == (1, seqlen_kv, 4) and not plan.fwd.items[:, 6].any() and not plan.fwd.items[:, 11].any()


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_every_batch_of_a_mask_has_its_own_columns_and_tiles(data):
    seqlen_q, seqlen_kv = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    ends = [sorted(data.draw(st.lists(st.integers(0, seqlen_kv), min_size=seqlen_q, max_size=seqlen_q))) for _ in range(3)]
    rows = torch.zeros(3, 1, seqlen_q, 2, 2, dtype=torch.int32)
    rows[:, 0, :, 0, 1] = torch.tensor(ends)
    plain, tiles = columns_of(rows, seqlen_kv), {"fwd": Tile(4, 8), "dkdv": Tile(8, 4)}
    together = make_plan(rows, seqlen_kv, **tiles)
    assert together is not None and together.dkdv is not None and plain is not None
    assert torch.equal(together.columns.view(plain.shape), plain)
    for batch in range(3):
        alone = make_plan(rows[batch : batch + 1], seqlen_kv, **tiles)
        assert alone is not None and alone.dkdv is not None
        for ours, own in ((together.fwd, alone.fwd), (together.dkdv, alone.dkdv)):
            for block in range(len(own.items)):
                entry = batch * len(own.items) + block
                assert [walk(together, ours, entry, part) for part in (0, 1)] == [walk(alone, own, block, part) for part in (0, 1)]


@pytest.mark.parametrize("name", STATIC)
def test_a_plan_is_few_operations_whatever_its_length(name):
    """A plan of 220 took 5 ms on an H200."""
    mask = catalogue.load(catalogue.MASKS[name]).default(8192)
    case = Case(mask=mask, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
    with Dispatched() as calls:
        plan_case(case, Launch(*HOPPER[128], tma=True, processors=132), torch.device("cpu"))
    assert calls.count.total() <= 42, calls


@pytest.mark.parametrize("group", [1, 4, 6])
@pytest.mark.parametrize("processors", [1, 8, 1000])
def test_every_head_of_every_key_block_has_one_turn_heaviest_first(group, processors):
    i = torch.arange(64, dtype=torch.int32)
    rows = torch.zeros(64, 2, 2, dtype=torch.int32)
    rows[:, 0, 1] = i + 1
    rows = rows[None, None]
    plan = make_plan(rows, 64, fwd=Tile(8, 8), dq=Tile(8, 8), dkdv=Tile(8, 8), group=group, heads=2, processors=processors)
    assert plan is not None and plan.dkdv is not None
    schedule = plan.dkdv
    turns = [(entry, head) for entry, first, heads, *_ in schedule.items.tolist() for head in range(first, first + heads)]
    assert sorted(turns) == [(entry, head) for entry in range(8) for head in range(group)]
    work = [(item[6] + item[11]) * item[2] for item in schedule.items.tolist()]
    assert work == sorted(work, reverse=True)
    slots = sorted(slot for slot in schedule.items[:, 3].tolist() if slot >= 0)
    assert slots == list(range(schedule.slots))
    for entry, first, count in schedule.splits.tolist():
        own = [item[3] for item in schedule.items.tolist() if item[0] == entry]
        assert sorted(own) == list(range(first, first + count))
    assert (schedule.slots > 0) == (group > 1 and processors > 1)


def test_a_plan_of_128k_tokens_takes_less_than_a_thousandth_of_the_operands():
    seqlen, heads = 128 * 1024, 64
    i = torch.arange(seqlen, dtype=torch.int32)
    rows = torch.zeros(seqlen, 2, 2, dtype=torch.int32)
    rows[:, 0, 0], rows[:, 0, 1] = i // 10_000 * 10_000, i + 1  # causal inside documents of 10,000 tokens
    rows = rows[None, None]
    plan = make_plan(rows, seqlen, fwd=Tile(128, 128), dq=Tile(128, 64), dkdv=Tile(128, 64), group=8, heads=8, processors=132)
    assert plan is not None
    operands = 2 * seqlen * 128 * (4 * heads + 4 * 8)  # q out dq do, k v dk dv, bf16
    statistics = 3 * 4 * heads * seqlen  # lse, base-2 lse, delta
    assert plan.dkdv is not None
    parts = 4 * plan.dkdv.slots * 8 * 128 * 256
    assert plan.nbytes < operands / 1000
    assert plan.nbytes + statistics + parts < operands * 0.05
