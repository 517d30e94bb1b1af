"""Block kernels judged on single segments: right ones pass where a gradient is exactly 0 too, wrong ones do not."""

from random import Random

import pytest
import torch
from torch import Tensor

from pytest_longca.catalogue import MASKS, load
from pytest_longca.parallel.block_check import judge_block, worst
from pytest_longca.parallel.kernel import NaiveBlock
from pytest_longca.parallel.layout import LAYOUTS
from pytest_longca.parallel.plan import Plan
from pytest_longca.parallel.segment import Segment
from pytest_longca.parallel.setup import document_lengths


def segment(rows: list[tuple[int, int]], keys: int) -> Segment:
    """One interval for each row."""
    return Segment(torch.tensor([[(a, b) if a < b else (0, 0), (0, 0)] for a, b in rows], dtype=torch.int32), keys)


ONE_KEY = segment([(i, i + 1) for i in range(40)], 40)


class OneKeyMore(NaiveBlock):
    """Every row sees the key after its last one."""

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        moved = segment.intervals.clone()
        moved[:, 0, 1] = (moved[:, 0, 1] + 1).clamp(max=segment.num_keys)
        return super().block_forward(q, k, v, Segment(moved, segment.num_keys), scale)


class LeaksGradient(NaiveBlock):
    """A hundredth of do is in dq, which is exactly 0 where every row sees one key."""

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().block_backward(do, q, k, v, out, lse, segment, scale)
        return dq + 0.01 * do, dk, dv


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_one_key_have_gradients_of_zero_and_limits_above(dtype: str) -> None:
    verdicts = {verdict.tensor: verdict for verdict in judge_block(NaiveBlock(), ONE_KEY, dtype)}
    assert set(verdicts) == {"out", "lse", "dq", "dk", "dv"}
    assert worst(list(verdicts.values())).error_over_limit <= 1


def test_gradient_that_should_be_zero_and_is_not_is_wrong() -> None:
    assert [verdict.tensor for verdict in judge_block(LeaksGradient(), ONE_KEY, "bf16") if not verdict.ok] == ["dq"]


def test_wrong_mask_is_wrong_in_out_and_lse() -> None:
    wrong = {verdict.tensor for verdict in judge_block(OneKeyMore(), segment([(0, i) for i in range(20)], 30), "bf16") if not verdict.ok}
    assert {"out", "lse"} <= wrong


@pytest.mark.parametrize("name", ["causal_sliding_window", "global_sliding_window", "prefix_lm_document"])
def test_blocks_of_a_ring_are_within_their_limits(name: str) -> None:
    mask = load(MASKS[name]).sample(Random(7), 160)
    intervals = mask.row_intervals()[0, 0]
    shards = LAYOUTS["zigzag"](document_lengths(mask), (intervals[..., 1] - intervals[..., 0]).sum(1), 4)
    for own in (1, 3):
        plan = Plan(intervals, shards, own, torch.device("cpu"))
        steps = [step for source in range(4) if (step := plan.step((source,)))]
        assert steps
        for step in steps:
            assert worst(judge_block(NaiveBlock(), step.segment, "bf16")).ok
