"""FlashMask's forward in Triton, and what forward and backward share: loading a tile, walking runs of tiles, placing a program.

Importing this module imports triton. Operands are `(pointer, batch stride, seqlen stride, head stride)`, which `operand` makes of arguments
that each stand alone, as Triton compiles again for any integer in a tuple (see triton_codes). With TMA, those that a loop streams are
tensor descriptors over `[batch, seqlen, heads, head_dim]` with blocks `[1, rows, 1, padded head_dim]`; those that a program
loads once stay pointers, because Triton then keeps them in shared memory and not in registers. Either way rows and columns that do
not exist read as 0.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives the arguments their types at the launch.

import triton
import triton.language as tl

from pytest_longca.kernels.triton_codes import SIZES


@triton.jit
def operand(x, stride_b, stride_s, stride_h, TMA: tl.constexpr):
    """An operand as `load_tile` takes it, which with TMA is its descriptor."""
    if TMA:
        return x
    else:
        return x, stride_b, stride_s, stride_h


@triton.jit
def load_tile(x, batch, head, start, length, DIM: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr):
    """Rows `start` to `start + ROWS` of one head of a BSHD operand."""
    if TMA:
        return x.load([batch, start, head, 0]).reshape([ROWS, PADDED])
    else:
        base = x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[3]
        rows = start + tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED)
        pointers = base + rows[:, None].to(tl.int64) * x[2] + dims[None, :]
        return tl.load(pointers, mask=(rows[:, None] < length) & (dims[None, :] < DIM), other=0.0)  # [ROWS, PADDED]


@triton.jit
def to_registers(x, length):
    """The rows as they are, laid out as a product is, which no compiler knows to be 0.

    What was only loaded Triton multiplies from shared memory, and what was loaded and computed it loads from there again in every round.
    """
    row: tl.constexpr = [x.shape[0], 16]
    column: tl.constexpr = [16, x.shape[1]]
    never = (length < 0).to(x.dtype)
    product = tl.dot(tl.full(row, 1.0, x.dtype), tl.zeros(column, x.dtype) + never)
    return tl.where(product == 0.0, x, 0.0)


@triton.jit
def store_tile(x, value, batch, head, start, length, DIM: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The counterpart of `load_tile`; always through pointers, once a program."""
    base = x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[3]
    rows = start + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * x[2] + dims[None, :]
    tl.store(pointers, value.to(x[0].dtype.element_ty), mask=(rows[:, None] < length) & (dims[None, :] < DIM))


