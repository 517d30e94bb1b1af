"""FlashMask's plan against brute force: every tile's class, every program's walk, every head's turn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.intervals import columns_of
from pytest_longca.kernels.flashmask_columns import column_form
from pytest_longca.kernels.flashmask_plan import FULL, PARTIAL, Schedule, Tile, make_plan, tile_classes


@st.composite
def row_intervals(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Canonical row intervals `[1, 1, seqlen_q, 2, 2]` of arbitrary pieces, and seqlen_kv."""
    seqlen_q, seqlen_kv = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    cuts = st.lists(st.integers(0, seqlen_kv), min_size=4, max_size=4).map(sorted)
    rows = torch.zeros(seqlen_q, 2, 2, dtype=torch.int32)
    for row in rows:
        pieces = draw(cuts.filter(lambda c: c[1] < c[2] or c[0] == c[1]))
        used = [(a, b) for a, b in (pieces[:2], pieces[2:]) if a < b]
        for i, piece in enumerate(used):
            row[i] = torch.tensor(piece)
    return rows[None, None], seqlen_kv


def dense(rows: torch.Tensor, seqlen_kv: int) -> torch.Tensor:
    key = torch.arange(seqlen_kv)
    return ((key >= rows[0, 0, :, :, :1]) & (key < rows[0, 0, :, :, 1:])).any(1)


def walk(schedule: Schedule, entry: int, kind: int) -> list[int]:
    """The tiles that a program visits, as the kernels walk them."""
    (item,) = (item for item in schedule.items.tolist() if item[0] == entry)
    first, last, tiles, start, left = item[4 + 5 * kind : 9 + 5 * kind]
    assert tiles == 0 or schedule.runs[first].tolist() == [start, left]
    visited = [t for start, length in schedule.runs[first:last].tolist() for t in range(start, start + length)]
    assert len(visited) == tiles
    return visited


@given(row_intervals(), st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]))
@settings(deadline=None, max_examples=60)
def test_every_tile_is_absent_full_or_partial_exactly_as_the_dense_mask_says(drawn, block_q, block_kv):
    rows, seqlen_kv = drawn
    visible = dense(rows, seqlen_kv)
    classes = tile_classes(rows[:, 0], seqlen_kv, block_q, block_kv)
    assert classes.shape == (1, -(-len(visible) // block_q), -(-seqlen_kv // block_kv))
    for i, row in enumerate(classes[0].tolist()):
        for j, kind in enumerate(row):
            tile = visible[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
            is_full = tile.shape[1] == block_kv and bool(tile.all())
            assert kind == (FULL if is_full else PARTIAL if bool(tile.any()) else 0)


@given(row_intervals(), st.sampled_from([4, 8]), st.sampled_from([4, 16]))
@settings(deadline=None, max_examples=40)
def test_programs_visit_exactly_the_touched_tiles_in_order(drawn, block, step):
    rows, seqlen_kv = drawn
    columns = torch.zeros(1, 1, seqlen_kv, 2, 2, dtype=torch.int32)
    plan = make_plan(rows, columns, fwd=Tile(block, step), dq=Tile(block, step), dkdv=Tile(block, step))
    by_rows, by_columns = tile_classes(rows[:, 0], seqlen_kv, block, step), tile_classes(rows[:, 0], seqlen_kv, step, block)
    assert plan.dq is plan.fwd and plan.dkdv is not None
    for schedule, classes in ((plan.fwd, by_rows[0]), (plan.dkdv, by_columns[0].T)):
        assert len(schedule.items) == len(classes)
        for entry, kinds in enumerate(classes):
            assert walk(schedule, entry, 0) == (kinds == FULL).nonzero()[:, 0].tolist()
            assert walk(schedule, entry, 1) == (kinds == PARTIAL).nonzero()[:, 0].tolist()


@given(row_intervals())
@settings(deadline=None, max_examples=60)
def test_the_column_form_is_that_of_the_row_intervals_or_none(drawn):
    rows, seqlen_kv = drawn
    ours, plain = column_form(rows, seqlen_kv), columns_of(rows, seqlen_kv)
    assert (ours is None) == (plain is None)
    assert ours is None or plain is None or torch.equal(ours, plain)


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_every_batch_of_a_mask_has_its_own_columns_and_tiles(data):
    seqlen_q, seqlen_kv = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    ends = [sorted(data.draw(st.lists(st.integers(0, seqlen_kv), min_size=seqlen_q, max_size=seqlen_q))) for _ in range(3)]
    rows = torch.zeros(3, 1, seqlen_q, 2, 2, dtype=torch.int32)
    rows[:, 0, :, 0, 1] = torch.tensor(ends)
    columns = column_form(rows, seqlen_kv)
    assert columns is not None and torch.equal(columns, columns_of(rows, seqlen_kv))
    together, tile = make_plan(rows, columns, fwd=Tile(4, 8), dkdv=Tile(8, 4)), Tile(4, 8)
    blocks = -(-seqlen_q // tile.block)
    for batch in range(3):
        alone = make_plan(rows[batch : batch + 1], columns[batch : batch + 1], fwd=tile)
        for block in range(blocks):
            assert [walk(together.fwd, batch * blocks + block, kind) for kind in (0, 1)] == [
                walk(alone.fwd, block, kind) for kind in (0, 1)
            ]


@pytest.mark.parametrize("group", [1, 4, 6])
@pytest.mark.parametrize("processors", [1, 8, 1000])
def test_every_head_of_every_key_block_has_one_turn_heaviest_first(group, processors):
    i = torch.arange(64, dtype=torch.int32)
    rows = torch.zeros(64, 2, 2, dtype=torch.int32)
    rows[:, 0, 1] = i + 1
    rows = rows[None, None]
    columns = columns_of(rows, 64)
    assert columns is not None
    plan = make_plan(rows, columns, fwd=Tile(8, 8), dq=Tile(8, 8), dkdv=Tile(8, 8), group=group, heads=2, processors=processors)
    schedule = plan.dkdv
    assert schedule is not None
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
    columns = columns_of(rows, seqlen)
    assert columns is not None
    plan = make_plan(rows, columns, fwd=Tile(128, 128), dq=Tile(128, 64), dkdv=Tile(128, 64), group=8, heads=8, processors=132)
    operands = 2 * seqlen * 128 * (4 * heads + 4 * 8)  # q out dq do, k v dk dv, bf16
    statistics = 3 * 4 * heads * seqlen  # lse, base-2 lse, delta
    assert plan.dkdv is not None
    parts = 4 * plan.dkdv.slots * 8 * 128 * 256
    assert plan.nbytes < operands / 1000
    assert plan.nbytes + statistics + parts < operands * 0.05
