"""FlashMask's plan: which tiles each program of the Triton kernels visits, derived from a mask's row intervals.

Tiles are classified exactly: absent (no visible pair), full (all pairs visible) or partial. Consecutive tiles of one class are a *run*,
so a plan is O(S / block * runs). Programs start with the most work first.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile: `block` rows that a program owns, `step` rows of the other operand in each iteration, and how it is launched.

    `max_registers` limits a thread's registers, so that two programs share an SM and one computes exponentials while the other
    multiplies; 0 is no limit.
    """

    block: int
    step: int
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """How the three kernels are launched. `tma` loads through tensor descriptors (Hopper and later); `processors` counts the SMs.

    The blocks of dq are whole steps of dk and dv, which read without a bound what dq leaves for them.
    """

    fwd: Tile
    dq: Tile
    dkdv: Tile
    tma: bool = False
    processors: int = 1

    def __post_init__(self) -> None:
        assert self.dq.block % self.dkdv.step == 0, f"dq blocks of {self.dq.block} are not whole dk/dv steps of {self.dkdv.step}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tiles of every program of one kernel.

    `runs` int32 `[runs + 1, 2]`: (first tile, tiles). `items` int32 `[programs, 16]`, heaviest first, all that a program reads before
    its first tile: (entry, first head of the group, heads, slot of the partial sums or -1), then for the full and for the partial
    tiles (first run, one past its last, tiles, first tile, tiles of the first run), then 2 unused. An entry is `mask batch * blocks +
    block`. `splits` int32 `[split entries, 3]`: (entry, first slot, slots). `longest` is the work of the heaviest program over the
    mean of all, in tiles.
    """

    runs: Tensor
    items: Tensor
    splits: Tensor
    slots: int
    longest: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A mask in the two column forms and the schedule of each kernel.

    `rows` int32 `[mask batch, seqlen_q, 4]`: the visible keys of each query, two half-open intervals. `columns` int32
    `[mask batch, seqlen_kv, 4]`: the masked queries of each key, FlashMask's form. `row_pieces` and `column_pieces`: how many are used.
    `dq` and `dkdv` are None in a plan for the forward alone.
    """

    rows: Tensor
    columns: Tensor
    row_pieces: int
    column_pieces: int
    fwd: Schedule
    dq: Schedule | None
    dkdv: Schedule | None
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        schedules = [s for s in (self.fwd, self.dq, self.dkdv) if s is not None]
        parts = [t for s in schedules for t in (s.runs, s.items, s.splits)]
        object.__setattr__(self, "tensors", (self.rows, self.columns, *parts))

    @property
    def nbytes(self) -> int:
        """Memory of the plan."""
        return sum({t.data_ptr(): t.nbytes for t in self.tensors if t.numel()}.values())


def make_plan(
    row_intervals: Tensor,
    columns: Tensor,
    *,
    fwd: Tile,
    dq: Tile | None = None,
    dkdv: Tile | None = None,
    group: int = 1,
    heads: int = 1,
    processors: int = 1,
) -> Plan:
    """The plan of a mask for the given tiles.

    `row_intervals` int32 `[mask batch, 1, seqlen_q, 2, 2]`, `columns` int32 `[mask batch, 1, seqlen_kv, 2, 2]`. `group` query heads share a
    key/value head and `heads` counts the (batch, key/value head) pairs that one entry serves; key blocks whose group would keep one of the
    `processors` busy for longer than a quarter of its share are split over heads.
    """
    rows, seqlen_kv = row_intervals[:, 0], columns.shape[2]
    masked = columns[:, 0]
    schedules: dict[tuple[int, int], Schedule] = {}

    def by_rows(tile: Tile) -> Schedule:
        key = (tile.block, tile.step)
        if key not in schedules:
            touched, full = tile_classes(rows, seqlen_kv, *key)
            schedules[key] = _schedule(touched, full, 1, 0.0)
        return schedules[key]

    def by_columns(tile: Tile) -> Schedule:
        touched, full = (c.transpose(1, 2) for c in tile_classes(rows, seqlen_kv, tile.step, tile.block))
        return _schedule(touched, full, group, heads / (4.0 * processors))

    return Plan(
        rows=rows.reshape(rows.shape[0], -1, 4).contiguous(),
        columns=masked.reshape(masked.shape[0], -1, 4).contiguous(),
        row_pieces=_pieces(rows),
        column_pieces=_pieces(masked),
        fwd=by_rows(fwd),
        dq=by_rows(dq) if dq else None,
        dkdv=by_columns(dkdv) if dkdv else None,
    )


def _pieces(intervals: Tensor) -> int:
    return 2 if bool((intervals[..., 1, 0] < intervals[..., 1, 1]).any()) else 1


