"""FlashMask's plan: which tiles each program of the Triton kernels visits, derived from a mask's row intervals.

Tiles are classified exactly: absent (no visible pair), full (all pairs visible) or partial. Consecutive tiles of one class are a *run*,
so a plan is O(S / block * runs). Programs start with the most work first.

On a GPU the operations of a plan would be many and small, and cost their launches. So the host gets the row intervals in one copy, does
all in numpy on their stretches, and sends the columns and all tables back in another.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pytest_longca.kernels.flashmask_columns import masked_queries, visible_queries
from pytest_longca.kernels.flashmask_stretches import Ints, Ints32, Stretches, spread
from pytest_longca.kernels.flashmask_tiles import PARTIAL, Grid, tile_runs

WORTH_SPLITTING = 0.01
"""Entries whose work is below this part of a processor's share are not split."""

ALIGNMENT = 16
"""Tables begin at multiples of so many int32: Triton compiles again for a pointer of another alignment."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile: `block` rows that a program owns, `step` rows of the other operand in each iteration, and how it is launched.

    `max_registers` limits a thread's registers, so that two programs share an SM and one computes exponentials while the other
    multiplies; 0 is no limit. `early` (dk and dv) multiplies V dO^T before the exponentials, not after them: dS is then computed while
    P^T dO is multiplied, for more registers.
    """

    block: int
    step: int
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int = 0
    early: bool = False


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
    block`. `splits` int32 `[split entries, 3]`: (entry, first slot, slots). `whole` counts the items before the first split one,
    `longest` is the work of the heaviest program over the mean of all, in tiles.
    """

    runs: Tensor
    items: Tensor
    splits: Tensor
    slots: int
    whole: int
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
    by_rows = list(dict.fromkeys((tile.block, tile.step) for tile in (fwd, dq) if tile))
    kernels = [[Grid(own, seqlen_kv, *sizes, by_keys=False) for own in rows] for sizes in by_rows]
    if dkdv:
        seen = [visible_queries(own, seqlen_q) for own in columns]
        kernels.append([Grid(own, seqlen_q, dkdv.block, dkdv.step, by_keys=True) for own in seen])
    drafts = _drafts(kernels, group, processors / heads)
    table, schedules = _on_device(columns, seqlen_kv, drafts, row_intervals.device)
    return Plan(
        rows=lines,
        columns=table,
        row_pieces=max((own.pieces for own in rows), default=1),
        column_pieces=max((own.pieces for own in columns), default=1),
        fwd=schedules[0],
        dq=schedules[len(by_rows) - 1] if dq else None,
        dkdv=schedules[-1] if dkdv else None,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A schedule whose tables are still on the host."""

    tables: tuple[Ints32, Ints32, Ints]
    slots: int
    whole: int
    longest: float


def _drafts(kernels: list[list[Grid]], group: int, rate: float) -> list[_Draft]:
    """The schedule of each kernel from its grids. The entries of one by keys may be split over the heads of their group."""
    entry, tile, count, kind = tile_runs([grid for grids in kernels for grid in grids])
    entries = [0, *accumulate(sum(grid.blocks for grid in grids) for grids in kernels)]
    borders = np.searchsorted(entry, entries).tolist()
    drafts = []
    for grids, (begin, end), (first, last) in zip(kernels, pairwise(entries), pairwise(borders), strict=True):
        own = (entry[first:last] - begin, tile[first:last], count[first:last], kind[first:last] == PARTIAL)
        drafts.append(_draft(end - begin, *own, *((group, rate) if grids[0].by_keys else (1, 0.0))))
    return drafts


def _draft(entries: int, entry: Ints, tile: Ints, count: Ints, is_partial: NDArray[np.bool_], group: int, rate: float) -> _Draft:
    """The schedule of one kernel from its runs. Its entries may be split over the heads of their group for `rate` processors each."""
    order = is_partial.argsort(kind="stable")
    table = np.zeros((len(order) + 1, 2), np.int32)
    table[:-1, 0], table[:-1, 1] = tile.take(order), count.take(order)
    runs = np.bincount(entry + is_partial * entries, minlength=2 * entries)
    last = runs.cumsum()
    first = last - runs
    before = np.zeros(len(table), np.int64)
    table[:-1, 1].cumsum(out=before[1:])
    tiles = before[last] - before[first]
    walks = np.array((first, last, tiles, *table.take(first, 0).T), np.int32).reshape(5, 2, entries).swapaxes(0, 1)
    programs, splits, longest = _programs(tiles[:entries] + tiles[entries:], group, rate)
    items = np.zeros((programs.shape[1], 16), np.int32)
    items[:, :4] = programs.T
    items[:, 4:14] = walks.reshape(10, entries).take(programs[0], 1).T
    slots = int(splits[:, 2].sum())
    whole = int((programs[3] >= 0).argmax()) if slots else len(items)
    return _Draft((table, items, splits), slots, whole, longest)


def _programs(tiles: Ints, group: int, rate: float) -> tuple[Ints, Ints, float]:
    """(`[4, programs]`: what items begin with; splits, longest) of entries with `tiles` tiles a head; see Schedule."""
    if group > 1 and rate:
        programs, splits = _split(tiles, group, rate)
    else:
        programs, splits = np.zeros((4, len(tiles)), np.int64), np.zeros((0, 3), np.int64)
        programs[0], programs[2], programs[3] = np.arange(len(tiles)), group, -1
    size = tiles[programs[0]] * programs[2]
    longest = float(size.max()) / (max(1, int(size.sum())) / len(size)) if len(size) else 0.0
    return programs.take((-size).argsort(kind="stable"), 1), splits, longest


def _split(tiles: Ints, group: int, rate: float) -> tuple[Ints, Ints]:
    """(entry, first head, heads, slot or -1) of each program and the splits, in the order of the entries."""
    heads = _heads_each(tiles * group, group, rate)
    pieces = -(-group // heads)
    entry, number = spread(pieces)
    own = heads[entry]
    first = number * own
    is_split = own < group
    slot = np.where(is_split, is_split.cumsum() - 1, -1)
    split = np.flatnonzero(heads < group)
    slots = pieces[split]
    return np.array((entry, first, np.minimum(own, group - first), slot)), np.array((split, slots.cumsum() - slots, slots)).T


def _heads_each(work: Ints, group: int, rate: float) -> Ints:
    """How many heads of the group a program of each entry takes.

    From the heaviest entry on, each is split over heads so far that none of its programs takes more than a processor's share of the work
    that is left: at the end all processors stop together. Entries too light to matter stay whole.
    """
    by_work = np.argsort(-work, kind="stable")[::-1]
    left = np.empty_like(work)
    left[by_work] = work[by_work].cumsum()
    wanted = np.where(rate * work < WORTH_SPLITTING * work.sum(), 1.0, np.ceil(rate * work / np.maximum(left, 1)))
    heads: Ints = -(-group // np.clip(wanted, 1, group).astype(np.int64))
    return heads


def _on_device(columns: list[Stretches], seqlen_kv: int, drafts: list[_Draft], device: torch.device) -> tuple[Tensor, list[Schedule]]:
    """The columns int32 `[mask batch, seqlen_kv, 4]` and the schedules in device memory, sent as one buffer."""
    sizes = [len(columns) * seqlen_kv * 4, *(table.size for draft in drafts for table in draft.tables)]
    offsets = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    buffer = np.empty(offsets[-1], np.int32)
    for own, lines in zip(columns, buffer[: sizes[0]].reshape(len(columns), seqlen_kv, 4), strict=True):
        own.fill(lines)
    tables = [table for draft in drafts for table in draft.tables]
    for table, offset in zip(tables, offsets[1:], strict=False):
        buffer[offset : offset + table.size] = table.ravel()
    sent = torch.from_numpy(buffer).to(device)
    views = [sent.as_strided(table.shape, (table.shape[1], 1), offset) for table, offset in zip(tables, offsets[1:], strict=False)]
    triples = zip(views[::3], views[1::3], views[2::3], strict=True)
    schedules = [Schedule(*triple, draft.slots, draft.whole, draft.longest) for triple, draft in zip(triples, drafts, strict=True)]
    return sent.as_strided((len(columns), seqlen_kv, 4), (seqlen_kv * 4, 4, 1)), schedules
