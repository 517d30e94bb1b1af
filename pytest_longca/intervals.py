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

CHUNK_ROWS = 1 << 15


def canonical(start0: Tensor, end0: Tensor, start1: Tensor | None = None, end1: Tensor | None = None) -> Tensor:
    """Row intervals `[1, 1, rows, 2, 2]` of one or two runs a row, `[rows]` each.

    Runs may be empty or touch; a second run that is not empty does not start before the first one.
    """
    first = torch.stack((start0, end0))
    if start1 is None or end1 is None:
        second = torch.zeros_like(first)
    else:
        start0, end0 = torch.where(end0 <= start0, start1, first)  # an empty first run moves to where it touches the second
        end0 = torch.where(start1 <= end0, torch.maximum(end0, end1), end0)
        first = torch.stack((start0, end0))
        second = torch.stack((start1, end1)) * ((start1 > end0) & (end1 > start1))
    first = first * (end0 > start0)
    return torch.stack((*first, *second), -1).to(torch.int32).view(1, 1, -1, 2, 2)


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
        return area_of(rows)
    per_row = mask.batch * mask.heads * mask.seqlen_kv
    return sum(int(evaluate(mask, "cpu", rows=rows).sum()) for rows in chunks(mask.seqlen_q, per_row))


def area_of(rows: Tensor) -> int:
    """Visible (query, key) pairs of row intervals."""
    return int((rows[..., 1] - rows[..., 0]).sum(dtype=torch.int64))


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
    before the first and after the last count as seeing everything. So the runs follow from the set differences of neighbouring rows,
    and those hold at most two starts and two ends for each key: O(S).
    """
    batch, heads = rows.shape[:2]
    out = torch.empty(batch * heads, seqlen_kv, 2, 2, dtype=torch.int32, device=rows.device)
    for head, own in zip(out, rows.flatten(0, 1), strict=True):
        starts, ends = _Marks(seqlen_kv, rows.device), _Marks(seqlen_kv, rows.device)
        for row, before, after in _changes(own, seqlen_kv):
            starts.add(row, _difference(before, after, seqlen_kv))
            ends.add(row, _difference(after, before, seqlen_kv))
            if starts.full or ends.full:
                return None
        head[:, 0, 0], head[:, 1, 0] = starts.first_and_second()
        head[:, 0, 1], head[:, 1, 1] = ends.first_and_second()
        if starts.most() > 2:
            return None
    return out.view(batch, heads, seqlen_kv, 2, 2)


def _changes(rows: Tensor, seqlen_kv: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Where neighbouring rows of `[rows, 2, 2]` differ: the later row's number, and the runs of both, int32 `[2, 2, changes]`.

    The rows before the first and after the last see every key. In chunks, whose temporaries stay in the cache.
    """
    everything = torch.tensor([[[0, seqlen_kv], [0, 0]]], dtype=torch.int32, device=rows.device)
    seqlen_q = rows.shape[0]
    for first in range(0, seqlen_q + 1, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, seqlen_q + 1)  # row `last - 1` is compared to the one before it
        parts = (everything[: first == 0], rows[max(0, first - 1) : last], everything[: last > seqlen_q])
        chunk = torch.cat(parts).permute(1, 2, 0).contiguous()
        start0, end0, start1, end1 = (chunk[..., 1:] != chunk[..., :-1]).flatten(0, 1)
        changed = (start0 | end0 | start1 | end1).nonzero()[:, 0]
        yield (changed + first).to(torch.int32), _pick(chunk[..., :-1], changed), _pick(chunk[..., 1:], changed)


def _pick(values: Tensor, chosen: Tensor) -> Tensor:
    """The chosen entries of the last axis, ascending and each at most once: no copy if they are all."""
    return values if len(chosen) == values.shape[-1] else values.index_select(-1, chosen)


Piece = tuple[Tensor, Tensor, Tensor]
"""Runs of keys: which entry they belong to, start and length, `[pieces]` each, none empty."""


def _difference(a: Tensor, b: Tensor, seqlen_kv: int) -> Iterator[Piece]:
    """The pieces of a \\ b for runs `[2, 2, entries]`."""
    unused = b[:, 1] == 0
    start, end = b[:, 0].masked_fill(unused, seqlen_kv), b[:, 1].masked_fill(unused, seqlen_kv)
    complement = [(torch.zeros_like(start[0]), start[0]), (end[0], start[1]), (end[1], torch.full_like(start[0], seqlen_kv))]
    # Most masks have one run a row, which leaves two of the six pairs.
    runs = a if a[1].any() else a[:1]
    complement = complement if b[1].any() else complement[:2]
    for run_start, run_end in runs:
        for low, high in complement:
            first = torch.maximum(run_start, low)
            length = torch.minimum(run_end, high).sub_(first)
            entry = (length > 0).nonzero()[:, 0]
            if len(entry):
                yield entry, _pick(first, entry), _pick(length, entry)


class _Marks:
    """For each key the lowest and the highest row that marks it, and how many do."""

    def __init__(self, seqlen_kv: int, device: Device) -> None:
        self.count, self.last = torch.zeros(2, seqlen_kv, dtype=torch.int32, device=device)
        self.first = torch.full_like(self.last, torch.iinfo(torch.int32).max)
        self.left = 2 * seqlen_kv

    @property
    def full(self) -> bool:
        """Whether there are more marks than two for each key."""
        return self.left < 0

    def add(self, rows: Tensor, pieces: Iterator[Piece]) -> None:
        """Mark the keys of pieces, whose entries are `rows`."""
        for entry, start, length in pieces:
            total = int(length.sum())
            self.left -= total
            if self.full:
                return
            key, row = start.long(), _pick(rows, entry)
            if total > len(key):  # else every piece is one key long
                key -= length.cumsum(0) - length
                key = key.repeat_interleave(length, output_size=total).add_(torch.arange(total, device=key.device))
                row = row.repeat_interleave(length, output_size=total)
            self.count.scatter_add_(0, key, row.new_ones(1).expand_as(row))
            self.first.scatter_reduce_(0, key, row, "amin")
            self.last.scatter_reduce_(0, key, row, "amax")

    def most(self) -> int:
        """The most marks that a key has."""
        return int(self.count.max()) if len(self.count) else 0

    def first_and_second(self) -> tuple[Tensor, Tensor]:
        """The row of the first mark of each key and that of the second, 0 where there is none."""
        return self.first.masked_fill(self.count < 1, 0), self.last.masked_fill(self.count < 2, 0)


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
