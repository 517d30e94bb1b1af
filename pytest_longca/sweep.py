"""Sweep: the order in which the reference visits a mask, in row tiles and pieces of keys, skipping what no row sees.

Products run over `stacks`: where all heads share the mask, or the heads of a group share q or do, a stack is a key/value head with its
group of query heads; else, where every query head has its own mask, a stack is one query head.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.mask import Mask
from pytest_longca.tiles import ordered

SMALL_CELLS = 1 << 21
"""Up to so many (query, key) cells of all heads the whole case is one tile."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Tile sizes: rows, keys in a granule (the unit of skipping), keys in a piece."""

    rows: int
    granule: int
    keys: int


SHARED_GPU = Budget(1024, 128, 2048)
"""Starting a tile's operations takes a GPU's host some milliseconds: as long as 64 heads of a tile so tall waste beside a diagonal."""

ONE_STACK_CELLS = 64 * 1024 * 2048
"""What a tile of one stack has, in longer pieces of keys: else the GPU would be done with it before the host has started the next one."""

PER_HEAD_GPU = Budget(64, 64, 8192)
SHARED_CPU = Budget(128, 64, 2048)
PER_HEAD_CPU = Budget(64, 64, 2048)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some keys of a row tile: a range that all stacks share, or indices `[masks, keys]`, -1 where a list is shorter than the longest."""

    keys: slice | Tensor
    is_full: bool

    def kv_idx(self, device: torch.device) -> Tensor:
        """The keys' positions, int64 `[masks or 1, 1, keys]`."""
        if isinstance(self.keys, slice):
            return torch.arange(self.keys.start, self.keys.stop, device=device)[None, None]
        return self.keys[:, None]


@dataclass(frozen=True, slots=True)
class RowTile:
    """Some queries and all keys that any of them sees, in pieces."""

    rows: slice
    pieces: tuple[Piece, ...]


def sweep(case: Case, device: torch.device, are_grouped: bool) -> Iterator[RowTile]:
    """The row tiles that cover a case's mask; a small case is one tile. Heads that `are_grouped` have one list of keys for all."""
    if case.num_scores <= SMALL_CELLS:
        yield RowTile(slice(0, case.seqlen_q), (Piece(slice(0, case.seqlen_kv), False),))
        return
    budget = budget_of(case, device)
    found = case.mask.tiles(device, budget.rows, budget.granule)
    hit, full = ((found.partial | found.full).flatten(0, 1), found.full.flatten(0, 1))  # [masks, row tiles, granules]
    if are_grouped and case.mask.heads > 1:
        hit, full = hit.any(0, keepdim=True), full.all(0, keepdim=True)
    one_list = hit.shape[0] == 1
    on_host = (hit.cpu(), full.cpu()) if one_list else (hit, full)
    for tile in range(hit.shape[1]):
        rows = slice(tile * budget.rows, min((tile + 1) * budget.rows, case.seqlen_q))
        hits, fulls = on_host[0][:, tile], on_host[1][:, tile]
        pieces = _runs(hits[0], fulls[0], budget, case.seqlen_kv) if one_list else None
        yield RowTile(rows, tuple(_lists(hits, budget, case.seqlen_kv, device) if pieces is None else pieces))


def budget_of(case: Case, device: torch.device) -> Budget:
    """Tile sizes for a case: masks with heads of their own are finely cut, since they skip at random."""
    if device.type == "cuda" and case.mask.heads == 1:
        keys = ONE_STACK_CELLS // (case.heads_q * SHARED_GPU.rows) // SHARED_GPU.granule * SHARED_GPU.granule
        return replace(SHARED_GPU, keys=keys) if case.batch * case.heads_kv == 1 else SHARED_GPU
    if device.type == "cuda":
        return PER_HEAD_GPU
    return SHARED_CPU if case.mask.heads == 1 else PER_HEAD_CPU


