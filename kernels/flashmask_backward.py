"""FlashMask's backward in Triton: dq by blocks of queries, dk and dv by blocks of keys. No atomics, so every run gives the same bits.

Importing this module imports triton. P is recomputed from lse, which may be that of a larger softmax (context parallelism), as may out.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives the arguments their types at the launch.

import triton
import triton.language as tl

from pytest_longca.kernels.flashmask_forward import (
    inside,
    load_intervals,
    load_tile,
    next_tile,
    operand,
    place,
    start_walk,
    store_tile,
    to_registers,
)
from pytest_longca.kernels.triton_codes import SIZES


@triton.jit
def _gather_dq(
    dq, q, do, top, delta, k, v, bounds, runs, walk, batch, head_kv, seqlen_kv, scale_log2,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K over the full tiles, or over the partial ones (MASKED)."""
    first, last, tiles, tile, left = start_walk(walk)
    run = first
    for _ in range(tiles):
        start = tile * BLOCK_N
        k_tile = load_tile(k, batch, head_kv, start, seqlen_kv, DIM, BLOCK_N, BLOCK_D, TMA)
        score = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v_tile = load_tile(v, batch, head_kv, start, seqlen_kv, DIM_V, BLOCK_N, BLOCK_DV, TMA)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        if MASKED:
            columns = (start + tl.arange(0, BLOCK_N))[None, :]
            visible = inside(columns, bounds[0][:, None], bounds[1][:, None], bounds[2][:, None], bounds[3][:, None], PIECES)
            score = tl.where(visible, score, float("-inf"))
        p = tl.exp2(score * scale_log2 - top[:, None])
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        tile, left, run, _wrapped = next_tile(runs, tile, left, run, first, last)
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, out, do, dq, lse, stats, rows, runs, items, num_items, bulk, head_block, heads, group, blocks, seqlen_q, seqlen_kv,
    mask_stride, stats_rows, stats_stride, scale_log2, scale,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, out_sb, out_ss, out_sh, do_sb, do_ss, do_sh, dq_sb, dq_ss, dq_sh,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, IN_REGISTERS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; leaves lse in base 2 and delta = sum(out * do) in `stats`, whole blocks of rows, for dk and dv."""
    item, entry, block, batch, head = place(items, num_items, bulk, head_block, heads, blocks)
    start = block * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    exists = row < seqlen_q
    bounds = load_intervals(rows, entry // blocks * mask_stride + row, exists, 0)
    q = operand(q, q_sb, q_ss, q_sh, False)
    k = operand(k, k_sb, k_ss, k_sh, TMA)
    v = operand(v, v_sb, v_ss, v_sh, TMA)
    out = operand(out, out_sb, out_ss, out_sh, False)
    do = operand(do, do_sb, do_ss, do_sh, False)
    dq = operand(dq, dq_sb, dq_ss, dq_sh, False)
    do_tile = load_tile(do, batch, head, start, seqlen_q, DIM_V, BLOCK_M, BLOCK_DV, False)
    out_tile = load_tile(out, batch, head, start, seqlen_q, DIM_V, BLOCK_M, BLOCK_DV, False)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    head_row = (batch * heads + head).to(tl.int64)
    top = tl.load(lse + head_row * seqlen_q + row, mask=exists, other=float("-inf")) * 1.4426950408889634
    top = tl.where(top == float("-inf"), float("inf"), top)  # rows that see nothing, or do not exist, have P = exp2(-inf) = 0
    tl.store(stats + head_row * stats_rows + row, top)
    tl.store(stats + stats_stride + head_row * stats_rows + row, delta)
    q_tile = load_tile(q, batch, head, start, seqlen_q, DIM, BLOCK_M, BLOCK_D, False)
    if IN_REGISTERS >= 1:
        q_tile = to_registers(q_tile, seqlen_q)
    if IN_REGISTERS >= 2:
        do_tile = to_registers(do_tile, seqlen_q)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        acc = _gather_dq(
            acc, q_tile, do_tile, top, delta, k, v, bounds, runs, item + 4 + 5 * MASKED, batch, head // group, seqlen_kv,
            scale_log2, DIM, DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PIECES, MASKED, TMA, PRECISION,
        )  # fmt: skip
    store_tile(dq, acc * scale, batch, head, start, seqlen_q, DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _gather_dkdv(
    dk, dv, k, v, q, do, stats, bounds, runs, walk, batch, head, num_heads, heads_q, seqlen_q, stats_rows, stats_stride, scale_log2,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, EARLY: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P^T dO over the full tiles, or over the partial ones (MASKED), of `num_heads` query heads in one loop."""
    first, last, tiles, tile, left = start_walk(walk)
    run = first
    for _ in range(tiles * num_heads):
        start = tile * BLOCK_M
        row = start + tl.arange(0, BLOCK_M)
        at = stats + (batch * heads_q + head).to(tl.int64) * stats_rows + row
        q_tile = load_tile(q, batch, head, start, seqlen_q, DIM, BLOCK_M, BLOCK_D, TMA)
        score = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        if EARLY:
            do_tile = load_tile(do, batch, head, start, seqlen_q, DIM_V, BLOCK_M, BLOCK_DV, TMA)
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        top = tl.load(at)
        if MASKED:
            masked = inside(row[None, :], bounds[0][:, None], bounds[1][:, None], bounds[2][:, None], bounds[3][:, None], PIECES)
            score = tl.where(masked, float("-inf"), score)
        p = tl.exp2(score * scale_log2 - top[None, :])
        if not EARLY:
            do_tile = load_tile(do, batch, head, start, seqlen_q, DIM_V, BLOCK_M, BLOCK_DV, TMA)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        if not EARLY:
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        delta = tl.load(at + stats_stride)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
        tile, left, run, wrapped = next_tile(runs, tile, left, run, first, last)
        head = tl.where(wrapped, head + 1, head)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, do, dk, dv, dk_parts, dv_parts, stats, columns, runs, items, num_items, bulk, head_block, heads_kv, heads_q, blocks,
    seqlen_q, seqlen_kv, mask_stride, stats_rows, stats_stride, parts, scale_log2, scale,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, EARLY: tl.constexpr, IN_REGISTERS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key/value head: sums over its query heads, or over some of them into a slot."""
    item, entry, block, batch, head_kv = place(items, num_items, bulk, head_block, heads_kv, blocks)
    head = head_kv * (heads_q // heads_kv) + tl.load(item + 1)
    num_heads = tl.load(item + 2)
    slot = tl.load(item + 3)
    start = block * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    # Keys that do not exist are masked for all queries: their score of 0 could lie far above any lse.
    bounds = load_intervals(columns, entry // blocks * mask_stride + column, column < seqlen_kv, seqlen_q)
    q = operand(q, q_sb, q_ss, q_sh, TMA)
    k = operand(k, k_sb, k_ss, k_sh, False)
    v = operand(v, v_sb, v_ss, v_sh, False)
    do = operand(do, do_sb, do_ss, do_sh, TMA)
    dk = operand(dk, dk_sb, dk_ss, dk_sh, False)
    dv = operand(dv, dv_sb, dv_ss, dv_sh, False)
    k_tile = load_tile(k, batch, head_kv, start, seqlen_kv, DIM, BLOCK_N, BLOCK_D, False)
    v_tile = load_tile(v, batch, head_kv, start, seqlen_kv, DIM_V, BLOCK_N, BLOCK_DV, False)
    if IN_REGISTERS >= 1:
        k_tile = to_registers(k_tile, seqlen_kv)
    if IN_REGISTERS >= 2:
        v_tile = to_registers(v_tile, seqlen_kv)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for MASKED in tl.static_range(2):
        acc_k, acc_v = _gather_dkdv(
            acc_k, acc_v, k_tile, v_tile, q, do, stats, bounds, runs, item + 4 + 5 * MASKED, batch, head, num_heads, heads_q,
            seqlen_q, stats_rows, stats_stride, scale_log2, DIM, DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, PIECES, EARLY, MASKED, TMA, PRECISION,
        )  # fmt: skip
    if slot < 0:
        store_tile(dk, acc_k * scale, batch, head_kv, start, seqlen_kv, DIM, BLOCK_N, BLOCK_D)
        store_tile(dv, acc_v, batch, head_kv, start, seqlen_kv, DIM_V, BLOCK_N, BLOCK_DV)
    else:
        part = (slot * parts + (batch - entry // blocks) * heads_kv + head_kv).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(dk_parts + part[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], acc_k * scale)
        tl.store(dv_parts + part[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :], acc_v)


@triton.jit(do_not_specialize=SIZES)
def sum_parts_kernel(
    grad, grad_parts, splits, heads_kv, blocks, seqlen_kv, parts, grad_sb, grad_ss, grad_sh,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk (or dv) of ROWS keys of a block that was split over query heads: the sum of its slots, in their order."""
    split = splits + 3 * tl.program_id(0)
    entry = tl.load(split)
    slot = tl.load(split + 1)
    slots = tl.load(split + 2)
    z = tl.program_id(1)
    offset = tl.program_id(2) * ROWS
    row = offset + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(slots):
        part = ((slot + i) * parts + z).to(tl.int64) * BLOCK_N + row
        total += tl.load(grad_parts + part[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
    start = entry % blocks * BLOCK_N + offset
    grad = operand(grad, grad_sb, grad_ss, grad_sh, False)
    store_tile(grad, total, entry // blocks + z // heads_kv, z % heads_kv, start, seqlen_kv, DIM, ROWS, BLOCK_D)
