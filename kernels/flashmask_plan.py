"""FlashMask's plan: which tiles each program of the Triton kernels visits, derived from a mask's row intervals.

Tiles are classified exactly: absent (no visible pair), full (all pairs visible) or partial. Consecutive tiles of one class are a *run*,
so a plan is O(S / block * runs). Programs start with the most work first.

On a GPU the operations of a plan would be many and small, and cost their launches. So the host gets the row intervals in one copy, does
all in numpy on their stretches, and sends the columns and all tables back in another.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pytest_longca.kernels.flashmask_columns import masked_queries, visible_queries
from pytest_longca.kernels.flashmask_stretches import Ints, Stretches
from pytest_longca.kernels.flashmask_tiles import FULL, PARTIAL, tile_runs

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
    rows = [Stretches.of(lines) for lines in row_intervals[:, 0].cpu().numpy()]
    masked = [masked_queries(own, seqlen_q, seqlen_kv) for own in rows]
    columns = [own for own in masked if own is not None]
    if len(columns) < batch:
        return None
    by_rows = list(dict.fromkeys((tile.block, tile.step) for tile in (fwd, dq) if tile))
    drafts = [_draft(*_entries(rows, seqlen_q, seqlen_kv, *sizes, by_keys=False), 1, 0.0) for sizes in by_rows]
    if dkdv:
        seen = [visible_queries(own, seqlen_q) for own in columns]
        found = _entries(seen, seqlen_kv, seqlen_q, dkdv.block, dkdv.step, by_keys=True)
        drafts.append(_draft(*found, group, processors / heads))
    table, schedules = _on_device(columns, seqlen_kv, drafts, row_intervals.device)
    return Plan(
        rows=row_intervals[:, 0].reshape(batch, -1, 4).contiguous(),
        columns=table,
        row_pieces=max((own.pieces for own in rows), default=1),
        column_pieces=max((own.pieces for own in columns), default=1),
        fwd=schedules[0],
        dq=schedules[len(by_rows) - 1] if dq else None,
        dkdv=schedules[-1] if dkdv else None,
    )


def _entries(masks: list[Stretches], num_lines: int, others: int, block: int, step: int, *, by_keys: bool) -> tuple[int, Ints]:
    """(entries, runs int64 `[runs, 4]`: entry, first tile, tiles, class) of one kernel over the batches of a mask; see `tile_runs`."""
    blocks = -(-num_lines // block)
    runs = [tile_runs(lines, others, block, step, by_keys=by_keys) for lines in masks]
    for batch, own in enumerate(runs):
        own[:, 0] += batch * blocks
    return len(masks) * blocks, np.concatenate(runs)


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


def _on_device(columns: list[Stretches], seqlen_kv: int, drafts: list[_Draft], device: torch.device) -> tuple[Tensor, list[Schedule]]:
    """The columns int32 `[mask batch, seqlen_kv, 4]` and the schedules in device memory, sent as one buffer."""
    sizes = [len(columns) * seqlen_kv * 4, *(table.size for draft in drafts for table in draft.tables)]
    offsets = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    buffer = np.empty(offsets[-1], np.int32)
    for own, table in zip(columns, buffer[: sizes[0]].reshape(len(columns), seqlen_kv, 4), strict=True):
        own.fill(table)
    tables = [table for draft in drafts for table in draft.tables]
    for table, offset in zip(tables, offsets[1:], strict=False):
        buffer[offset : offset + table.size] = table.ravel()
    sent = torch.from_numpy(buffer).to(device)
    views = [sent[offset : offset + table.size].view(table.shape) for table, offset in zip(tables, offsets[1:], strict=False)]
    triples = zip(views[::3], views[1::3], views[2::3], strict=True)
    schedules = [Schedule(*triple, draft.slots, draft.whole, draft.longest) for triple, draft in zip(triples, drafts, strict=True)]
    return sent[: sizes[0]].view(len(columns), seqlen_kv, 4), schedules
