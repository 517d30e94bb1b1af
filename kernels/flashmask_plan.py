"""FlashMask's plan: which tiles each program of the Triton kernels visits, derived from a mask's row intervals.

Tiles are classified exactly: absent (no visible pair), full (all pairs visible) or partial. Consecutive tiles of one class are a *run*,
so a plan is O(S / block * runs). Programs start with the most work first.

A plan takes as long as its operations and transfers are many, not long: the device classifies tiles and finds where runs begin, the
host gets those in one copy, orders the programs in numpy, and sends all tables back in another.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Ints = NDArray[np.int64]

FULL, PARTIAL = 1, 2
"""Classes of tiles; absent is 0."""

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
    `processors` busy when the others are done are split over heads.
    """
    rows, masked, seqlen_kv = row_intervals[:, 0], columns[:, 0], columns.shape[2]
    by_rows = list(dict.fromkeys((tile.block, tile.step) for tile in (fwd, dq) if tile))
    maps = [tile_classes(rows, seqlen_kv, *sizes) for sizes in by_rows]
    if dkdv:
        maps.append(tile_classes(rows, seqlen_kv, dkdv.step, dkdv.block).transpose(1, 2))
    second = torch.stack((rows[..., 1, 1].amax(), masked[..., 1, 1].amax())) if rows.numel() and masked.numel() else rows.new_zeros(2)
    runs, (row_second, column_second) = _runs_on_host(maps, second)
    splitting = [(1, 0.0)] * len(by_rows) + [(group, processors / heads)]
    drafts = [_draft(*found, *how) for found, how in zip(runs, splitting, strict=False)]
    schedules = _on_device(drafts, rows.device)
    return Plan(
        rows=rows.reshape(rows.shape[0], -1, 4).contiguous(),
        columns=masked.reshape(masked.shape[0], -1, 4).contiguous(),
        row_pieces=2 if row_second else 1,
        column_pieces=2 if column_second else 1,
        fwd=schedules[0],
        dq=schedules[len(by_rows) - 1] if dq else None,
        dkdv=schedules[-1] if dkdv else None,
    )


