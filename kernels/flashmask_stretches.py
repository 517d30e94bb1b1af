"""Stretches: intervals of many lines in few numbers, since from one line to the next their ends mostly stay or move on by one.

A static mask of any length is a few stretches for each document, so all that FlashMask derives from one costs numpy on the host next
to nothing. Intervals that follow no such rule are as many stretches as lines: the same results, in time that grows with the lines.

Only `of` and `fill` touch every line. They take an interval's start and end as one int64, whose step to the next line tells both steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]

END = 1 << 32
"""What an end counts beside its start in one int64; ends and steps are smaller."""

CHUNK = 1 << 15
"""Lines whose steps are compared at a time: what that takes stays in the cache."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Neighbouring lines (queries, or keys) with up to `pieces` intervals, whose ends stay or move on by one from line to line.

    `first`, `count` int64 `[stretches]`: the lines of each. `bounds` int64 `[pieces, 2, stretches]`: start and end of the intervals of
    its first line; `slopes`, 0 or 1: what is added to them from line to line. Unused intervals are empty.
    """

    first: Ints
    count: Ints
    bounds: Ints
    slopes: Ints

    @classmethod
    def of(cls, lines: Ints32) -> Self:
        """The stretches of canonical intervals `[lines, 4]`; two pieces only if one line has two."""
        first = _begins(lines.view(np.int64))
        count = counts(first, len(lines))
        bounds = lines.take(first, 0).T.astype(np.int64)
        slopes = lines.take(first + (count > 1), 0).T - bounds
        pieces = 2 if bounds[3].any() else 1
        return cls(first, count, *(x[: 2 * pieces].reshape(pieces, 2, -1) for x in (bounds, slopes)))

    @property
    def pieces(self) -> int:
        return len(self.bounds)

    @property
    def last_bounds(self) -> Ints:
        """Start and end of the intervals of the last line of each: as `bounds`."""
        last: Ints = self.bounds + self.slopes * (self.count - 1)
        return last

    def intervals(self) -> Ints:
        """All intervals but empty ones, int64 `[6, intervals]`: the first and the last line; start and end on line 0; their slopes."""
        table = np.empty((6, self.pieces, len(self.first)), np.int64)
        table[0], table[1] = self.first, self.first + self.count - 1
        table[2:4] = (self.bounds - self.slopes * self.first).swapaxes(0, 1)
        table[4:] = self.slopes.swapaxes(0, 1)
        is_used = self.last_bounds[:, 1] > self.bounds[:, 0]
        return table.reshape(6, -1).compress(is_used.ravel(), 1)

    def fill(self, table: Ints32) -> None:
        """Write the intervals of all lines into `[lines, 4]`."""
        pairs = table.view(np.int64)
        pairs[:, self.pieces :] = 0
        bounds, slopes = (x[:, 0] + x[:, 1] * END for x in (self.bounds, self.slopes))
        bounds[:, 1:] -= (bounds + slopes * (self.count - 1))[:, :-1]  # the steps between stretches
        for piece in range(self.pieces):
            steps = slopes[piece].repeat(self.count)
            steps[self.first] = bounds[piece]
            pairs[:, piece] = steps.cumsum(out=steps)


def cut(intervals: Ints, block: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Intervals cut where the lines come to a multiple of their `block`: (parts of each interval; block, lines, ends of each part).

    `lines` int64 `[2, parts]`: the first and the last. `ends` int64 `[2, 2, parts]`: (start on the first line, start on the last;
    end on the first line, end on the last).
    """
    begin = intervals[0] // block
    parts = intervals[1] // block - begin + 1
    size, within = np.array((block, begin - parts.cumsum() + parts)).repeat(parts, 1)
    within += np.arange(len(within))
    table = intervals.repeat(parts, 1)
    lines, at_zero, slopes = table[:2], table[2:4, None], table[4:, None]
    np.maximum(lines[0], within * size, out=lines[0])
    np.minimum(lines[1], within * size + (size - 1), out=lines[1])
    return parts, within, lines, at_zero + slopes * lines


def counts(first: Ints, lines: int) -> Ints:
    """The lines of each of the parts that begin at `first` and follow each other to the end."""
    return np.concatenate((first[1:], [lines])) - first


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """(owner, number among its owner's) of `counts` elements for each owner, one owner's after the other's."""
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _begins(pairs: Ints) -> Ints:
    """The first lines of stretches, from both intervals of each line.

    A leap, where an end goes neither on by one nor stays, begins a stretch, as the first line does; after a leap any steps do.
    """
    begin = np.concatenate(([0, 1], *_turns(pairs)))[: len(pairs)]  # of lines that equal steps lead to
    size = counts(begin, len(pairs))
    is_leap = np.ones(len(begin), np.bool_)
    is_leap[1:] = ((pairs.take(begin[1:], 0) - pairs.take(begin[1:] - 1, 0)) & ~(END + 1)).any(1)
    size[1:] = np.where(is_leap[1:], size[1:], ~is_leap[:-1])
    owner, number = spread(size)
    return begin[owner] + number


def _turns(pairs: Ints) -> Iterator[Ints]:
    """The lines to which other steps lead than to the line before."""
    for start in range(2, len(pairs), CHUNK):
        own = pairs[start - 2 : start + CHUNK]
        steps = own[1:] - own[:-1]
        is_turn = np.not_equal(steps[1:], steps[:-1]).view(np.uint16) != 0  # of either interval
        yield np.flatnonzero(is_turn) + start