@triton.jit
def place(items, num_items, bulk, head_block, heads, blocks):
    """(item, entry, block, batch, head) of this program.

    `head_block` heads take one of the first `bulk` items before the next item's turn comes, and the other heads follow when these
    have had them all; then all heads take the items behind those in turn. `num_items` counts both.
    """
    pid = tl.program_id(0)
    lanes = tl.num_programs(0) // num_items
    rest = pid - bulk * lanes
    outer = pid // head_block
    turns = tl.maximum(bulk, 1)
    at = tl.where(rest < 0, outer % turns, bulk + rest // lanes)
    z = tl.where(rest < 0, outer // turns * head_block + pid % head_block, rest % lanes)
    item = items + 16 * at
    entry = tl.load(item)
    # A mask with a batch axis has an entry for each batch and z counts heads; otherwise z counts (batch, head) pairs.
    return item, entry, entry % blocks, entry // blocks + z // heads, z % heads


@triton.jit
def start_walk(walk):
    """(first run, one past the last, tiles, first tile, tiles left in its run) of an item's full or partial tiles."""
    return tl.load(walk), tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3), tl.load(walk + 4)


@triton.jit
def next_tile(runs, tile, left, run, first, last):
    """(tile, left, run, wrapped) after `tile`; behind the last run comes the first again."""
    ends = left == 1
    run = tl.where(ends, run + 1, run)
    wrapped = run == last
    run = tl.where(wrapped, first, run)
    next_start = tl.load(runs + 2 * run)
    next_left = tl.load(runs + 2 * run + 1)
    return tl.where(ends, next_start, tile + 1), tl.where(ends, next_left, left - 1), run, wrapped


@triton.jit
def inside(at, low0, high0, low1, high1, PIECES: tl.constexpr):
    """Whether `at` lies in one of the half-open intervals; the second one only if any row has two."""
    hit = (at >= low0) & (at < high0)
    if PIECES == 2:
        hit = hit | ((at >= low1) & (at < high1))
    return hit


@triton.jit
def load_intervals(table, index, exists, absent_end):
    """The four bounds of each row's (or column's) intervals; `[0, absent_end)` for those that do not exist."""
    base = table + 4 * index.to(tl.int64)
    return (
        tl.load(base, mask=exists, other=0),
        tl.load(base + 1, mask=exists, other=absent_end),
        tl.load(base + 2, mask=exists, other=0),
        tl.load(base + 3, mask=exists, other=0),
    )


@triton.jit
def _attend(
    acc, norm, top, q, k, v, bounds, runs, walk, batch, head_kv, seqlen_kv, scale_log2,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the full tiles, or over the partial ones (MASKED)."""
    first, last, tiles, tile, left = start_walk(walk)
    run = first
    for _ in range(tiles):
        start = tile * BLOCK_N
        k_tile = load_tile(k, batch, head_kv, start, seqlen_kv, DIM, BLOCK_N, BLOCK_D, TMA)
        score = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            columns = (start + tl.arange(0, BLOCK_N))[None, :]
            visible = inside(columns, bounds[0][:, None], bounds[1][:, None], bounds[2][:, None], bounds[3][:, None], PIECES)
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
        shift = new_top
        if MASKED:  # a row without a visible key so far must not compute inf - inf
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * scale_log2 - shift[:, None])
        decay = tl.exp2(top - shift)
        norm = norm * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v_tile = load_tile(v, batch, head_kv, start, seqlen_kv, DIM_V, BLOCK_N, BLOCK_DV, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        top = new_top
        tile, left, run, _wrapped = next_tile(runs, tile, left, run, first, last)
    return acc, norm, top


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, lse, rows, runs, items, num_items, bulk, head_block, heads, group, blocks, seqlen_q, seqlen_kv, mask_stride, scale_log2,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, out_sb, out_ss, out_sh,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PIECES: tl.constexpr, IN_REGISTERS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse (natural logarithm) of BLOCK_M queries of one head."""
    item, entry, block, batch, head = place(items, num_items, bulk, head_block, heads, blocks)
    start = block * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    exists = row < seqlen_q
    bounds = load_intervals(rows, entry // blocks * mask_stride + row, exists, 0)
    q = operand(q, q_sb, q_ss, q_sh, False)
    k = operand(k, k_sb, k_ss, k_sh, TMA)
    v = operand(v, v_sb, v_ss, v_sh, TMA)
    out = operand(out, out_sb, out_ss, out_sh, False)
    q_tile = load_tile(q, batch, head, start, seqlen_q, DIM, BLOCK_M, BLOCK_D, False)
    if IN_REGISTERS:
        q_tile = to_registers(q_tile, seqlen_q)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for MASKED in tl.static_range(2):
        acc, norm, top = _attend(
            acc, norm, top, q_tile, k, v, bounds, runs, item + 4 + 5 * MASKED, batch, head // group, seqlen_kv, scale_log2,
            DIM, DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PIECES, MASKED, TMA, PRECISION,
        )  # fmt: skip
    norm = tl.where(norm == 0.0, 1.0, norm)  # rows that see nothing: out 0, and lse = top = -inf
    acc = acc / norm[:, None]
    store_tile(out, acc, batch, head, start, seqlen_q, DIM_V, BLOCK_M, BLOCK_DV)
    natural = (top + tl.log2(norm)) * 0.6931471805599453
    tl.store(lse + (batch * heads + head).to(tl.int64) * seqlen_q + row, natural, mask=exists)
