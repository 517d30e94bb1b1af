"""Up to three partial attention outputs merged, or gradients added, by one Triton kernel: an element is read and written once."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 16
MOST = 3
"""Partial results of a merge or a sum."""


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out_c, lse_c, out, lse,
    num_rows, dim,
    stride_out_a, stride_out_b, stride_out_c, stride_out,
    stride_head_a, stride_head_b, stride_head_c, stride_head,
    stride_lse_a, stride_lse_b, stride_lse_c, stride_lse,
    COUNT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    in_rows = row < num_rows
    row = row.to(tl.int64)
    row_2d, column_2d = row[:, None], column[None, :]
    mask = in_rows[:, None] & (column < dim)[None, :]
    a = tl.load(lse_a + head * stride_lse_a + row, mask=in_rows, other=float("-inf"))
    b = tl.load(lse_b + head * stride_lse_b + row, mask=in_rows & (COUNT > 1), other=float("-inf"))
    c = tl.load(lse_c + head * stride_lse_c + row, mask=in_rows & (COUNT > 2), other=float("-inf"))
    top = tl.maximum(a, tl.maximum(b, c))
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(a - finite) + tl.exp(b - finite) + tl.exp(c - finite)
    safe = tl.where(total == 0.0, 1.0, total)
    scale = 1.0 / safe
    x = tl.load(out_a + row_2d * stride_out_a + head * stride_head_a + column_2d, mask=mask, other=0.0).to(tl.float32)
    merged = x * (tl.exp(a - finite) * scale)[:, None]
    if COUNT > 1:
        x = tl.load(out_b + row_2d * stride_out_b + head * stride_head_b + column_2d, mask=mask, other=0.0).to(tl.float32)
        merged += x * (tl.exp(b - finite) * scale)[:, None]
    if COUNT > 2:
        x = tl.load(out_c + row_2d * stride_out_c + head * stride_head_c + column_2d, mask=mask, other=0.0).to(tl.float32)
        merged += x * (tl.exp(c - finite) * scale)[:, None]
    tl.store(out + row_2d * stride_out + head * stride_head + column_2d, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * stride_lse + row, tl.where(total == 0.0, float("-inf"), finite + tl.log(safe)), mask=in_rows)


def launch(target: tuple[Tensor, Tensor], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Merge `parts` into `target` (see `merge.merge_into`). The last axis of each must be dense."""
    num_rows, heads, dim = target[0].shape
    assert 1 <= len(parts) <= MOST, f"{len(parts)} outputs: a merge has at most {MOST}"
    assert all(x.stride(-1) == 1 for pair in (target, *parts) for x in pair if x.shape[-1] > 1), "merge needs a dense last axis"
    operands = [*parts, *[parts[0]] * (MOST - len(parts)), target]  # those beyond the count are not read
    outs, lses = zip(*operands, strict=True)
    strides = [*(x.stride(0) for x in outs), *(x.stride(1) for x in outs), *(x.stride(0) for x in lses)]
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), heads)
    sizes = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_DIM": triton.next_power_of_2(dim)}
    _merge[grid](*(x for pair in operands for x in pair), num_rows, dim, *strides, COUNT=len(parts), **sizes)


@triton.jit
def _sum(
    a, b, c, out,
    num_rows, dim,
    stride_a, stride_b, stride_c, stride_out,
    stride_head_a, stride_head_b, stride_head_c, stride_head_out,
    COUNT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (row < num_rows) & (column < dim)
    total = tl.load(a + row * stride_a + head * stride_head_a + column, mask=mask, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(b + row * stride_b + head * stride_head_b + column, mask=mask, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(c + row * stride_c + head * stride_head_c + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + head * stride_head_out + column, total.to(out.dtype.element_ty), mask=mask)


def launch_sum(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of `parts`, `[rows, heads, dim]` each, to `target` (see `merge.sum_into`), whose last axis must be dense."""
    num_rows, heads, dim = target.shape
    assert 1 <= len(parts) <= MOST, f"{len(parts)} tensors: a sum has at most {MOST}"
    assert target.stride(-1) == 1, "a sum needs a dense last axis"
    operands = [x if x.stride(-1) == 1 else x.contiguous() for x in parts]
    operands += operands[:1] * (MOST - len(parts))  # not read
    strides = [x.stride(axis) for axis in (0, 1) for x in (*operands, target)]
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), heads)
    sizes = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_DIM": triton.next_power_of_2(dim)}
    _sum[grid](*operands, target, num_rows, dim, *strides, COUNT=len(parts), **sizes)
