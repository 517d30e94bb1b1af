"""Row intervals: each query's visible keys as at most two runs, and what follows from them in O(S): area and columns.

Row intervals are int32 `[batch or 1, heads or 1, seqlen_q, 2, 2]`, half-open `[start, end)`, canonical: ascending, disjoint,
never touching, unused ones `(0, 0)` and last.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_longca.predicates import Device, evaluate

if TYPE_CHECKING:
    from pytest_longca.mask import Mask

CHUNK_ELEMENTS = 1 << 22
"""How many cells of a dense mask are looked at at once where nothing better than its predicate is known."""


def canonical(start0: Tensor, end0: Tensor, start1: Tensor | None = None, end1: Tensor | None = None) -> Tensor:
    """Row intervals `[1, 1, rows, 2, 2]` of one or two runs a row, `[rows]` each.

    Runs may be empty or touch; a second run that is not empty does not start before the first one.
    """
    rows = torch.zeros(start0.shape[0], 2, 2, dtype=torch.int32, device=start0.device)
    if start1 is not None and end1 is not None:
        # An empty run is moved to where it touches the other one, so that merging is all that is left to do.
        empty0, empty1 = end0 <= start0, end1 <= start1
        start1, end1 = torch.where(empty1, end0, start1), torch.where(empty1, end0, end1)
        start0, end0 = torch.where(empty0, start1, start0), torch.where(empty0, start1, end0)
        touch = end0 >= start1
        end0 = torch.where(touch, torch.maximum(end0, end1), end0)
        rows[:, 1, 0] = start1.masked_fill(touch, 0)
        rows[:, 1, 1] = end1.masked_fill(touch, 0)
    empty = end0 <= start0
    rows[:, 0, 0] = start0.masked_fill(empty, 0)
    rows[:, 0, 1] = end0.masked_fill(empty, 0)
    return rows[None, None]


def chunks(total: int, elements_each: int) -> Iterator[range]:
    """`range(total)` in pieces that together hold at most CHUNK_ELEMENTS elements, but at least one item each."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements_each))
    return (range(first, min(first + step, total)) for first in range(0, total, step))


def two_runs(visible: Tensor) -> Tensor | None:
    """The runs of True along the last axis of bool `[..., n]`, int32 `[..., 2, 2]`; None if a row has more than two."""
    edges = torch.zeros(*visible.shape[:-1], visible.shape[-1] + 1, dtype=torch.int8, device=visible.device)
    edges[..., :-1] += visible
    edges[..., 1:] -= visible.to(torch.int8)
    count = (edges == 1).sum(-1)
    if count.numel() and int(count.max()) > 2:
        return None
    last = visible.shape[-1]
    first_start, first_end = edges.argmax(-1), edges.argmin(-1)
    flipped = edges.flip(-1)
    last_start, last_end = last - flipped.argmax(-1), last - flipped.argmin(-1)
    first = torch.stack([first_start, first_end], -1) * (count > 0)[..., None]
    second = torch.stack([last_start, last_end], -1) * (count > 1)[..., None]
    return torch.stack([first, second], -2).to(torch.int32)


def from_predicate(mask: "Mask", device: Device = "cpu") -> Tensor | None:
    """The row intervals of any mask, by evaluating its predicate in chunks of rows; None if a row has more than two runs."""
    pieces = []
    for rows in chunks(mask.seqlen_q, mask.batch * mask.heads * mask.seqlen_kv):
        runs = two_runs(evaluate(mask, device, rows=rows))
        if runs is None:
            return None
        pieces.append(runs)
    empty = torch.zeros(mask.batch, mask.heads, 0, 2, 2, dtype=torch.int32, device=device)
    return torch.cat([empty, *pieces], 2)


@lru_cache(maxsize=256)
def area(mask: "Mask") -> int:
    """Visible (query, key) pairs of a mask, summed over its own batch and head axes."""
    rows = mask.row_intervals()
    if rows is not None:
        return int((rows[..., 1] - rows[..., 0]).sum(dtype=torch.int64))
    per_row = mask.batch * mask.heads * mask.seqlen_kv
    return sum(int(evaluate(mask, "cpu", rows=rows).sum()) for rows in chunks(mask.seqlen_q, per_row))


def columns(mask: "Mask", device: Device = "cpu") -> Tensor | None:
    """FlashMask's column form of a mask: the masked queries of each key, int32 `[batch or 1, heads or 1, seqlen_kv, 2, 2]`.

    From the row intervals in O(S) where there are any, else by evaluating the predicate. None if a key has more than two masked runs.
    """
    rows = mask.row_intervals(device)
    if rows is not None:
        return columns_of(rows, mask.seqlen_kv)
    pieces = []
    for cols in chunks(mask.seqlen_kv, mask.batch * mask.heads * mask.seqlen_q):
        runs = two_runs(~evaluate(mask, device, cols=cols).transpose(-1, -2))
        if runs is None:
            return None
        pieces.append(runs)
    return torch.cat(pieces, 2)


