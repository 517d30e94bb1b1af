"""FlashMask as a function: launches the Triton kernels under a plan, forward and backward, and ties them to autograd.

Importing this module imports triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_longca.kernels import flashmask_backward as backward
from pytest_longca.kernels import flashmask_forward as forward
from pytest_longca.kernels.flashmask_plan import Launch, Plan, Schedule, Tile
from pytest_longca.kernels.tile_widths import padded, tile_widths
from pytest_longca.kernels.triton_codes import for_strides

LOG2_E = 1.4426950408889634
ROW_TAIL, COLUMN_TAIL = 0.05, 0.15
"""Heads take turns block by block once the heaviest program takes this share of the run; below, a head's keys stay in the L2 cache.

For out and dq, and for dk and dv, whose last programs are split.
"""


def attention_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, launch: Launch) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of BSHD operands: out `[batch, seqlen_q, heads_q, head_dim_v]`, lse fp32 `[batch, heads_q, seqlen_q]`, natural log."""
    batch, seqlen_q, heads_q, _ = q.shape
    q, k, v = map(_inner_contiguous, (q, k, v))
    out = q.new_empty(batch, seqlen_q, heads_q, v.shape[-1])
    lse = q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float32)
    tile, tma = launch.fwd, launch.tma and _fits_tma(k, v)
    grid, order = _placement(plan.fwd, plan.rows.shape[0], batch, heads_q, heads_q // k.shape[2], launch)
    strides = (*_strides(q), *_strides(k, v, tma=tma), *_strides(out))
    for_strides(forward.forward_kernel, strides)[grid](
        q, _streamed(k, tile, tma), _streamed(v, tile, tma), out, lse,
        plan.rows, plan.runs, plan.fwd.items, *order, heads_q, heads_q // k.shape[2],
        _blocks(seqlen_q, tile), seqlen_q, k.shape[1], seqlen_q, scale * LOG2_E, *strides,
        **_of_rows(tile, plan), **_constants(q, v, tma), **_options(tile),
    )  # fmt: skip
    return out, lse


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, scale: float, launch: Launch
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` from the softmax that `out` and `lse` belong to: this plan's own, or a merged one that this plan is a part of."""
    assert plan.dq is not None and plan.dkdv is not None, "the plan was made for the forward alone"
    do, q, k, v, out = map(_inner_contiguous, (do, q, k, v, out))
    lse = lse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    stats = q.new_empty(2, *lse.shape[:2], _blocks(q.shape[1], launch.dq) * launch.dq.block, dtype=torch.float32)
    tma = launch.tma and _fits_tma(do, q, k, v)
    _launch_dq((do, q, k, v, out, dq), lse, stats, plan, plan.dq, scale, launch, tma)
    _launch_dkdv((do, q, k, v, dk, dv), stats, plan, plan.dkdv, scale, launch, tma)
    return dq, dk, dv


def _launch_dq(
    tensors: Sequence[Tensor], lse: Tensor, stats: Tensor, plan: Plan, schedule: Schedule, scale: float, launch: Launch, tma: bool
) -> None:
    do, q, k, v, out, dq = tensors
    batch, seqlen_q, heads_q, _ = q.shape
    tile, group = launch.dq, heads_q // k.shape[2]
    grid, order = _placement(schedule, plan.rows.shape[0], batch, heads_q, group, launch)
    strides = (*_strides(q), *_strides(k, v, tma=tma), *_strides(out, do, dq))
    for_strides(backward.dq_kernel, strides)[grid](
        q, _streamed(k, tile, tma), _streamed(v, tile, tma), out, do, dq, lse, stats,
        plan.rows, plan.runs, schedule.items, *order, heads_q, group, _blocks(seqlen_q, tile),
        seqlen_q, k.shape[1], seqlen_q, stats.shape[-1], stats.numel() // 2, scale * LOG2_E, scale, *strides,
        **_of_rows(tile, plan), **_constants(q, v, tma), **_options(tile),
    )  # fmt: skip


def _launch_dkdv(tensors: Sequence[Tensor], stats: Tensor, plan: Plan, schedule: Schedule, scale: float, launch: Launch, tma: bool) -> None:
    do, q, k, v, dk, dv = tensors
    batch, seqlen_kv, heads_kv, _ = k.shape
    tile, blocks, constants = launch.dkdv, _blocks(seqlen_kv, launch.dkdv), _constants(q, v, tma)
    parts = heads_kv * (batch if plan.rows.shape[0] == 1 else 1)
    widths = constants["BLOCK_D"], constants["BLOCK_DV"]
    dk_parts, dv_parts = (q.new_empty(max(1, schedule.slots * parts * tile.block * width), dtype=torch.float32) for width in widths)
    grid, order = _placement(schedule, plan.rows.shape[0], batch, heads_kv, 1, launch, COLUMN_TAIL)
    strides = (*_strides(q, tma=tma), *_strides(k, v), *_strides(do, tma=tma), *_strides(dk, dv))
    for_strides(backward.dkdv_kernel, strides)[grid](
        _streamed(q, tile, tma), k, v, _streamed(do, tile, tma), dk, dv,
        dk_parts, dv_parts, stats, plan.columns, plan.runs, schedule.items,
        *order, heads_kv, q.shape[2], blocks, q.shape[1], seqlen_kv, seqlen_kv,
        stats.shape[-1], stats.numel() // 2, parts, scale * LOG2_E, scale, *strides,
        BLOCK_N=tile.block, BLOCK_M=tile.step, PIECES=plan.column_pieces, EARLY=tile.early,
        IN_REGISTERS=tile.in_registers, **constants, **_options(tile),
    )  # fmt: skip
    if not schedule.slots:
        return
    rows = min(16, tile.block)
    for grad, grad_parts, width in ((dk, dk_parts, widths[0]), (dv, dv_parts, widths[1])):
        strides = _strides(grad)
        for_strides(backward.sum_parts_kernel, strides)[len(schedule.splits), parts, tile.block // rows](
            grad, grad_parts, schedule.splits, heads_kv, blocks, seqlen_kv, parts, *strides,
            DIM=grad.shape[-1], BLOCK_N=tile.block, BLOCK_D=width, ROWS=rows,
        )  # fmt: skip


def _placement(
    schedule: Schedule, mask_batch: int, batch: int, heads: int, group: int, launch: Launch, tail: float = ROW_TAIL
) -> tuple[tuple[int], tuple[int, int, int]]:
    """The grid, and (items, bulk, heads that take turns on an item); see `flashmask_forward.place`."""
    items, lanes = len(schedule.items), heads * (batch if mask_batch == 1 else 1)
    share = schedule.longest * launch.processors / max(1, items * lanes)
    return (items * lanes,), (items, 0 if share > tail else schedule.whole, group)


def _blocks(seqlen: int, tile: Tile) -> int:
    return -(-seqlen // tile.block)


def _of_rows(tile: Tile, plan: Plan) -> dict[str, Any]:
    """The compile-time constants of the two kernels whose programs own queries."""
    return {"BLOCK_M": tile.block, "BLOCK_N": tile.step, "PIECES": plan.row_pieces, "IN_REGISTERS": tile.in_registers}


def _constants(q: Tensor, v: Tensor, tma: bool) -> dict[str, Any]:
    """The compile-time constants that every kernel takes."""
    dims = {"DIM": q.shape[-1], "DIM_V": v.shape[-1]}
    widths = tuple(map(padded, dims.values())) if tma else tile_widths(*dims.values())
    return dims | {"BLOCK_D": widths[0], "BLOCK_DV": widths[1], "TMA": tma, "PRECISION": "ieee"}


def _options(tile: Tile) -> dict[str, int]:
    limit = {"maxnreg": tile.max_registers} if tile.max_registers else {}
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages} | limit


def _inner_contiguous(x: Tensor) -> Tensor:
    """The tensor itself if its last axis is contiguous, which is all that the kernels ask; else a copy (an expanded gradient, say)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*operands: Tensor, tma: bool = False) -> tuple[int, ...]:
    """The strides of batch, sequence and heads of each; zeros with TMA, whose descriptor has them."""
    return (0, 0, 0) * len(operands) if tma else tuple(stride for x in operands for stride in x.stride()[:3])


def _streamed(x: Tensor, tile: Tile, tma: bool) -> Any:
    """An operand that a program walks through in tiles of `tile.step` rows: a descriptor with TMA, else itself."""
    if not tma:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, tile.step, 1, padded(x.shape[-1])])


def _fits_tma(*operands: Tensor) -> bool:
    """Whether the hardware can address these operands: 16-byte aligned starts and strides, no shared rows."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1]) for x in operands
    )


class FlashMaskFunction(torch.autograd.Function):
    """Differentiable `(q, k, v, plan, scale, launch) -> (out, lse)`; lse carries no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, launch: Launch) -> tuple[Tensor, Tensor]:
        out, lse = attention_forward(q, k, v, plan, scale, launch)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.plan, ctx.scale, ctx.launch = plan, scale, launch
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *attention_backward(do, q, k, v, out, lse, ctx.plan, ctx.scale, ctx.launch), None, None, None
