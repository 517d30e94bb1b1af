"""FlashMask's plan: which tiles each program of the Triton kernels visits, derived from a mask's row intervals.

Tiles are classified exactly: absent (no visible pair), full (all pairs visible) or partial. Consecutive tiles of one class are a *run*,
so a plan is O(S / block * runs). Programs start with the most work first.

On a GPU the operations of a plan would be many and small, and cost their launches. So the host gets the row intervals in one copy, does
all in numpy on their stretches, and sends the columns and all tables back in another.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pytest_longca.kernels.flashmask_columns import masked_queries, visible_queries
from pytest_longca.kernels.flashmask_stretches import Ints, Ints32, Stretches, spread
from pytest_longca.kernels.flashmask_tiles import Grid, tile_runs

WORTH_SPLITTING = 0.01
"""Entries whose work is below this part of a processor's share are not split."""

ALIGNMENT = 16
"""Tables begin at multiples of so many int32: Triton compiles again for a pointer of another alignment."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile: `block` rows that a program owns, `step` rows of the other operand in each iteration, and how it is launched.

    `max_registers` limits a thread's registers, so that two programs share an SM and one computes exponentials while the other
    multiplies; 0 is no limit. `early` (dk and dv) multiplies V dO^T before the exponentials, not after them: dS is then computed while
    P^T dO is multiplied, for more registers. `in_registers` counts the operands of a program's own rows that registers keep, not shared
    memory, of which products of 64 x 64 then read half as much: q, then dO (dq), or k, then v (dk and dv).
    """

    block: int
    step: int
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int = 0
    early: bool = False
    in_registers: int = 0


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
    """The programs of one kernel.

    `items` int32 `[programs, 16]`, heaviest first, all that a program reads before its first tile: (entry, first head of the group,
    heads, slot of the partial sums or -1), then for the full and for the partial tiles (first run, one past its last, tiles, first tile,
    tiles of the first run), then 2 unused. An entry is `mask batch * blocks + block`. `splits` int32 `[split entries, 3]`: (entry, first
    slot, slots). `whole` counts the items before the first split one, `longest` is the work of the heaviest program over the mean of
    all, in tiles.
    """

    items: Tensor
    splits: Tensor
    slots: int
    whole: int
    longest: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A mask in the two column forms, its tiles and the schedule of each kernel.

    `rows` int32 `[mask batch, seqlen_q, 4]`: the visible keys of each query, two half-open intervals. `columns` int32
    `[mask batch, seqlen_kv, 4]`: the masked queries of each key, FlashMask's form. `row_pieces` and `column_pieces`: how many are used.
    `runs` int32 `[runs + 1, 2]`: (first tile, tiles), of all kernels. `dq` and `dkdv` are None in a plan for the forward alone.
    """

    rows: Tensor
    columns: Tensor
    runs: Tensor
    row_pieces: int
    column_pieces: int
    fwd: Schedule
    dq: Schedule | None
    dkdv: Schedule | None

    @property
    def nbytes(self) -> int:
        """Memory of the plan."""
        parts = [table for schedule in (self.fwd, self.dq, self.dkdv) if schedule for table in (schedule.items, schedule.splits)]
        return sum({t.data_ptr(): t.nbytes for t in (self.rows, self.columns, self.runs, *parts) if t.numel()}.values())


def make_plan(
    row_intervals: Tensor,
    seqlen_kv: int,
    *,
    fwd: Tile,
    dq: Tile | None = None,
    dkdv: Tile | None = None,
    group: int = 1,
    heads: int = 1,
    processors: int = 1,
) -> Plan | None:
    """The plan of a mask for the given tiles; None if a key has more than two intervals of masked queries.

    `row_intervals` int32 `[mask batch, 1, seqlen_q, 2, 2]`, canonical. `group` query heads share a key/value head and `heads` counts the
    (batch, key/value head) pairs that one entry serves; key blocks whose group would keep one of the `processors` busy when the others
    are done are split over heads.
    """
    batch, seqlen_q = row_intervals.shape[0], row_intervals.shape[2]
    lines = row_intervals.reshape(batch, seqlen_q, 4).contiguous()
    rows = [Stretches.of(own) for own in lines.cpu().numpy()]
    masked = [masked_queries(own, seqlen_q, seqlen_kv) for own in rows]
    columns = [own for own in masked if own is not None]
    if len(columns) < batch:
        return None
    seen = [own.intervals() for own in rows]
    by_rows = list(dict.fromkeys((tile.block, tile.step) for tile in (fwd, dq) if tile))
    kernels = [[Grid(own, seqlen_q, seqlen_kv, *sizes, by_keys=False) for own in seen] for sizes in by_rows]
    sharing = [1] * len(kernels)  # heads that programs may divide among each other
    if dkdv:
        seen = [visible_queries(own, seqlen_q).intervals() for own in columns]
        kernels.append([Grid(own, seqlen_kv, seqlen_q, dkdv.block, dkdv.step, by_keys=True) for own in seen])
        sharing.append(group)
    runs, walks = _walks(kernels)
    drafts = [_draft(own, divided, processors / heads) for own, divided in zip(walks, sharing, strict=True)]
    table, tiles, schedules = _on_device(columns, seqlen_kv, runs, drafts, row_intervals.device)
    return Plan(
        rows=lines,
        columns=table,
        runs=tiles,
        row_pieces=max((own.pieces for own in rows), default=1),
        column_pieces=max((own.pieces for own in columns), default=1),
        fwd=schedules[0],
        dq=schedules[len(by_rows) - 1] if dq else None,
        dkdv=schedules[-1] if dkdv else None,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A schedule whose tables are still on the host."""

    items: Ints32
    splits: Ints
    slots: int
    whole: int
    longest: float


