"""Which tiles of a mask are full and which are partial, as runs along the lines' blocks, from stretches: no map of all tiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pytest_longca.kernels.flashmask_stretches import Ints, cut

PARTIAL, FULL = 1, 2
"""Classes of tiles; absent is 0."""

FILLED = 1 << 32
"""The weight of a filled line in sums whose lower bits count the intervals that touch a tile."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of one kernel on one batch of a mask: blocks of `block` lines, each with all tiles of `step` of the `others`.

    `intervals`, as of Stretches, are what each query sees of the keys, or (`by_keys`) the queries that see each key.
    """

    intervals: Ints
    lines: int
    others: int
    block: int
    step: int
    by_keys: bool

    @property
    def blocks(self) -> int:
        return -(-self.lines // self.block)

    @property
    def tiles(self) -> int:
        return -(-self.others // self.step)

    @property
    def query_ends(self) -> tuple[int, int, int]:
        """The last query's line, or -1; how many lines its block has more; where queries end among the others, or -1."""
        return (-1, 0, self.others) if self.by_keys else (self.lines - 1, -self.lines % self.block, -1)


def tile_runs(grids: Sequence[Grid]) -> tuple[Ints, Ints, Ints]:
    """Consecutive tiles of one class: (walk, first tile, tiles) of each run, ascending.

    Entries are the blocks of one grid after the other: all of them in one pass, since short masks cost what numpy's calls cost. The full
    tiles of entry i are walk i, its partial ones are walk i + entries. Full: every pair is visible, and the tile does not reach beyond
    the last key.
    """
    width = 1 + max(grid.tiles for grid in grids)
    height = FILLED * math.lcm(*(grid.block for grid in grids))  # of every block, as far as its lines count for that
    *begins, entries = accumulate((grid.blocks for grid in grids), initial=0)
    edges, weight = _edges(grids, begins, entries * width, width, height)
    order = edges.argsort(kind="stable")  # one stretch in a block, as most have, is sorted already
    total = weight[order].cumsum()
    edges = edges[order]
    last = np.flatnonzero(edges[1:] != edges[:-1])
    edges, total = edges[last], total[last]
    kind = (total > 0).view(np.int8) + (total >= height).view(np.int8)
    change = np.flatnonzero(kind[1:] != kind[:-1]) + 1
    edges, kind = edges[change], kind[change]
    full, partial = np.flatnonzero(kind == FULL), np.flatnonzero(kind == PARTIAL)
    visited = np.concatenate((full, partial))
    first = edges[visited]
    walk = first // width
    tile = first - walk * width
    walk[len(full) :] += entries
    return walk, tile, edges[visited + 1] - first


def _edges(grids: Sequence[Grid], begins: Sequence[int], end: int, width: int, height: int) -> tuple[Ints, Ints]:
    """(tile, what counts from it on) where the intervals of grids begin and end to touch tiles and to fill them.

    The interval of a stretch inside one block touches a run of tiles, and all of its lines fill another run. The entries of a grid begin
    at its own of `begins`, and the tiles of each are `width` further than the previous one's. At -1 and `end`, behind all others, nothing
    changes.
    """
    numbers = [(grid.block, grid.step, begin, height // grid.block, *grid.query_ends) for grid, begin in zip(grids, begins, strict=True)]
    of_intervals = np.array(numbers).T.repeat([grid.intervals.shape[1] for grid in grids], 1)
    parts, block, lines, ends = cut(np.concatenate([grid.intervals for grid in grids], 1), of_intervals[0])
    _, step, begin, line, last_query, missing, end_of_queries = of_intervals.repeat(parts, 1)
    # The last block and the last tile of queries are full without those that do not exist.
    filled = (lines[1] - lines[0] + 1 + (lines[1] == last_query) * missing) * line
    ends[1, 0] += (ends[1, 0] == end_of_queries) * (step - 1)
    ends[:, 1] += step - 1
    edges, weight = np.zeros((2, 4 * len(block) + 2), np.int64)
    edges[0], edges[-1] = -1, end
    at, change = edges[1:-1].reshape(-1, 4).T, weight[1:-1].reshape(-1, 4).T  # touched from, filled from, filled until, touched until
    np.add((ends // step).reshape(4, -1), (begin + block) * width, out=at)
    np.maximum(at[1], at[2], out=at[2])
    change[0], change[1], change[2], change[3] = 1, filled, -filled, -1
    return edges, weight
