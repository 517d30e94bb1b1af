"""Which tiles of a mask are full and which are partial, as runs along the lines' blocks, from stretches: no map of all tiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pytest_longca.kernels.flashmask_stretches import Ints, Stretches

PARTIAL, FULL = 1, 2
"""Classes of tiles; absent is 0."""

FILLED = 1 << 32
"""The weight of a filled line in sums whose lower bits count the intervals that touch a tile."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of one kernel on one batch of a mask: blocks of `block` lines, each with all tiles of `step` of the `others`.

    `lines` are the visible intervals of each query among `others` keys, or (`by_keys`) of each key among the queries.
    """

    lines: Stretches
    others: int
    block: int
    step: int
    by_keys: bool

    @property
    def blocks(self) -> int:
        return -(-self.lines.lines // self.block)

    @property
    def tiles(self) -> int:
        return -(-self.others // self.step)


def tile_runs(grids: Sequence[Grid]) -> tuple[Ints, Ints, Ints, NDArray[np.int8]]:
    """Consecutive tiles of one class: (entry, first tile, tiles, FULL or PARTIAL) of each run, ascending.

    Entries are the blocks of one grid after the other: all of them in one pass, since short masks cost what numpy's calls cost. Full:
    every pair is visible, and the tile does not reach beyond the last key.
    """
    width = 1 + max(grid.tiles for grid in grids)
    height = FILLED * math.lcm(*(grid.block for grid in grids))  # of every block, as far as its lines count for that
    origins = [0, *accumulate(grid.blocks * width for grid in grids)]
    found = [_edges(grid, origin, width, height // grid.block) for grid, origin in zip(grids, origins, strict=False)]
    edges = np.concatenate(([-1], *(at for at, _ in found), origins[-1:]))  # nothing changes at the first and the last
    weight = np.concatenate(([0], *(own for _, own in found), [0]))
    order = edges.argsort(kind="stable")  # one stretch in a block, as most have, is sorted already
    total = weight[order].cumsum()
    edges = edges[order]
    last = np.flatnonzero(edges[1:] != edges[:-1])
    edges, total = edges[last], total[last]
    kind = (total > 0).view(np.int8) + (total >= height).view(np.int8)
    change = np.flatnonzero(kind[1:] != kind[:-1]) + 1
    edges, kind = edges[change], kind[change]
    visited = np.flatnonzero(kind)
    first = edges[visited]
    entry = first // width
    return entry, first - entry * width, edges[visited + 1] - first, kind[visited]


def _edges(grid: Grid, origin: int, width: int, line: int) -> tuple[Ints, Ints]:
    """(tile, what counts from it on) where the intervals of `grid` begin and end to touch tiles and to fill them.

    The interval of a stretch inside one block touches a run of tiles, and all of its lines fill another run, for `line` each. The tiles
    of a block begin at `origin` and the next block's are `width` further.
    """
    block, lines, ends = grid.lines.cut(grid.block)
    filled = (lines[1] - lines[0] + 1) * line
    if grid.by_keys:  # the last tile of queries is full without those that do not exist
        ends[1, 0, ends[1, 0] == grid.others] = grid.tiles * grid.step
    elif missing := -grid.lines.lines % grid.block:  # and so is the last block's
        filled[lines[1] == grid.lines.lines - 1] += missing * line
    ends[:, 1] += grid.step - 1
    at = (ends // grid.step + (origin + block * width)).reshape(4, -1)  # touched from, filled from, filled until, touched until
    np.maximum(at[1], at[2], out=at[2])
    change = np.ones_like(at)
    change[1:3] = filled
    change[2:] *= -1
    return at.T.ravel(), change.T.ravel()
