"""Launches the Triton kernels of block-sparse attention, and makes them one differentiable function. Importing this imports triton."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pytest_longca.kernels.tile_widths import tile_widths
from pytest_longca.kernels.triton_codes import for_strides
from pytest_longca.kernels.vsa_triton_kernels import vsa_triton_dkdv, vsa_triton_dq, vsa_triton_forward

if TYPE_CHECKING:
    from pytest_longca.kernels.vsa_triton import Config, Plan, Side

LOG2E = 1.4426950408889634


def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, plan: "Plan", scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of BSHD operands under a plan's block map; out is differentiable."""
    out, lse = BlockSparseAttention.apply(q, k, v, plan, scale)
    return out, lse


class BlockSparseAttention(torch.autograd.Function):
    """`(q, k, v, plan, scale) -> (out, lse)` in BSHD; lse is not differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: "Plan", scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (_unit_stride(x) for x in (q, k, v))
        out, lse = launch_forward(q, k, v, plan, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *launch_backward(q, k, v, out, lse, _unit_stride(grads[0]), ctx.plan, ctx.scale), None, None


def launch_forward(q: Tensor, k: Tensor, v: Tensor, plan: "Plan", scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, lse fp32 `[batch, heads_q, seqlen_q]`."""
    batch, seqlen_q, heads_q, _ = q.shape
    out = torch.empty(batch, seqlen_q, heads_q, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads_q, seqlen_q, dtype=torch.float32, device=q.device)
    side, config = plan.forward, plan.configs.forward
    widths = tile_widths(q.shape[-1], v.shape[-1])
    tma, readers = _readers(config, config.block_n, k, v)
    strides = _strides(q, k, v, out)
    for_strides(vsa_triton_forward, strides)[side.num_tiles, batch * heads_q](
        q, v, *readers, out, lse, *_side(side), heads_q, heads_q // k.shape[2], seqlen_q, scale * LOG2E,
        *strides, **_shapes(q, v, side, config, widths), TMA=tma, IN_REGISTERS=_in_registers(widths, config),
    )  # fmt: skip
    return out, lse


def launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, plan: "Plan", scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of a forward's out and lse."""
    assert plan.dq is not None and plan.dkdv is not None, "the plan was made for a forward only"
    batch, seqlen_q, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    sizes = (heads_q // heads_kv, seqlen_q, scale * LOG2E, scale)
    widths = tile_widths(q.shape[-1], v.shape[-1])
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)

    side, config = plan.dq, plan.configs.dq
    tma, readers = _readers(config, config.block_n, k, v)
    strides = _strides(q, k, v, out, do, dq)
    for_strides(vsa_triton_dq, strides)[side.num_tiles, batch * heads_q](
        q, k, v, *readers, out, lse, do, delta, dq, *_side(side), heads_q, *sizes,
        *strides, **_shapes(q, v, side, config, widths), TMA=tma, IN_REGISTERS=_in_registers(widths, config),
    )  # fmt: skip

    side, config = plan.dkdv, plan.configs.dkdv
    tma, readers = _readers(config, config.block_m, q, do)
    strides = _strides(q, k, v, do, dk, dv)
    for_strides(vsa_triton_dkdv, strides)[side.num_tiles, batch * heads_kv](
        q, k, v, *readers, lse, do, delta, dk, dv, *_side(side, side.lists.part), heads_kv, *sizes,
        *strides, **_shapes(q, v, side, config, widths), TMA=tma, GROUPED=side.lists.part is not None,
    )  # fmt: skip
    return dq, dk, dv


def _side(side: "Side", *part: Tensor | None) -> tuple[Any, ...]:
    rows, lists = side.rows, side.lists
    pointers = (side.order, rows.start, rows.stop, rows.block, lists.indptr, lists.num_full, lists.start, lists.stop, *part)
    return *pointers, side.num_tiles, side.num_blocks, int(side.map_heads > 1)


def _shapes(q: Tensor, v: Tensor, side: "Side", config: "Config", widths: tuple[int, int]) -> dict[str, Any]:
    """What the kernels are compiled for; `widths` are the columns of a tile of keys and of values."""
    d, dv = q.shape[-1], v.shape[-1]
    padded, padded_v = widths
    return {
        "D": d, "DV": dv, "HEAD_DIM": padded, "HEAD_DIM_V": padded_v, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "FULL_OWN": side.full_own, "FULL_OTHER": side.lists.stop is None, "PAD_D": padded != d, "PAD_V": padded_v != dv,
        "num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers,
    }  # fmt: skip


def _in_registers(widths: tuple[int, int], config: "Config") -> bool:
    return all(config.keeps_in_registers(width) for width in widths)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _readers(config: "Config", rows: int, *tensors: Tensor) -> tuple[bool, list[Any]]:
    """(whether by descriptors, what the kernel reads unmasked tiles of each tensor of the other side through)."""
    found = [descriptor(x, rows) for x in tensors] if config.tma else [None]
    return (False, list(tensors)) if None in found else (True, found)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    """BSHD `x` as a matrix whose row is one token's stride, read in tiles of `rows` tokens; None where its strides do not allow that.

    Token s of head h in batch b starts at row `b * (stride_b // stride_s) + h * (stride_h // stride_s) + s` and at column
    `h * (stride_h % stride_s)`.
    """
    batch, seqlen, heads, dim = x.shape
    stride_b, stride_s, stride_h, _ = x.stride()
    if stride_s == 0 or stride_s * x.element_size() % 16 or x.data_ptr() % 16 or dim not in (64, 128):
        return None
    rows_b, off_b = divmod(stride_b, stride_s) if batch > 1 else (0, 0)
    rows_h, columns_h = divmod(stride_h, stride_s) if heads > 1 else (0, 0)
    width = columns_h * (heads - 1) + dim
    if off_b or width > stride_s:
        return None
    return TensorDescriptor(x, [rows_b * (batch - 1) + rows_h * (heads - 1) + seqlen, width], [stride_s, 1], [rows, dim])