def _runs(hit: Tensor, full: Tensor, budget: Budget, seqlen_kv: int) -> list[Piece] | None:
    """A row tile's granules as ranges of keys, or None where they lie too scattered for ranges to pay."""
    indices = hit.nonzero()[:, 0]
    if not len(indices):
        return []
    breaks = ((indices[1:] - indices[:-1]) > 1).nonzero()[:, 0] + 1
    edges = [0, *breaks.tolist(), len(indices)]
    if len(edges) - 1 > 4 and len(indices) < 4 * (len(edges) - 1):
        return None
    step = budget.keys // budget.granule
    pieces = []
    for first, last in itertools.pairwise(edges):
        for at in range(first, last, step):
            start, stop = int(indices[at]), int(indices[min(at + step, last) - 1]) + 1
            keys = slice(start * budget.granule, min(stop * budget.granule, seqlen_kv))
            pieces.append(Piece(keys, bool(full[start:stop].all())))
    return pieces


def _lists(hit: Tensor, budget: Budget, seqlen_kv: int, device: torch.device) -> Iterator[Piece]:
    """A row tile's granules as one list of keys for each mask, padded with -1."""
    counts, indices = (x.to(device) for x in ordered(hit))
    longest = int(counts.max())
    step = budget.keys // budget.granule
    within = torch.arange(budget.granule, device=device)
    for at in range(0, longest, step):
        granules = indices[:, at : min(at + step, longest)].long()
        used = torch.arange(at, at + granules.shape[1], device=device) < counts[:, None]
        keys = granules[..., None] * budget.granule + within
        keys = torch.where(used[..., None] & (keys < seqlen_kv), keys, -1)
        yield Piece(keys.flatten(1), False)


class Visibility:
    """Which keys of a piece the rows of a tile see, `[stacks or 1, group or 1, rows, keys]`, by row intervals or else the predicate."""

    def __init__(self, case: Case, device: torch.device, group: int) -> None:
        """`group` query heads make a stack."""
        mask: Mask = case.mask
        self.device = device
        self.mask_of_head = _mask_of_head(case, device, group)
        self.small = case.num_scores <= SMALL_CELLS
        if self.small:
            self.dense = mask.dense(device).flatten(0, 1)
            return
        rows = mask.row_intervals(device)
        self.intervals = None if rows is None else rows.flatten(0, 1)  # [masks, seqlen_q, 2, 2]
        self.predicate = mask.predicate(device)
        self.slices = (
            torch.arange(mask.batch, device=device).repeat_interleave(mask.heads)[:, None, None],
            torch.arange(mask.heads, device=device).repeat(mask.batch)[:, None, None],
        )

    def of(self, rows: slice, piece: Piece) -> Tensor | None:
        """None where the rows see every key of the piece."""
        if piece.is_full:
            return None
        seen = self.dense if self.small else self._evaluate(rows, piece.kv_idx(self.device))
        return seen[:, None] if self.mask_of_head is None else seen[self.mask_of_head]

    def _evaluate(self, rows: slice, kv_idx: Tensor) -> Tensor:
        if self.intervals is None:
            q_idx = torch.arange(rows.start, rows.stop, device=self.device)[None, :, None]
            return self.predicate(*self.slices, q_idx, kv_idx.clamp_min(0)) & (kv_idx >= 0)
        runs = self.intervals[:, rows, :, :, None].unbind(2)
        first, second = ((kv_idx >= run[:, :, 0]) & (kv_idx < run[:, :, 1]) for run in runs)
        return first | second

    def per_stack(self, of_lists: Tensor) -> Tensor:
        """Something given for each list of keys `[masks or 1, ...]`, for each stack `[stacks or 1, ...]`."""
        return of_lists if self.mask_of_head is None or len(of_lists) == 1 else of_lists[self.mask_of_head[:, 0]]


def _mask_of_head(case: Case, device: torch.device, group: int) -> Tensor | None:
    """The mask slice of each stack's query heads, `[stacks, group or 1]`, or None where they are the same or one for all."""
    mask = case.mask
    if mask.heads == 1:
        return None if mask.batch == 1 else torch.arange(mask.batch, device=device).repeat_interleave(case.heads_kv)[:, None]
    if mask.batch == case.batch and group == 1:
        return None
    slices = torch.arange(mask.batch * mask.heads, device=device)
    return slices.repeat(case.batch // mask.batch).reshape(-1, group)
