"""FlashMask as a block kernel of context parallelism, in Triton's interpreter: any rows, any keys, the softmax of all."""

from random import Random

import pytest
import torch
import triton

from pytest_longca import catalogue
from pytest_longca.errors import DidNotRun
from pytest_longca.parallel.kernel import NaiveBlock, find_block_kernel
from pytest_longca.parallel.segment import Segment

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton was imported for a GPU, not for its interpreter")


def segment_of(name: str, rows: list[int], keys: slice) -> Segment:
    """What some queries of a sampled mask of 48 tokens see of some neighbouring keys."""
    mask = catalogue.load(catalogue.MASKS[name]).sample(Random(name), 48)
    intervals = (mask.row_intervals()[0, 0, rows] - keys.start).clamp(0, keys.stop - keys.start)
    intervals[intervals[..., 0] >= intervals[..., 1]] = 0
    moved = (intervals[:, 0, 1] == 0) & (intervals[:, 1, 1] > 0)
    intervals[moved] = intervals[moved].flip(1)
    return Segment(intervals, keys.stop - keys.start)


@interpreted
@pytest.mark.parametrize("name", catalogue.MASK_GROUPS["static"])
def test_a_block_of_any_static_mask_is_that_of_the_naive_one(name):
    torch.manual_seed(0)
    rows = [*range(5, 17), *range(31, 43)]  # what a zigzag layout gives a rank
    segment = segment_of(name, rows, slice(8, 41))
    q, do = torch.randn(2, len(rows), 2, 16).unbind()
    k, v = torch.randn(2, segment.num_keys, 1, 16).unbind()
    ours, plain = find_block_kernel("flashmask"), NaiveBlock()
    for got, true in zip(ours.block_forward(q, k, v, segment, 0.25), plain.block_forward(q, k, v, segment, 0.25), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)
    out, lse = torch.randn(len(rows), 2, 16), 5 + torch.rand(2, len(rows))  # of a larger softmax
    gradients = (kernel.block_backward(do, q, k, v, out, lse, segment, 0.25) for kernel in (ours, plain))
    for got, true in zip(*gradients, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)


@interpreted
def test_a_plan_is_made_once_for_each_segment_and_number_of_heads():
    segment = segment_of("causal", list(range(48)), slice(0, 48))
    ours = find_block_kernel("flashmask")
    for heads in (2, 2, 4):
        ours.block_forward(torch.randn(48, heads, 16), *torch.randn(2, 48, 2, 16), segment, 0.25)
    assert len(segment.cache) == 2


@interpreted
def test_a_segment_of_three_masked_runs_is_refused():
    intervals = torch.zeros(8, 2, 2, dtype=torch.int32)
    intervals[1::2, 0, 1] = 4
    with pytest.raises(DidNotRun, match="two runs of masked queries"):
        find_block_kernel("flashmask").block_forward(torch.randn(8, 1, 16), *torch.randn(2, 4, 1, 16), Segment(intervals, 4), 0.25)
