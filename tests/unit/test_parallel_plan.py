"""Layouts and plans without processes: tokens are placed exactly once, and the plan's cells tile the mask exactly once."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.case import Case
from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.mask import Mask
from pytest_longca.parallel.kernel import NaiveBlock, VarlenBlock
from pytest_longca.parallel.layout import LAYOUTS
from pytest_longca.parallel.plan import Plan
from pytest_longca.parallel.segment import Round, Segment, find_runs
from pytest_longca.parallel.setup import Sharing, bind, document_lengths
from pytest_longca.parallel.world import World

CPU = torch.device("cpu")
STATIC = MASK_GROUPS["static"]


def sample(name: str, seqlen: int, seed: int) -> Mask:
    return load(MASKS[name]).sample(Random(seed), seqlen)


def plans(mask: Mask, layout: str, ring: int) -> list[Plan]:
    intervals = mask.row_intervals()[0, 0]
    area = (intervals[..., 1] - intervals[..., 0]).sum(1)
    shards = LAYOUTS[layout](document_lengths(mask), area, ring)
    return [Plan(intervals, shards, own, CPU) for own in range(ring)]


def effective_window(call: Round) -> tuple[int | None, int | None]:
    """FA2's rule: a side as long as the longest keys is unlimited, and beside a limited side "unlimited" is the longest keys."""
    longest = call.max_seqlen_kv
    left, right = (None if side is None or side >= longest else side for side in call.window)
    if left is None and right is None:
        return None, None
    return longest if left is None else left, longest if right is None else right


def cells(call: Round, rows: int, keys: int) -> torch.Tensor:
    """How often a varlen call computes each (row, key), as FlashAttention-2 understands its window."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    row, key = call.rows.start, call.keys.start
    left, right = effective_window(call)
    for n, m in call.lengths:
        i, j = torch.arange(n)[:, None] + (m - n), torch.arange(m)[None, :]
        visible = torch.ones(n, m, dtype=torch.bool)
        if left is not None:
            visible &= j >= i - left
        if right is not None:
            visible &= j <= i + right
        count[row : row + n, key : key + m] += visible
        row, key = row + n, key + m
    assert (row, key) == (call.rows.stop, call.keys.stop)
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6), ring=st.integers(1, 96))
def test_every_layout_holds_each_token_once_in_ascending_order(layout: str, lengths: list[int], ring: int) -> None:
    shards = LAYOUTS[layout](lengths, torch.ones(sum(lengths), dtype=torch.int64), ring)
    assert len(shards) == ring
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(sum(lengths)))
    assert all((ids.diff() > 0).all() for ids in shards)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_global", "striped"])
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6), ring=st.integers(1, 96))
def test_ranks_hold_equal_token_counts_up_to_one(layout: str, lengths: list[int], ring: int) -> None:
    sizes = [len(ids) for ids in LAYOUTS[layout](lengths, torch.ones(sum(lengths), dtype=torch.int64), ring)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ring", [8, 64])
def test_balanced_layout_balances_causal_documents(ring: int) -> None:
    mask = load(MASKS["causal_document"])(doc_lens=(30 * ring,) * 4 + (500 * ring, 380 * ring, 24 * ring))
    for plan in plans(mask, "balanced", ring)[:: ring // 2]:
        work = sum(step.segment.area for source in range(ring) if (step := plan.step((source,))))
        assert work == pytest.approx(mask.area() / ring, rel=0.05)


def test_every_block_of_a_striped_causal_mask_is_one_causal_call_of_nearly_equal_work() -> None:
    mask = load(MASKS["causal"])(64, 64)
    for plan in plans(mask, "striped", 4):
        for source in range(4):
            step = plan.step((source,))
            assert step is not None
            (call,) = step.segment.rounds
            assert call.is_causal and call.is_dense
            assert step.segment.area == (136 if source <= plan.own else 120)


def test_kernel_of_runs_gets_no_row_that_sees_nothing_at_the_ends() -> None:
    """Its calls leave such rows out anyhow; in a step they would be zeros to write and to add. Others compile for each shape."""
    case, sharing = Case(mask=load(MASKS["causal"]).default(96, 0), heads_q=2, heads_kv=1, head_dim=8, dtype="fp64"), Sharing("ring_p2p", 4)
    for kernel, first in ((VarlenBlock(), 1), (NaiveBlock(), 0)):
        plan = bind(case, replace(sharing, layout="striped"), World(1, 4, is_connected=False), kernel).plan
        later = plan.step((2,))  # each of its keys is behind the row of the same place
        assert later and (later.rows, later.keys) == (slice(first, 24), slice(0, 24 - first))


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize(("layout", "ring"), [("contiguous", 3), ("zigzag", 8), ("zigzag_global", 5), ("balanced", 7), ("striped", 4)])
def test_plan_tiles_the_mask_exactly_once(name: str, layout: str, ring: int) -> None:
    assert_plan_tiles(name, layout, ring)


@pytest.mark.parametrize(("name", "layout"), [("shared_question", "zigzag"), ("full_sliding_window", "balanced")])
def test_plan_tiles_the_mask_exactly_once_among_96_ranks(name: str, layout: str) -> None:
    assert_plan_tiles(name, layout, 96)


def assert_plan_tiles(name: str, layout: str, ring: int) -> None:
    """Block by block, as a ring meets them, and a rank's own block and all others as one, as a gather does."""
    mask = sample(name, 211, seed=ring)
    by_hops, by_gather = torch.zeros(2, 211, 211, dtype=torch.int64)
    for plan in plans(mask, layout, ring):
        for count, blocks in ((by_hops, [(source,) for source in range(ring)]), (by_gather, [(plan.own,), others(plan)])):
            for sources in blocks:
                if step := plan.step(sources):
                    ids = torch.cat([plan.shards[source] for source in sources]).sort().values
                    rows, keys = plan.shards[plan.own][step.rows], ids[step.keys]
                    count[rows[:, None], keys[None, :]] += step.segment.dense()
    for count in (by_hops, by_gather):
        assert torch.equal(count, mask.dense()[0, 0].to(torch.int64))


