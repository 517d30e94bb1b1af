"""Which tiles of a mask are full and which are partial, as runs along the lines' blocks, from stretches: no map of all tiles."""

import numpy as np

from pytest_longca.kernels.flashmask_stretches import Ints, Stretches

FULL, PARTIAL = 1, 2
"""Classes of tiles; absent is 0."""

FILLED = 1 << 32
"""The weight of a line that fills a tile, in sums whose lower bits count the intervals that touch it."""


def tile_runs(lines: Stretches, others: int, block: int, step: int, *, by_keys: bool) -> Ints:
    """Consecutive tiles of one class, int64 `[runs, 4]`: (block of lines, first tile, tiles, FULL or PARTIAL), ascending.

    `lines` are the visible intervals of each query among `others` keys, or (`by_keys`) of each key among the queries. Full: every pair is
    visible, and the tile does not reach beyond the last key. The interval of a stretch inside one block touches a run of tiles, and all
    of its lines fill another run.
    """
    num_lines, tiles = int(lines.count.sum()), -(-others // step)
    parts = lines.cut(block)
    last = parts.last_bounds
    low, high = parts.bounds[:, 0] // step, -(-last[:, 1] // step)
    high = np.where(last[:, 1] > parts.bounds[:, 0], high, low)  # an empty interval touches nothing
    filled_low, filled_high = -(-last[:, 0] // step), parts.bounds[:, 1] // step
    if by_keys:  # the last tile of queries is full without those that do not exist
        filled_high = np.where(parts.bounds[:, 1] == others, tiles, filled_high)
    filled_high = np.maximum(filled_low, filled_high)
    row = parts.first // block * (tiles + 1)
    touching, filling = np.ones_like(low), np.broadcast_to(parts.count * FILLED, low.shape)
    at = np.concatenate([(row + edge).ravel() for edge in (low, high, filled_low, filled_high)])
    weight = np.concatenate([x.ravel() for x in (touching, -touching, filling, -filling)])
    order = np.argsort(at, kind="stable")
    at, total = at[order], np.cumsum(weight[order])
    is_last = np.append(at[1:] != at[:-1], True)[: len(at)]
    at, total = at[is_last], total[is_last]
    owner = at // (tiles + 1)
    height = np.full_like(owner, block) if by_keys else np.minimum(block, num_lines - owner * block)
    kind = np.where(total // FILLED == height, FULL, np.where(total % FILLED > 0, PARTIAL, 0))
    changes = np.append(True, kind[1:] != kind[:-1])[: len(kind)]
    at, kind, owner = at[changes], kind[changes], owner[changes]
    runs: Ints = np.stack((owner, at - owner * (tiles + 1), np.diff(at, append=at[-1:]), kind), 1)[kind > 0]
    return runs
