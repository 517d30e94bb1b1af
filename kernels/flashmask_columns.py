"""FlashMask's column form: the masked queries of each key, from the visible keys of each query, both as stretches."""

import numpy as np

from pytest_longca.kernels.flashmask_stretches import Ints, Stretches


def masked_queries(rows: Stretches, seqlen_q: int, seqlen_kv: int) -> Stretches | None:
    """The *masked* queries of each key, up to two intervals, from the visible keys of each query; None if a key has more.

    A masked interval of a key begins at query i if i - 1 sees the key and i does not, and ends where it is seen again; the queries before
    the first and after the last count as seeing everything. Such marks come in runs of keys, marked by one query or by one after the
    other. The ends of the runs cut the keys into ranges that the same runs mark: each is a stretch.
    """
    is_end, key, length, query, slope = _marks(rows, seqlen_q, seqlen_kv)
    edges = np.unique(np.concatenate((key, key + length, (0, seqlen_kv))))
    ranges = len(edges) - 1
    low, high = np.searchsorted(edges, key), np.searchsorted(edges, key + length)
    cover = high - low
    total = int(cover.sum())
    if total > 4 * ranges:  # more than two begins and two ends for each
        return None
    run = np.repeat(np.arange(len(key)), cover)
    inside = low[run] + np.arange(total) - np.repeat(np.cumsum(cover) - cover, cover)
    slot = is_end[run] * ranges + inside
    marks = np.bincount(slot, minlength=2 * ranges)
    if marks.max(initial=0) > 2:
        return None
    # The marks of a key come in the order of its queries, and of equal indices the last one is kept.
    chosen = np.full((2, 2 * ranges), total)
    chosen[0, slot[::-1]] = np.arange(total)[::-1]
    chosen[1, slot] = np.arange(total)
    chosen[1, marks < 2] = total
    value = np.append(query[run] + slope[run] * (edges[inside] - key[run]), 0)
    pieces = max(1, int(marks.max(initial=0)))
    bounds, slopes = (x[chosen[:pieces]].reshape(pieces, 2, ranges) for x in (value, np.append(slope[run], 0)))
    return Stretches(edges[:-1], np.diff(edges), bounds, slopes)


def visible_queries(masked: Stretches, seqlen_q: int) -> Stretches:
    """The visible queries of each key: what its masked ones leave, one interval more."""
    unused = masked.bounds[:, 1] == 0
    begin, end = np.where(unused, seqlen_q, masked.bounds[:, 0]), np.where(unused, seqlen_q, masked.bounds[:, 1])
    nothing = np.zeros((1, len(masked.first)), np.int64)
    bounds = np.stack((np.concatenate((nothing, end)), np.concatenate((begin, nothing + seqlen_q))), 1)
    slopes = np.stack((np.concatenate((nothing, masked.slopes[:, 1])), np.concatenate((masked.slopes[:, 0], nothing))), 1)
    return Stretches(masked.first, masked.count, bounds, slopes)


def _marks(rows: Stretches, seqlen_q: int, seqlen_kv: int) -> Ints:
    """Runs of keys that become masked, then runs that become visible again: int64 `[5, runs]`: (0 or 1, first key, keys, query, slope).

    `query` marks the first key, and each next key is marked by `slope` queries later. The runs that mark a key are in the order of the
    queries: stretch by stretch; what happens before it, then inside it, where its upper interval passes a key before the lower one does.
    """
    everything, nothing = np.zeros((rows.pieces, 2, 1), np.int64), np.zeros((rows.pieces, 1), np.int64)
    everything[0, 1] = seqlen_kv
    before, after = np.concatenate((everything, rows.last_bounds), 2), np.concatenate((rows.bounds, everything), 2)
    keys, counts = rows.bounds[::-1], rows.slopes[::-1] * (rows.count - 1)
    at_begin = np.append(rows.first, seqlen_q)
    found = []
    for side, between in enumerate((_differences(before, after, seqlen_kv), _differences(after, before, seqlen_kv))):
        key = np.concatenate((between[0], np.concatenate((keys[:, side], nothing), 1))).T  # [stretches + 1, runs]
        length = np.concatenate((between[1], np.concatenate((counts[:, side], nothing), 1))).T
        stretch, kind = np.nonzero(length > 0)
        is_inside = kind >= len(between[0])
        query = at_begin[stretch] + is_inside
        found.append(np.stack((np.full_like(stretch, side), key[stretch, kind], length[stretch, kind], query, is_inside)))
    return np.concatenate(found, 1)


def _differences(a: Ints, b: Ints, seqlen_kv: int) -> tuple[Ints, Ints]:
    """(first key, keys) of the parts of a \\ b for intervals `[pieces, 2, entries]`: `[parts, entries]`, some of them without keys."""
    unused = b[:, 1] == 0
    nothing = np.zeros((1, b.shape[2]), np.int64)
    low = np.concatenate((nothing, np.where(unused, seqlen_kv, b[:, 1])))  # what lies between the intervals of b
    high = np.concatenate((np.where(unused, seqlen_kv, b[:, 0]), nothing + seqlen_kv))
    start = np.maximum(a[:, None, 0], low)
    return start.reshape(-1, start.shape[2]), (np.minimum(a[:, None, 1], high) - start).reshape(-1, start.shape[2])
