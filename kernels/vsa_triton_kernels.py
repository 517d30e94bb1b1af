# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of block-sparse attention: forward, backward for dq, backward for dk and dv.

Each program owns one tile of one side (queries, or keys for dk and dv) and walks the list of tiles of the other side that its block
selects or is selected by. Nothing is summed across programs, so results are the same bits in every run.

Words used in all three: `own` is the side of the program's tile, `other` the side of the list. A list has its full tiles first, then its
short ones, each walked in a loop of its own: only the second masks tokens. FULL_OWN and FULL_OTHER say that tiles are never short; PAD_D
and PAD_V say that the head dimension is smaller than the tile's width. With TMA tiles that need no mask are read through tensor
descriptors over `[rows, stride of a token]`, else through pointers: x_tiles is what they are read through, x the tensor.
"""

import triton
import triton.language as tl

from pytest_longca.kernels.triton_codes import SIZES

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _inside(num_tokens, D, tokens, dims, FULL: tl.constexpr):
    """Which elements of a tile exist. `num_tokens` means nothing where tiles are full."""
    if FULL:
        return (dims[None, :] < D) & (tokens[:, None] >= 0)
    else:
        return (dims[None, :] < D) & (tokens[:, None] < num_tokens)


@triton.jit
def _load(pointer, stride, num_tokens, D, tokens, dims, FULL: tl.constexpr, PAD: tl.constexpr):
    """Rows `tokens` of a tile whose first row is at `pointer`; zeros from `num_tokens` on and from column D on."""
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    if FULL and not PAD:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=_inside(num_tokens, D, tokens, dims, FULL), other=0.0)


@triton.jit
def _store(pointer, stride, num_tokens, D, tokens, dims, value, FULL: tl.constexpr, PAD: tl.constexpr):
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    if FULL and not PAD:
        tl.store(pointers, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointer.dtype.element_ty), mask=_inside(num_tokens, D, tokens, dims, FULL))


@triton.jit
def _read(source, batch, head, first, stride_b, stride_s, stride_h, num_tokens, D, tokens, dims,
          FULL: tl.constexpr, PAD: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The tile of the other side that starts at token `first`. A descriptor's row and column follow from the strides (see `descriptor`)."""
    if TMA:
        row = batch * (stride_b // stride_s) + head * (stride_h // stride_s) + first
        return source.load([row.to(tl.int32), (head * (stride_h % stride_s)).to(tl.int32)])
    else:
        pointer = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + first.to(tl.int64) * stride_s
        return _load(pointer, stride_s, num_tokens, D, tokens, dims, FULL, PAD)


@triton.jit
def _to_registers(tile, dims):
    """The same tile as the result of a product with the identity, exact for 16-bit types.

    A loaded tile is read from shared memory again by every product; a product's result enters the next one from registers, which saves
    a quarter of the traffic and the tile's place in shared memory.
    """
    return tl.dot(tile, (dims[:, None] == dims[None, :]).to(tile.dtype)).to(tile.dtype)


@triton.jit
def _own_tile(order, own_start, own_stop, own_block, num_tiles, map_head):
    """(first token, number of tokens, block) of the program's tile; long lists come first in `order`."""
    tile = tl.load(order + map_head * num_tiles + tl.program_id(0))
    first = tl.load(own_start + tile)
    return first, tl.load(own_stop + tile) - first, tl.load(own_block + tile)


@triton.jit
def _list(indptr, num_full, row, FULL: tl.constexpr):
    """(where the row's list begins, how many of its tiles are full, its length)."""
    begin = tl.load(indptr + row)
    length = (tl.load(indptr + row + 1) - begin).to(tl.int32)
    full = length
    if not FULL:
        full = tl.load(num_full + row)
    return begin, full, length


@triton.jit
def _entry(start, stop, t, end, FULL: tl.constexpr):
    """(first token, number of tokens) of the list's entry t; of no entry, zeros. The number is not read where tiles are full.

    Loops read entry t + 1 while they work on t: a load whose address waits for another load would halve the pipeline's depth.
    """
    first = tl.load(start + t, mask=t < end, other=0)
    num = first
    if not FULL:
        num = tl.load(stop + t, mask=t < end, other=0) - first
    return first, num


@triton.jit
def _query_head(part, t, end, head_kv, group, GROUPED: tl.constexpr):
    """The query head that entry t of a key block's list belongs to."""
    head = head_kv * group
    if GROUPED:
        head += tl.load(part + t, mask=t < end, other=0)
    return head


@triton.jit
def _scores(q, k, num_tokens, tokens, FULL: tl.constexpr):
    """q k^T, with -inf behind the tile's end."""
    s = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
    if not FULL:
        s = tl.where(tokens[None, :] < num_tokens, s, -float("inf"))
    return s


@triton.jit
def _attend(
    top, total, acc, q_tile, k, v, start, stop, begin, end, batch, head_kv, scale_log2, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr, TMA_V: tl.constexpr,
):  # fmt: skip
    """The online softmax over the list's entries begin to end.

    Keys behind a short tile's end may be any others, as their scores are masked; values must be zeros there, which TMA cannot give.
    """
    other = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    j, n = _entry(start, stop, begin, end, FULL)
    for t in range(begin, end):
        next_j, next_n = _entry(start, stop, t + 1, end, FULL)
        k_tile = _read(k, batch, head_kv, j, k_sb, k_ss, k_sh, n, D, other, dims, FULL, PAD_D, TMA)
        s = _scores(q_tile, k_tile, n, other, FULL)
        new_top = tl.maximum(top, tl.max(s, 1) * scale_log2)
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s * scale_log2 - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = _read(v, batch, head_kv, j, v_sb, v_ss, v_sh, n, DV, other, dims_v, FULL, PAD_V, TMA_V)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        top = new_top
        j, n = next_j, next_n
    return top, total, acc


@triton.jit(do_not_specialize=SIZES)
def vsa_triton_forward(
    q, v, k_tiles, v_tiles, out, lse,
    order, own_start, own_stop, own_block, indptr, num_full, start, stop,
    num_tiles, num_blocks, map_stride, heads_q, group, seqlen_q, scale_log2,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, out_sb, out_ss, out_sh,
    D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL_OWN: tl.constexpr, FULL_OTHER: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries."""
    batch = tl.program_id(1) // heads_q
    head = tl.program_id(1) % heads_q
    head_kv = head // group
    map_head = head * map_stride
    first, num, block = _own_tile(order, own_start, own_stop, own_block, num_tiles, map_head)
    begin, full, length = _list(indptr, num_full, map_head.to(tl.int64) * num_blocks + block, FULL_OTHER)
    own = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    q_tile = _read(q, batch, head, first, q_sb, q_ss, q_sh, num, D, own, dims, FULL_OWN, PAD_D, False)

    if IN_REGISTERS:
        q_tile = _to_registers(q_tile, dims)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_V], tl.float32)
    start += begin
    if not FULL_OTHER:
        stop += begin
    top, total, acc = _attend(
        top, total, acc, q_tile, k_tiles, v_tiles, start, stop, 0, full, batch, head_kv, scale_log2, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
        D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True, PAD_D, PAD_V, TMA, TMA,
    )  # fmt: skip
    if not FULL_OTHER:
        top, total, acc = _attend(
            top, total, acc, q_tile, k_tiles, v, start, stop, full, length, batch, head_kv, scale_log2, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
            D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_N, False, PAD_D, PAD_V, TMA, False,
        )  # fmt: skip

    # An empty row has total 0 and top -inf: it gives out 0 and lse -inf.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    pointer = out + batch.to(tl.int64) * out_sb + head.to(tl.int64) * out_sh + first.to(tl.int64) * out_ss
    _store(pointer, out_ss, num, DV, own, dims_v, acc, FULL_OWN, PAD_V)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seqlen_q + first + own, (top + tl.log2(total)) * LN2, mask=own < num)


@triton.jit
def _gather_dq(
    acc, q_tile, do_tile, lse_log2, delta_row, k, v, start, stop, begin, end, batch, head_kv, scale_log2,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add dS k over the list's entries begin to end."""
    other = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    j, n = _entry(start, stop, begin, end, FULL)
    for t in range(begin, end):
        next_j, next_n = _entry(start, stop, t + 1, end, FULL)
        k_tile = _read(k, batch, head_kv, j, k_sb, k_ss, k_sh, n, D, other, dims, FULL, PAD_D, TMA)
        s = _scores(q_tile, k_tile, n, other, FULL)
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        v_tile = _read(v, batch, head_kv, j, v_sb, v_ss, v_sh, n, DV, other, dims_v, FULL, PAD_V, TMA)
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = p * (dp - delta_row[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
        j, n = next_j, next_n
    return acc


@triton.jit(do_not_specialize=SIZES)
def vsa_triton_dq(
    q, k, v, k_tiles, v_tiles, out, lse, do, delta, dq,
    order, own_start, own_stop, own_block, indptr, num_full, start, stop,
    num_tiles, num_blocks, map_stride, heads_q, group, seqlen_q, scale_log2, scale,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, out_sb, out_ss, out_sh, do_sb, do_ss, do_sh, dq_sb, dq_ss, dq_sh,
    D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL_OWN: tl.constexpr, FULL_OTHER: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries, and their delta = rowsum(out * do) for the kernel of dk and dv, which runs after this one."""
    batch = tl.program_id(1) // heads_q
    head = tl.program_id(1) % heads_q
    head_kv = head // group
    map_head = head * map_stride
    first, num, block = _own_tile(order, own_start, own_stop, own_block, num_tiles, map_head)
    begin, full, length = _list(indptr, num_full, map_head.to(tl.int64) * num_blocks + block, FULL_OTHER)
    own = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    out_tile = _read(out, batch, head, first, out_sb, out_ss, out_sh, num, DV, own, dims_v, FULL_OWN, PAD_V, False)
    do_tile = _read(do, batch, head, first, do_sb, do_ss, do_sh, num, DV, own, dims_v, FULL_OWN, PAD_V, False)
    row = tl.program_id(1).to(tl.int64) * seqlen_q + first + own
    delta_row = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + row, delta_row, mask=own < num)
    lse_log2 = tl.load(lse + row, mask=own < num, other=0.0) * LOG2E
    q_tile = _read(q, batch, head, first, q_sb, q_ss, q_sh, num, D, own, dims, FULL_OWN, PAD_D, False)

    if IN_REGISTERS:
        q_tile = _to_registers(q_tile, dims)
        do_tile = _to_registers(do_tile, dims_v)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    start += begin
    if not FULL_OTHER:
        stop += begin
    acc = _gather_dq(
        acc, q_tile, do_tile, lse_log2, delta_row, k_tiles, v_tiles, start, stop, 0, full, batch, head_kv, scale_log2,
        k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True, PAD_D, PAD_V, TMA,
    )  # fmt: skip
    if not FULL_OTHER:
        acc = _gather_dq(
            acc, q_tile, do_tile, lse_log2, delta_row, k, v, start, stop, full, length, batch, head_kv, scale_log2,
            k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_N, False, PAD_D, PAD_V, False,
        )  # fmt: skip

    pointer = dq + batch.to(tl.int64) * dq_sb + head.to(tl.int64) * dq_sh + first.to(tl.int64) * dq_ss
    _store(pointer, dq_ss, num, D, own, dims, acc * scale, FULL_OWN, PAD_D)


@triton.jit
def _gather_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, exists, q, do, lse, delta, start, stop, part, begin, end, batch, heads_q, head_kv, group, seqlen_q,
    scale_log2, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    FULL_OWN: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Add dS^T q and P^T do over the list's entries begin to end. ALIGNED: every tile starts at a multiple of BLOCK_M."""
    other = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    i, n = _entry(start, stop, begin, end, FULL)
    head = _query_head(part, begin, end, head_kv, group, GROUPED)
    for t in range(begin, end):
        next_i, next_n = _entry(start, stop, t + 1, end, FULL)
        next_head = _query_head(part, t + 1, end, head_kv, group, GROUPED)
        row = (batch * heads_q + head).to(tl.int64) * seqlen_q + i
        if ALIGNED:
            row = tl.multiple_of(row, BLOCK_M)  # lse and delta then come in pairs
        row += other
        if FULL:
            lse_log2 = tl.load(lse + row) * LOG2E
            delta_row = tl.load(delta + row)
        else:
            # Queries behind the tile's end get lse = +inf, hence p = 0.
            lse_log2 = tl.load(lse + row, mask=other < n, other=float("inf")) * LOG2E
            delta_row = tl.load(delta + row, mask=other < n, other=0.0)
        q_tile = _read(q, batch, head, i, q_sb, q_ss, q_sh, n, D, other, dims, FULL, PAD_D, TMA)
        s = tl.dot(k_tile, tl.trans(q_tile))  # [BLOCK_N, BLOCK_M]
        if not FULL_OWN:
            # Keys behind the tile's end are zeros here: their scores of 0 may be far above lse, and inf * 0 is no 0.
            s = tl.where(exists[:, None], s, -float("inf"))
        p = tl.exp2(s * scale_log2 - lse_log2[None, :])
        do_tile = _read(do, batch, head, i, do_sb, do_ss, do_sh, n, DV, other, dims_v, FULL, PAD_V, TMA)
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc)
        dp = tl.dot(v_tile, tl.trans(do_tile))
        ds = p * (dp - delta_row[None, :])
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc)
        i, n, head = next_i, next_n, next_head
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=SIZES)
def vsa_triton_dkdv(
    q, k, v, q_tiles, do_tiles, lse, do, delta, dk, dv,
    order, own_start, own_stop, own_block, indptr, num_full, start, stop, part,
    num_tiles, num_blocks, map_stride, heads_kv, group, seqlen_q, scale_log2, scale,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh,
    D, DV, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL_OWN: tl.constexpr, FULL_OTHER: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys, summed over all query heads of the group: the list holds them one after the other, `part` says which."""
    batch = tl.program_id(1) // heads_kv
    head_kv = tl.program_id(1) % heads_kv
    map_head = head_kv * map_stride
    first, num, block = _own_tile(order, own_start, own_stop, own_block, num_tiles, map_head)
    begin, full, length = _list(indptr, num_full, map_head.to(tl.int64) * num_blocks + block, FULL_OTHER)
    own = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    dims_v = tl.arange(0, HEAD_DIM_V)
    k_tile = _read(k, batch, head_kv, first, k_sb, k_ss, k_sh, num, D, own, dims, FULL_OWN, PAD_D, False)
    v_tile = _read(v, batch, head_kv, first, v_sb, v_ss, v_sh, num, DV, own, dims_v, FULL_OWN, PAD_V, False)

    dk_acc = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, HEAD_DIM_V], tl.float32)
    start += begin
    if not FULL_OTHER:
        stop += begin
    if GROUPED:
        part += begin
    heads_q = heads_kv * group
    dk_acc, dv_acc = _gather_dkdv(
        dk_acc, dv_acc, k_tile, v_tile, own < num, q_tiles, do_tiles, lse, delta, start, stop, part, 0, full, batch, heads_q, head_kv,
        group, seqlen_q, scale_log2, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_M,
        FULL_OWN, True, FULL_OTHER, PAD_D, PAD_V, TMA, GROUPED,
    )  # fmt: skip
    if not FULL_OTHER:
        dk_acc, dv_acc = _gather_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, own < num, q, do, lse, delta, start, stop, part, full, length, batch, heads_q, head_kv, group,
            seqlen_q, scale_log2, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, D, DV, HEAD_DIM, HEAD_DIM_V, BLOCK_M,
            FULL_OWN, False, False, PAD_D, PAD_V, False, GROUPED,
        )  # fmt: skip

    pointer = dk + batch.to(tl.int64) * dk_sb + head_kv.to(tl.int64) * dk_sh + first.to(tl.int64) * dk_ss
    _store(pointer, dk_ss, num, D, own, dims, dk_acc * scale, FULL_OWN, PAD_D)
    pointer = dv + batch.to(tl.int64) * dv_sb + head_kv.to(tl.int64) * dv_sh + first.to(tl.int64) * dv_ss
    _store(pointer, dv_ss, num, DV, own, dims_v, dv_acc, FULL_OWN, PAD_V)
