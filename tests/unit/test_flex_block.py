"""FlexAttention as a block kernel: its forward eagerly, and the rule by which its own autograd gives its part of a merged backward."""

import pytest
import torch
from torch import Tensor

from pytest_longca.kernels.blocks_flex import FlexBlock
from pytest_longca.parallel.kernel import NaiveBlock
from pytest_longca.parallel.merge import OutSum
from pytest_longca.parallel.segment import Segment

ROWS, KEYS = 24, 40
INTERVALS = torch.zeros(ROWS, 2, 2, dtype=torch.int32)
INTERVALS[:, 0] = torch.tensor([0, 3])
INTERVALS[:, 1, 0], INTERVALS[:, 1, 1] = torch.arange(ROWS) + 5, torch.arange(ROWS) + 12
INTERVALS[7] = 0  # a row that sees no key


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((ROWS, 4), (ROWS, 4), (KEYS, 2), (KEYS, 2))
    q, do, k, v = (torch.randn(*shape, 16, generator=generator, dtype=dtype) for shape in shapes)
    return do, q, k, v


class OtherAttention(FlexBlock):
    """The rule around an attention whose autograd runs on the CPU."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = segment.dense()
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -1e30)
        lse = torch.logsumexp(scores, -1).masked_fill(~seen.any(1), -torch.inf)
        weights = torch.softmax(scores, -1).masked_fill(~seen, 0)
        return torch.einsum("hqk,khd->qhd", weights, v), lse


def test_forward_is_that_of_dense_attention() -> None:
    _, q, k, v = operands(torch.float32)
    segment = Segment(INTERVALS, KEYS)
    for found, truth in zip(
        FlexBlock().block_forward(q, k, v, segment, 0.3), NaiveBlock().block_forward(q, k, v, segment, 0.3), strict=True
    ):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [slice(0, 20), slice(20, KEYS)])
def test_gradients_of_a_block_are_its_part_of_the_merged_attention(half: slice) -> None:
    do, q, k, v = operands(torch.float64)
    cut = (INTERVALS - half.start).clamp(0, half.stop - half.start)
    cut[cut[..., 0] >= cut[..., 1]] = 0
    moved = (cut[:, 0, 1] == 0) & (cut[:, 1, 1] > 0)
    cut[moved] = cut[moved].flip(1)
    whole, block, naive = Segment(INTERVALS, KEYS), Segment(cut, half.stop - half.start), NaiveBlock()
    total = OutSum(q, dim=16)
    total.add(slice(0, ROWS), *naive.block_forward(q, k, v, whole, 0.3))
    out, lse = total.result()
    found, truth = (kernel.block_backward(do, q, k[half], v[half], out, lse, block, 0.3) for kernel in (OtherAttention(), naive))
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
