"""FlashMask's column form: the masked queries of each key, from the visible keys of each query, both as stretches."""

import numpy as np

from pytest_longca.kernels.flashmask_stretches import Ints, Stretches, counts, spread


def masked_queries(rows: Stretches, seqlen_q: int, seqlen_kv: int) -> Stretches | None:
    """The *masked* queries of each key, up to two intervals, from the visible keys of each query; None if a key has more.

    A masked interval of a key begins at query i if i - 1 sees the key and i does not, and ends where it is seen again; the queries before
    the first and after the last count as seeing everything. Such marks come in runs of keys, marked by one query or by one after the
    other. The ends of the runs cut the keys into ranges that the same runs mark: each is a stretch.
    """
    is_end, key, length, query, slope = _marks(rows, seqlen_q, seqlen_kv)
    ends = np.concatenate((key, key + length))
    edges = np.sort(np.concatenate((ends, (0, seqlen_kv))))
    first = edges[:-1][edges[1:] != edges[:-1]]
    ranges = len(first)
    low, high = np.searchsorted(first, ends).reshape(2, -1)
    covered = high - low
    total = int(covered.sum())
    if total > 4 * ranges:  # more than two begins and two ends for each
        return None
    run, number = spread(covered)
    inside = low[run] + number
    slot = is_end[run] * ranges + inside
    marks = np.bincount(slot, minlength=2 * ranges)
    pieces = max(1, int(marks.max(initial=0)))
    if pieces > 2:
        return None
    # The marks of a key come in the order of its queries, and of equal indices the last one is kept.
    chosen, order = np.full((2, 2 * ranges), total), np.arange(total)
    chosen[0, slot[::-1]] = order[::-1]
    chosen[1, slot] = order
    chosen[1, marks < 2] = total
    values = np.zeros((2, total + 1), np.int64)
    values[0, :-1] = query[run] + slope[run] * (first[inside] - key[run])
    values[1, :-1] = slope[run]
    bounds, slopes = values.take(chosen[:pieces], 1).reshape(2, pieces, 2, ranges)
    return Stretches(first, counts(first, seqlen_kv), bounds, slopes)


def visible_queries(masked: Stretches, seqlen_q: int) -> Stretches:
    """The visible queries of each key: what its masked ones leave, one interval more."""
    slopes = np.zeros((masked.pieces + 1, 2, len(masked.first)), np.int64)
    slopes[1:, 0], slopes[:-1, 1] = masked.slopes[:, 1], masked.slopes[:, 0]
    return Stretches(masked.first, masked.count, _gaps(masked.bounds, seqlen_q), slopes)


def _marks(rows: Stretches, seqlen_q: int, seqlen_kv: int) -> tuple[Ints, ...]:
    """Runs of keys that become masked, then runs that become visible again: (0 or 1, first key, keys, query, slope) of each.

    `query` marks the first key, and each next key is marked by `slope` queries later. The runs that mark a key are in the order of the
    queries: stretch by stretch; what happens before it, then inside it, where its upper interval passes a key before the lower one does.
    """
    pieces, stretches = rows.pieces, len(rows.first)
    seen = np.zeros((2, pieces, 2, stretches + 1), np.int64)  # before each stretch and from it on
    seen[:, 0, 1] = seqlen_kv
    seen[0, ..., 1:], seen[1, ..., :-1] = rows.last_bounds, rows.bounds
    gaps = _gaps(seen[::-1], seqlen_kv)
    start = np.maximum(seen[:, :, None, 0], gaps[:, None, :, 0])
    stop = np.minimum(seen[:, :, None, 1], gaps[:, None, :, 1])
    between = pieces * (pieces + 1)
    key, length = np.zeros((2, 2, between + pieces, stretches + 1), np.int64)
    key[:, :between] = start.reshape(2, between, -1)
    length[:, :between] = (stop - start).reshape(2, between, -1)
    key[:, between:, :-1] = rows.bounds[::-1].swapaxes(0, 1)
    length[:, between:, :-1] = (rows.slopes[::-1] * (rows.count - 1)).swapaxes(0, 1)
    side, stretch, kind = np.nonzero(length.swapaxes(1, 2) > 0)
    is_inside = (kind >= between).astype(np.int64)
    query = np.concatenate((rows.first, [seqlen_q]))[stretch] + is_inside
    return side, key[side, kind, stretch], length[side, kind, stretch], query, is_inside


def _gaps(intervals: Ints, size: int) -> Ints:
    """What intervals `[..., pieces, 2, entries]` leave of `size`: `[..., pieces + 1, 2, entries]`, some of them empty."""
    *outer, pieces, _, entries = intervals.shape
    gaps = np.zeros((*outer, pieces + 1, 2, entries), np.int64)
    used = np.where(intervals[..., 1:, :] == 0, size, intervals)
    gaps[..., 1:, 0, :], gaps[..., :-1, 1, :] = used[..., 1, :], used[..., 0, :]
    gaps[..., -1, 1, :] = size
    return gaps
