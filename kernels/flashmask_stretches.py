"""Stretches: intervals of many lines in few numbers, since from one line to the next their ends mostly stay or move on by one.

A static mask of any length is a few stretches for each document, so all that FlashMask derives from one costs numpy on the host next
to nothing. Intervals that follow no such rule are as many stretches as lines: the same results, in time that grows with the lines.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


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
        """The stretches of canonical intervals `[lines, 2, 2]`; two pieces only if one line has two."""
        pieces = 2 if lines[:, 1, 1].any() else 1
        ends = np.ascontiguousarray(lines[:, :pieces].reshape(len(lines), 2 * pieces).T)
        steps = np.diff(ends)
        leap = np.bitwise_or.reduce(steps).view(np.uint32) > 1  # an end goes neither on by one nor stays
        code = steps[0] | steps[1] << 1
        if pieces == 2:
            code |= steps[2] << 2 | steps[3] << 3
        begins = leap.copy()
        begins[1:] |= (code[1:] != code[:-1]) & ~leap[:-1]  # after a leap any steps do
        first = np.flatnonzero(np.concatenate((np.ones(min(1, len(lines)), np.bool_), begins)))
        count = np.diff(first, append=len(lines))
        bounds, slopes = ends[:, first].astype(np.int64), np.zeros((2 * pieces, len(first)), np.int64)
        long = count > 1
        slopes[:, long] = steps[:, first[long]]
        return cls(first, count, bounds.reshape(pieces, 2, -1), slopes.reshape(pieces, 2, -1))

    @property
    def pieces(self) -> int:
        return len(self.bounds)

    @property
    def last_bounds(self) -> Ints:
        """Start and end of the intervals of the last line of each: as `bounds`."""
        last: Ints = self.bounds + self.slopes * (self.count - 1)
        return last

    def cut(self, block: int) -> Self:
        """The same lines, no stretch of which goes on over a multiple of `block`."""
        lines = int(self.count.sum())
        first = np.union1d(self.first, np.arange(0, lines, block))
        owner = np.searchsorted(self.first, first, side="right") - 1
        slopes = self.slopes[..., owner]
        bounds = self.bounds[..., owner] + slopes * (first - self.first[owner])
        return type(self)(first, np.diff(first, append=lines), bounds, slopes)

    def fill(self, table: Ints32) -> None:
        """Write the intervals of all lines into `[lines, 4]`."""
        ends = 2 * self.pieces
        at_zero = np.zeros((len(self.first), 4), np.int32)
        at_zero[:, :ends] = (self.bounds - self.slopes * self.first).reshape(ends, -1).T
        table[:] = np.repeat(at_zero, self.count, axis=0)
        line = np.arange(len(table), dtype=np.int32)
        for end, slope in enumerate(self.slopes.reshape(ends, -1).astype(np.int32)):
            if slope.any():
                table[:, end] += np.repeat(slope, self.count) * line