def tile_classes(rows: Tensor, seqlen_kv: int, block_q: int, block_kv: int) -> tuple[Tensor, Tensor]:
    """(touched, full) bool `[mask batch, blocks_q, blocks_kv]` from row intervals `[mask batch, seqlen_q, 2, 2]`.

    Touched: some pair of the tile is visible. Full: every pair is, and the tile does not reach beyond the last key.
    """
    batch, seqlen_q = rows.shape[:2]
    blocks_q, blocks_kv = -(-seqlen_q // block_q), -(-seqlen_kv // block_kv)
    start, end = rows[..., 0], rows[..., 1]
    end = torch.maximum(start, end)
    present = end > start
    height = torch.full((blocks_q,), block_q, device=rows.device)
    height[-1:] = seqlen_q - (blocks_q - 1) * block_q
    cover = _Cover(batch, blocks_q, blocks_kv, block_q, rows.device)
    touching = cover.count(start // block_kv, torch.where(present, (end + block_kv - 1) // block_kv, start // block_kv))
    first = (start + block_kv - 1) // block_kv
    filled = cover.count(first, torch.maximum(end // block_kv, first))
    return touching > 0, filled == height[None, :, None]


@dataclass(frozen=True, slots=True)
class _Cover:
    """Counts, for every tile, how many rows of its block reach it."""

    batch: int
    blocks_q: int
    blocks_kv: int
    block_q: int
    device: torch.device

    def count(self, first: Tensor, last: Tensor) -> Tensor:
        """int32 `[batch, blocks_q, blocks_kv]` from each row's ranges of tiles `[first, last)`, both `[batch, seqlen_q, 2]`."""
        width = self.blocks_kv + 2
        row = torch.arange(first.shape[1], device=self.device) // self.block_q
        base = (torch.arange(self.batch, device=self.device)[:, None] * self.blocks_q + row)[..., None] * width
        steps = torch.zeros(self.batch * self.blocks_q * width, dtype=torch.int32, device=self.device)
        ones = torch.ones(first.numel(), dtype=torch.int32, device=self.device)
        steps.index_add_(0, (base + first).flatten(), ones)
        steps.index_add_(0, (base + last).flatten(), ones, alpha=-1)
        counts = steps.view(self.batch, self.blocks_q, width).cumsum(-1, dtype=torch.int32)
        return counts[..., : self.blocks_kv]


def _schedule(touched: Tensor, full: Tensor, group: int, share: float) -> Schedule:
    """The schedule of one kernel; entries of more work than `share` of the total are split over the heads of their group."""
    touched, full = touched.flatten(0, 1), full.flatten(0, 1)
    full_table, full_runs = _runs(full)
    partial_table, partial_runs = _runs(touched & ~full)
    partial_table[:, :2] += len(full_runs)
    runs = torch.cat((full_runs, partial_runs, full_runs.new_zeros(1, 2)))
    heads, splits, slots, longest = _items(full_table[:, 2] + partial_table[:, 2], group, share)
    entry = heads[:, 0].long()
    walks = [part for table in (full_table[entry], partial_table[entry]) for part in (table, runs[table[:, 0].long()])]
    items = functional.pad(torch.cat((heads, *walks), dim=1), (0, 2))
    return Schedule(runs, items, splits, slots, longest)


def _runs(flags: Tensor) -> tuple[Tensor, Tensor]:
    """(table `[entries, 3]`: first run, one past the last, tiles; runs `[runs, 2]`: first tile, tiles) of the set flags of each row."""
    edges = functional.pad(flags.to(torch.int8), (1, 1)).diff(dim=1)
    entry, first = (edges == 1).nonzero(as_tuple=True)
    last = (edges == -1).nonzero(as_tuple=True)[1]
    count = torch.zeros(len(flags), dtype=torch.int64, device=flags.device).index_add_(0, entry, torch.ones_like(entry))
    table = torch.stack((count.cumsum(0) - count, count.cumsum(0), flags.sum(1)), dim=1)
    return table.to(torch.int32), torch.stack((first, last - first), dim=1).to(torch.int32)


def _items(work: Tensor, group: int, share: float) -> tuple[Tensor, Tensor, int, float]:
    """(the first four columns of items, splits, slots, longest) of entries with `work` tiles a head; see Schedule."""
    tiles = work.cpu()
    total = max(1, int(tiles.sum()) * group)
    limit = max(1.0, share * total)
    pieces = torch.clamp((tiles * group / limit).ceil(), 1, group).to(torch.int64) if share and group > 1 else torch.ones_like(tiles)
    heads = -(-group // pieces)
    pieces = -(-group // heads)
    entry = torch.repeat_interleave(torch.arange(len(tiles)), pieces)
    piece = torch.arange(len(entry)) - torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
    is_split = pieces > 1
    slot = torch.where(is_split[entry], is_split[entry].cumsum(0) - 1, -1)
    first = piece * heads[entry]
    count = torch.minimum(heads[entry], group - first)
    size = tiles[entry] * count
    order = torch.sort(size, descending=True, stable=True).indices
    items = torch.stack((entry, first, count, slot), dim=1)[order].to(torch.int32)
    slots = int(pieces[is_split].sum())
    splits = torch.stack((torch.arange(len(tiles)), pieces.cumsum(0) - pieces, pieces), dim=1)[is_split]
    splits[:, 1] = splits[:, 2].cumsum(0) - splits[:, 2]
    longest = float(size.max()) / (total / len(items)) if len(items) else 0.0
    return items.to(work.device), splits.to(torch.int32).to(work.device), slots, longest
