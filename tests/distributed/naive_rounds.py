"""A block kernel of runs for the CPU."""

import torch

from pytest_longca.parallel.kernel import NaiveBlock, VarlenBlock
from pytest_longca.parallel.segment import Round, Segment


class NaiveRounds(VarlenBlock):
    """A varlen backend as it should be: each sequence of a call by dense attention, bottom-right aligned."""

    name = "naive_rounds"
    capabilities = NaiveBlock.capabilities

    def round_forward(self, q, k, v, call, scale):  # type: ignore[no-untyped-def]  # as in the base class
        return NaiveBlock().block_forward(q, k, v, _segment(call), scale)

    def round_backward(self, do, q, k, v, out, lse, call, scale):  # type: ignore[no-untyped-def]  # as in the base class
        return NaiveBlock().block_backward(do, q, k, v, out, lse, _segment(call), scale)


def _segment(call: Round) -> Segment:
    """What FlashAttention would compute for the call's cu_seqlens and window, as intervals."""
    left, right = call.window
    ends_q, ends_kv = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
    intervals = torch.zeros(ends_q[-1], 2, 2, dtype=torch.int32)
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_kv, ends_kv[1:], strict=False):
        diagonal = torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0)
        first = torch.zeros_like(diagonal) if left is None else (diagonal - left).clamp(min=0)
        last = torch.full_like(diagonal, k1 - k0) if right is None else (diagonal + right + 1).clamp(max=k1 - k0)
        seen = torch.stack((k0 + first, k0 + last), -1)
        intervals[q0:q1, 0] = seen.masked_fill((last <= first)[:, None], 0).to(torch.int32)
    return Segment(intervals, ends_kv[-1])
