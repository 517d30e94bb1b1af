"""cuDNN on one block of context parallelism: fused attention by the runs of a segment, flex_attention by its row intervals as they stand.

Both have an explicit backward that takes the merged out and lse. Operands that TMA cannot load are copied.
"""

import contextlib
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.intervals import endpoint_rows
from pytest_longca.kernels.cudnn import Cudnn
from pytest_longca.kernels.cudnn_flex import CudnnFlex
from pytest_longca.packing import aligned
from pytest_longca.parallel.kernel import INTERVALS, VarlenBlock
from pytest_longca.parallel.segment import Round, Segment


class CudnnFlexBlock:
    """cudnn.flex_attention: any segment in one call. A mask plan is made once for each segment and shape."""

    name = "cudnn_flex"
    capabilities = CudnnFlex.capabilities

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        from cudnn.flex_attention.execution import _flex_attention_forward

        q, k, v = (aligned(x)[None] for x in (q, k, v))
        result = _flex_attention_forward(q, k, v, mask_plan=_plan(q, k, v, segment), softmax_scale=scale, return_lse=True)
        return result["o_tensor"][0], result["lse_tensor"][0]

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from cudnn.flex_attention.execution import _flex_attention_backward

        q, k, v, out, do = (aligned(x)[None] for x in (q, k, v, out, do))
        result = _flex_attention_backward(q, k, v, out, do, lse.contiguous()[None], mask_plan=_plan(q, k, v, segment), softmax_scale=scale)
        dq, dk, dv = (result[name][0] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))
        return dq, dk, dv


def _plan(q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Any:
    """cuDNN's mask plan of a segment for these shapes. Its compiler reports on stdout, which belongs to whoever runs us: to stderr."""
    key = ("cudnn_flex", q.shape, k.shape, v.shape, q.dtype)
    if key not in segment.cache:
        from cudnn.flex_attention.api import create_mask_plan

        with contextlib.redirect_stdout(sys.stderr):
            segment.cache[key] = create_mask_plan(endpoint_rows(segment.intervals[None, None]), q, k, v, build_backward=True)
    return segment.cache[key]


class CudnnBlock(VarlenBlock):
    """cuDNN's fused attention, one call a round: BHSD views for one run, THD for several.

    cuDNN leaves rows without keys unwritten, so the rows and keys of several runs are packed, and results put back in their places.
    """

    name = "cudnn"
    capabilities = replace(Cudnn.capabilities, masks=INTERVALS)

    def round_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Round, scale: float) -> tuple[Tensor, Tensor]:
        import cudnn.sdpa.fwd.torch_op  # noqa: F401  # registers the operators

        if call.is_dense:
            out, stats = torch.ops.cudnn.sdpa_fwd(*(_bhsd(x) for x in (q, k, v)), scale, return_lse=True, **_mask(call))
            return out[0].transpose(0, 1), stats[0, ..., 0]
        rows, keys = call.members
        packed, operands = call.without_gaps, (q[rows], k[keys], v[keys])
        out, stats = torch.ops.cudnn.sdpa_fwd(*operands, scale, return_lse=True, **_mask(call), **_lengths(packed))
        lse = stats.new_full((len(q), q.shape[1]), -torch.inf)
        lse[rows] = stats[..., 0]
        return _spread(out, rows, len(q)), lse.T.contiguous()

    def round_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Round, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from cudnn.sdpa.fwd.torch_op import thd_lse_to_padded

        mask = _mask(call)
        flags = (scale, mask["is_causal"], mask["causal_bottom_right"], mask["window_left"], mask["window_right"], None)
        if call.is_dense:
            operands = (_bhsd(x) for x in (do.contiguous(), q, k, v, out.contiguous()))  # cuDNN wants do and out of the same strides
            grads = torch.ops.cudnn.sdpa_bwd(*operands, lse[None, ..., None], *flags, None, None, 0, 0)
            dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
            return dq, dk, dv
        rows, keys = call.members
        packed = call.without_gaps
        padded = thd_lse_to_padded(lse.T[rows], packed.cu_seqlens_q, packed.max_seqlen_q)
        dq, dk, dv = torch.ops.cudnn.sdpa_bwd(do[rows], q[rows], k[keys], v[keys], out[rows], padded, *flags, *_lengths(packed).values())
        return _spread(dq, rows, len(q)), _spread(dk, keys, len(k)), _spread(dv, keys, len(v))


def _spread(x: Tensor, places: Tensor, total: int) -> Tensor:
    """`x` at its places among `total` rows, 0 elsewhere."""
    whole = x.new_zeros(total, *x.shape[1:])
    whole[places] = x
    return whole


def _bhsd(x: Tensor) -> Tensor:
    return aligned(x)[None].transpose(1, 2)


def _mask(call: Round) -> dict[str, Any]:
    """The window as cuDNN takes it: the left side counts the first key that is hidden; bottom-right only together with a band."""
    left, right = call.window
    return {
        "is_causal": right == 0,
        "causal_bottom_right": call.window != (None, None),
        "window_left": -1 if left is None else left + 1,
        "window_right": -1 if right in (None, 0) else right,
    }


def _lengths(call: Round) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_kv": call.cu_seqlens_kv,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_kv": call.max_seqlen_kv,
    }
