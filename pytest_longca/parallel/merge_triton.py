"""The merge of two partial attention outputs as one Triton kernel: each element is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 16


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse,
    num_rows, dim,
    stride_out_a, stride_out_b, stride_out,
    stride_lse_a, stride_lse_b, stride_lse,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    in_rows = row < num_rows
    row = row.to(tl.int64)
    a = tl.load(lse_a + head * stride_lse_a + row, mask=in_rows, other=float("-inf"))
    b = tl.load(lse_b + head * stride_lse_b + row, mask=in_rows, other=float("-inf"))
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - finite), tl.exp(b - finite)
    total = weight_a + weight_b
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    mask = in_rows[:, None] & (column < dim)[None, :]
    at = head * dim + column[None, :]
    x = tl.load(out_a + row[:, None] * stride_out_a + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_DIM]
    y = tl.load(out_b + row[:, None] * stride_out_b + at, mask=mask, other=0.0).to(tl.float32)
    merged = x * (weight_a * scale)[:, None] + y * (weight_b * scale)[:, None]
    tl.store(out + row[:, None] * stride_out + at, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * stride_lse + row, finite + tl.log(total), mask=in_rows)


def launch(target: tuple[Tensor, Tensor], a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    """Merge `a` and `b` into `target` (see `merge.merge_into`). Outs need dense heads and dims, lse dense rows."""
    outs, lses = (tuple(pair[i] for pair in (target, a, b)) for i in (0, 1))
    num_rows, heads, dim = target[0].shape
    assert all(x.stride()[1:] == (dim, 1) for x in outs) and all(x.stride(-1) == 1 for x in lses), "merge needs dense heads and rows"
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), heads)
    _merge[grid](
        a[0], a[1], b[0], b[1], target[0], target[1],
        num_rows, dim,
        a[0].stride(0), b[0].stride(0), target[0].stride(0),
        a[1].stride(0), b[1].stride(0), target[1].stride(0),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=triton.next_power_of_2(dim),
    )  # fmt: skip