def columns_of(rows: Tensor, seqlen_kv: int) -> Tensor | None:
    """The column form of row intervals, or None if a key has more than two masked runs.

    A masked run of a key starts at row i if row i - 1 sees the key and row i does not, and ends where it is seen again; the rows
    before the first and after the last count as seeing everything. So the runs are the set differences of neighbouring rows, and
    those have at most two keys' worth of events for each key: O(S).
    """
    batch, heads, seqlen_q = rows.shape[:3]
    everything = torch.tensor([[0, seqlen_kv], [0, 0]], dtype=torch.int32, device=rows.device).expand(batch * heads, 1, 2, 2)
    padded = torch.cat([everything, rows.reshape(batch * heads, seqlen_q, 2, 2), everything], 1)
    before, after = padded[:, :-1].reshape(-1, 2, 2), padded[:, 1:].reshape(-1, 2, 2)
    num_keys = batch * heads * seqlen_kv
    starts = _events(before, after, seqlen_q, seqlen_kv, num_keys)
    ends = _events(after, before, seqlen_q, seqlen_kv, num_keys)
    if starts is None or ends is None:
        return None
    count = torch.bincount(starts[0], minlength=num_keys)
    if num_keys and int(count.max()) > 2:
        return None
    runs = torch.empty(num_keys, 2, 2, dtype=torch.int32, device=rows.device)
    for side, (keys, at) in enumerate((starts, ends)):
        runs[:, 0, side] = _reduced(keys, at, num_keys, "amin")
        runs[:, 1, side] = _reduced(keys, at, num_keys, "amax")
    runs[:, 0].masked_fill_((count < 1)[:, None], 0)
    runs[:, 1].masked_fill_((count < 2)[:, None], 0)
    return runs.view(batch, heads, seqlen_kv, 2, 2)


def _reduced(keys: Tensor, at: Tensor, num_keys: int, reduce: str) -> Tensor:
    return torch.zeros(num_keys, dtype=at.dtype, device=at.device).scatter_reduce_(0, keys, at, reduce, include_self=False)


def _events(seen: Tensor, then: Tensor, seqlen_q: int, seqlen_kv: int, num_keys: int) -> tuple[Tensor, Tensor] | None:
    """The keys in `seen` but not in `then`, `[rows, 2, 2]` each, as (flat key, query); None if a key must occur more than twice."""
    pieces = [(row, start, length) for row, start, length in _difference(seen, then, seqlen_kv)]
    row, start, length = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    total = int(length.sum())
    if total > 2 * num_keys:
        return None
    if total == row.numel():  # all pieces are one key long, as in every causal mask
        rank = torch.zeros((), dtype=torch.int64, device=row.device)
    else:
        first = length.cumsum(0) - length
        rank = torch.arange(total, device=row.device) - first.repeat_interleave(length, output_size=total)
        row = row.repeat_interleave(length, output_size=total)
        start = start.repeat_interleave(length, output_size=total)
    rows_each = seqlen_q + 1
    return row // rows_each * seqlen_kv + start + rank, (row % rows_each).to(torch.int32)


def _difference(a: Tensor, b: Tensor, seqlen_kv: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The non-empty pieces of a \\ b for row intervals `[rows, 2, 2]`, as (row, start, length), int64."""
    unused = b[:, :, 1] == 0
    start, end = b[:, :, 0].masked_fill(unused, seqlen_kv), b[:, :, 1].masked_fill(unused, seqlen_kv)
    zero, last = torch.zeros_like(start[:, 0]), torch.full_like(start[:, 0], seqlen_kv)
    complement = ((zero, start[:, 0]), (end[:, 0], start[:, 1]), (end[:, 1], last))
    for run in range(2):
        for low, high in complement:
            piece_start, piece_end = torch.maximum(a[:, run, 0], low), torch.minimum(a[:, run, 1], high)
            row = (piece_end > piece_start).nonzero()[:, 0]
            piece_start, piece_end = piece_start[row], piece_end[row]
            yield row, piece_start.long(), (piece_end - piece_start).long()


def endpoint_rows(rows: Tensor, batch: int = 1) -> Tensor:
    """Row intervals as cuDNN's flex_attention takes them: int32 `[heads or 1, functions, batch * seqlen_q]`.

    Row r sees `[0, F[0]) | [F[1], F[2]) | [F[3], F[4])`; endpoints do not decrease. 1, 3 or 5 functions, as the rows need.
    """
    rows = rows.expand(batch, -1, -1, -1, -1).permute(1, 0, 2, 3, 4).flatten(1, 2)  # [heads, batch * seqlen_q, 2, 2]
    (start0, end0), (start1, end1) = rows[:, :, 0].unbind(-1), rows[:, :, 1].unbind(-1)
    used1 = end1 > 0
    start1, end1 = torch.where(used1, start1, end0), torch.where(used1, end1, end0)
    from_zero = start0 == 0
    if bool((from_zero & ~used1).all()):
        return end0[:, None].contiguous()
    if bool((from_zero | ~used1).all()):
        zero = torch.zeros_like(end0)
        f0 = torch.where(from_zero, end0, zero)
        f1 = torch.where(from_zero, start1, start0)
        return torch.stack([f0, f1, torch.where(from_zero, end1, end0)], 1)
    return torch.stack([torch.zeros_like(end0), start0, end0, start1, end1], 1)