def others(plan: Plan) -> tuple[int, ...]:
    return tuple(source for source in range(len(plan.shards)) if source != plan.own)


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize(("layout", "ring"), [("contiguous", 4), ("zigzag", 4), ("balanced", 3), ("striped", 3)])
def test_rounds_compute_each_visible_cell_exactly_once(name: str, layout: str, ring: int) -> None:
    mask = sample(name, 173, seed=ring)
    for plan in plans(mask, layout, ring):
        for sources in [(source,) for source in range(ring)] + [others(plan)]:
            if step := plan.step(sources):
                assert_rounds_are_exact(step.segment)


def assert_rounds_are_exact(segment: Segment) -> None:
    total = torch.zeros(segment.num_rows, segment.num_keys, dtype=torch.int64)
    for call in segment.rounds:
        total += cells(call, segment.num_rows, segment.num_keys)
    assert torch.equal(total, segment.dense().to(torch.int64))


def test_gaps_of_a_round_can_be_packed_away() -> None:
    intervals = torch.tensor([[(2, 4), (0, 0)], [(0, 0), (0, 0)], [(5, 8), (0, 0)], [(5, 9), (0, 0)]], dtype=torch.int32)
    gaps = [call for call in Segment(intervals, 9).rounds if not call.is_dense]
    for call in gaps:
        rows, keys = call.members
        packed = call.without_gaps
        assert packed.lengths == tuple((run.q1 - run.q0, run.k1 - run.k0) for run in call.runs) and packed.window == call.window
        count = cells(packed, len(rows), len(keys))
        whole = torch.zeros(call.rows.stop, call.keys.stop, dtype=torch.int64)
        whole[(call.rows.start + rows)[:, None], (call.keys.start + keys)[None, :]] = count
        assert torch.equal(whole, cells(call, call.rows.stop, call.keys.stop))
    assert gaps


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rounds_are_exact_for_any_intervals(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 12))
    row = st.lists(st.integers(0, keys), min_size=4, max_size=4).map(sorted)
    rows = data.draw(st.lists(row, min_size=1, max_size=14))
    intervals = torch.tensor([[(a, b), (c, d)] if b < c else [(a, max(b, d)), (0, 0)] for a, b, c, d in rows], dtype=torch.int32)
    assert_rounds_are_exact(Segment(intervals, keys))


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_rounds_are_exact_where_more_rows_than_keys_see_a_window_end(ring: int) -> None:
    """With a window of half the sequence a zigzag rank's whole share looks at the last keys of an early chunk."""
    mask = load(MASKS["causal_sliding_window"])(seqlen_q=160, seqlen_kv=160, window=80)
    for plan in plans(mask, "zigzag", ring):
        for source in range(ring):
            if step := plan.step((source,)):
                assert_rounds_are_exact(step.segment)


def test_window_of_a_ring_falls_into_few_runs() -> None:
    mask = load(MASKS["causal_sliding_window"])(seqlen_q=32768, seqlen_kv=32768, window=1024)
    steps = [step for plan in plans(mask, "zigzag", 4) for source in range(4) if (step := plan.step((source,)))]
    assert sum(len(call.runs) for step in steps for call in step.segment.rounds) <= 33


@pytest.mark.parametrize("name", MASK_GROUPS["regular"])
def test_a_whole_regular_mask_is_one_varlen_call(name: str) -> None:
    mask = sample(name, 300, seed=3)
    step = plans(mask, "contiguous", 1)[0].step((0,))
    assert step is not None and len(step.segment.rounds) == 1


def test_one_row_runs_join_the_causal_call() -> None:
    mask = load(MASKS["causal_document"])(doc_lens=(1, 5, 1, 1, 9))
    step = plans(mask, "contiguous", 1)[0].step((0,))
    assert step is not None and [len(call.runs) for call in step.segment.rounds] == [5]


def test_rows_without_keys_are_in_no_run() -> None:
    start, stop = torch.tensor([0, 0, 3, 0]).numpy(), torch.tensor([0, 0, 5, 0]).numpy()
    assert [(run.q0, run.q1) for run in find_runs(start, stop)] == [(2, 3)]