def tile_classes(rows: Tensor, seqlen_kv: int, block_q: int, block_kv: int) -> Tensor:
    """uint8 `[mask batch, blocks_q, blocks_kv]` from canonical row intervals `[mask batch, seqlen_q, 2, 2]`: absent, FULL or PARTIAL.

    Full: every pair is visible, and the tile does not reach beyond the last key. Blocks are powers of two.
    """
    batch, seqlen_q = rows.shape[:2]
    blocks_q, width, bits = -(-seqlen_q // block_q), -(-seqlen_kv // block_kv) + 1, block_kv.bit_length() - 1
    below, above = rows >> bits, (rows + (block_kv - 1)) >> bits
    touched, filled = (below[..., 0], above[..., 1]), (above[..., 0], torch.maximum(above[..., 0], below[..., 1]))
    # Each row adds 1 to the tiles that it touches and 2^16 to those that it fills: changes along the keys first, then their running sums.
    edges = torch.stack((*touched, *filled))  # [4, batch, seqlen_q, 2]
    block = torch.arange(seqlen_q, device=rows.device).div(block_q, rounding_mode="floor")
    first_cell = (torch.arange(batch, device=rows.device)[:, None] * blocks_q + block) * width
    steps = torch.tensor((1, -1, 1 << 16, -(1 << 16)), dtype=torch.int32).to(rows.device)
    counts = torch.zeros(batch * blocks_q * width, dtype=torch.int32, device=rows.device)
    counts.index_add_(0, (edges + first_cell[..., None]).flatten(), steps.repeat_interleave(edges[0].numel(), output_size=edges.numel()))
    counts = counts.view(batch, blocks_q, width).cumsum(-1, dtype=torch.int32)[..., :-1]
    height = torch.full((blocks_q, 1), block_q, dtype=torch.int32, device=rows.device)
    height[-1:] = seqlen_q - (blocks_q - 1) * block_q
    return PARTIAL * ((counts & 0xFFFF) > 0).to(torch.uint8) - ((counts >> 16) == height).to(torch.uint8)


def _runs_on_host(maps: list[Tensor], extra: Tensor) -> tuple[list[tuple[int, Ints]], list[int]]:
    """(entries, runs int64 `[runs, 4]`: entry, first tile, tiles, class) of each map of tile classes, and the values of `extra`."""
    shapes = [(maps[0].shape[0] * m.shape[1], m.shape[2] + 1) for m in maps]
    # An absent tile behind each entry, and one before all, keep runs inside their entries.
    flat = torch.cat((maps[0].new_zeros(1), *(functional.pad(m, (0, 1)).flatten() for m in maps)))
    begin = (flat[1:] != flat[:-1]).nonzero()[:, 0]
    found = torch.cat((begin, flat[begin + 1], extra)).cpu().numpy()
    count = len(begin)
    at, kind = found[:count], found[count : 2 * count]
    runs = np.stack((at[:-1], np.diff(at), kind[:-1]), 1)[kind[:-1] > 0] if count else np.zeros((0, 3), np.int64)
    offsets = np.cumsum([0, *(entries * width for entries, width in shapes)])
    parts = np.split(runs, np.searchsorted(runs[:, 0], offsets[1:-1]))
    result = []
    for part, offset, (entries, width) in zip(parts, offsets, shapes, strict=False):
        entry, tile = np.divmod(part[:, 0] - offset, width)
        result.append((entries, np.stack((entry, tile, part[:, 1], part[:, 2]), 1)))
    return result, found[2 * count :].tolist()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A schedule whose tables are still on the host."""

    tables: tuple[Ints, Ints, Ints]
    slots: int
    whole: int
    longest: float


def _draft(entries: int, runs: Ints, group: int, rate: float) -> _Draft:
    """The schedule of one kernel, whose entries may be split over the heads of their group for `rate` processors each."""
    kinds = [runs[runs[:, 3] == kind] for kind in (FULL, PARTIAL)]
    table = np.concatenate((*(kind[:, 1:3] for kind in kinds), np.zeros((1, 2), np.int64)))
    walks = [_walks(kinds[0], entries, 0), _walks(kinds[1], entries, len(kinds[0]))]
    heads, splits, slots, whole, longest = _items(walks[0][:, 2] + walks[1][:, 2], group, rate)
    entry = heads[:, 0]
    parts = [part for walk in walks for part in (walk[entry], table[walk[entry, 0]])]
    items = np.concatenate((heads, *parts, np.zeros((len(entry), 2), np.int64)), 1)
    return _Draft((table, items, splits), slots, whole, longest)


def _walks(runs: Ints, entries: int, offset: int) -> Ints:
    """`[entries, 3]`: (first run, one past the last, tiles) of each entry in runs of one class, the first of which is number `offset`."""
    last = np.cumsum(np.bincount(runs[:, 0], minlength=entries))
    sums = np.concatenate(([0], np.cumsum(runs[:, 2])))
    first = np.concatenate(([0], last[:-1])) if entries else last
    return np.stack((first + offset, last + offset, sums[last] - sums[first]), 1)


def _items(tiles: Ints, group: int, rate: float) -> tuple[Ints, Ints, int, int, float]:
    """(the first four columns of items, splits, slots, whole, longest) of entries with `tiles` tiles a head; see Schedule.

    From the heaviest entry on, each is split over heads so far that none of its programs takes more than a processor's share of the work
    that is left: at the end all processors stop together. Entries too light to matter stay whole.
    """
    work = tiles * group
    total = max(1, int(work.sum()))
    by_work = np.argsort(-work, kind="stable")
    left = np.empty_like(work)
    left[by_work] = np.cumsum(work[by_work][::-1])[::-1]
    wanted = np.where(rate * work < WORTH_SPLITTING * total, 1.0, np.ceil(rate * work / np.maximum(left, 1)))
    heads = -(-group // np.clip(wanted, 1, group).astype(np.int64))
    pieces = -(-group // heads)
    before = np.cumsum(pieces) - pieces
    entry = np.repeat(np.arange(len(tiles)), pieces)
    is_split = pieces > 1
    slot = np.where(is_split[entry], np.cumsum(is_split[entry]) - 1, -1)
    first = (np.arange(len(entry)) - before[entry]) * heads[entry]
    count = np.minimum(heads[entry], group - first)
    size = tiles[entry] * count
    order = np.argsort(-size, kind="stable")
    items = np.stack((entry, first, count, slot), 1)[order]
    split = is_split.nonzero()[0]
    splits = np.stack((split, np.cumsum(pieces[split]) - pieces[split], pieces[split]), 1)
    whole = int(np.argmax(items[:, 3] >= 0)) if len(split) else len(items)
    longest = float(size.max()) / (total / len(items)) if len(items) else 0.0
    return items, splits, int(pieces[split].sum()), whole, longest


def _on_device(drafts: list[_Draft], device: torch.device) -> list[Schedule]:
    """The schedules with their tables in device memory, sent as one int32 buffer."""
    tables = [table for draft in drafts for table in draft.tables]
    offsets = np.cumsum([0, *(-(-table.size // ALIGNMENT) * ALIGNMENT for table in tables)])
    buffer = np.zeros(offsets[-1], np.int32)
    for table, offset in zip(tables, offsets, strict=False):
        buffer[offset : offset + table.size] = table.ravel()
    sent = torch.from_numpy(buffer).to(device)
    views = [sent[offset : offset + table.size].view(table.shape) for table, offset in zip(tables, offsets, strict=False)]
    triples = zip(views[::3], views[1::3], views[2::3], strict=True)
    return [Schedule(*triple, draft.slots, draft.whole, draft.longest) for triple, draft in zip(triples, drafts, strict=True)]