def _walks(kernels: list[list[Grid]]) -> tuple[Ints32, list[Ints32]]:
    """The runs of all kernels, and for each kernel `[entries, 10]`: what the items of an entry say of its full and its partial tiles."""
    sizes = [sum(grid.blocks for grid in grids) for grids in kernels]
    walk, tile, count = tile_runs([grid for grids in kernels for grid in grids])
    runs = np.zeros((len(walk) + 1, 2), np.int32)
    runs[:-1, 0], runs[:-1, 1] = tile, count
    entries = sum(sizes)
    number = np.bincount(walk, minlength=2 * entries)
    last = number.cumsum()
    first = last - number
    walks = np.empty((entries, 2, 5), np.int32)
    by_kind = walks.swapaxes(0, 1)
    by_kind[..., 0], by_kind[..., 1] = first.reshape(2, -1), last.reshape(2, -1)
    by_kind[..., 2] = np.bincount(walk, count, 2 * entries).reshape(2, -1)
    by_kind[..., 3:] = runs.take(first, 0).reshape(2, -1, 2)
    return runs, [walks[end - size : end].reshape(-1, 10) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _draft(walks: Ints32, group: int, rate: float) -> _Draft:
    """The schedule of one kernel. Its entries may be split over the heads of their group for `rate` processors each."""
    tiles = walks[:, 2].astype(np.int64) + walks[:, 7]
    (entry, first, heads, slot), splits = _programs(tiles, group, rate)
    items = np.zeros((len(entry), 16), np.int32)
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = entry, first, heads, slot
    items[:, 4:14] = walks.take(entry, 0)
    size = tiles[entry] * heads
    items = items.take((-size).argsort(kind="stable"), 0)
    slots = int(splits[:, 2].sum())
    whole = int((items[:, 3] >= 0).argmax()) if slots else len(items)
    longest = float(size.max()) / (max(1, int(size.sum())) / len(size)) if len(size) else 0.0
    return _Draft(items, splits, slots, whole, longest)


def _programs(tiles: Ints, group: int, rate: float) -> tuple[tuple[Ints, Ints | int, Ints | int, Ints | int], Ints]:
    """(entry, first head, heads, slot or -1) of each program and the splits, in the order of the entries."""
    if group == 1:
        return (np.arange(len(tiles)), 0, 1, -1), np.zeros((0, 3), np.int64)
    heads = _heads_each(tiles * group, group, rate)
    pieces = -(-group // heads)
    entry, number = spread(pieces)
    own = heads[entry]
    first = number * own
    is_split = own < group
    slot = np.where(is_split, is_split.cumsum() - 1, -1)
    split = np.flatnonzero(heads < group)
    slots = pieces[split]
    return (entry, first, np.minimum(own, group - first), slot), np.array((split, slots.cumsum() - slots, slots)).T


def _heads_each(work: Ints, group: int, rate: float) -> Ints:
    """How many heads of the group a program of each entry takes.

    From the heaviest entry on, each is split over heads so far that none of its programs takes more than a processor's share of the work
    that is left: at the end all processors stop together. Entries too light to matter stay whole.
    """
    by_work = (-work).argsort(kind="stable")[::-1]
    left = np.empty_like(work)
    left[by_work] = work[by_work].cumsum()
    share = rate * work
    wanted = np.ceil(share / np.maximum(left, 1))
    wanted[share < WORTH_SPLITTING * work.sum()] = 1
    heads: Ints = -(-group // wanted.clip(1, group).astype(np.int64))
    return heads


def _on_device(
    columns: list[Stretches], seqlen_kv: int, runs: Ints32, drafts: list[_Draft], device: torch.device
) -> tuple[Tensor, Tensor, list[Schedule]]:
    """The columns int32 `[mask batch, seqlen_kv, 4]`, the runs and the schedules in device memory, sent as one buffer."""
    tables = [runs, *(table for draft in drafts for table in (draft.items, draft.splits))]
    sizes = [len(columns) * seqlen_kv * 4, *(table.size for table in tables)]
    offsets = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    buffer = np.empty(offsets[-1], np.int32)
    for own, lines in zip(columns, buffer[: sizes[0]].reshape(len(columns), seqlen_kv, 4), strict=True):
        own.fill(lines)
    for table, offset in zip(tables, offsets[1:], strict=False):
        buffer[offset : offset + table.size] = table.ravel()
    sent = torch.from_numpy(buffer).to(device)
    views = [sent.as_strided(table.shape, (table.shape[1], 1), offset) for table, offset in zip(tables, offsets[1:], strict=False)]
    pairs = zip(views[1::2], views[2::2], drafts, strict=True)
    schedules = [Schedule(items, splits, draft.slots, draft.whole, draft.longest) for items, splits, draft in pairs]
    return sent.as_strided((len(columns), seqlen_kv, 4), (seqlen_kv * 4, 4, 1)), views[0], schedules
