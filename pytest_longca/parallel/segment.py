"""Segment: what one block kernel is asked, as local row intervals; and the runs that varlen kernels take instead."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHORT_BAND = 16
"""Rows of one key each, the next row the next key: from so many on a band of their own, below it one-row runs (one-token documents)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Query rows `[q0, q1)` over keys `[k0, k1)`, bottom-right aligned, seen through an inclusive window (None is unlimited).

    With off = (k1 - k0) - (q1 - q0), row i sees keys `i + off - left <= j <= i + off + right`. Every row sees a key.
    (None, None) is full, (None, 0) causal, (w, 0) a band, (w, None) anti-causal.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None
    right: int | None


@dataclass(frozen=True, eq=False)
class Round:
    """Runs that one varlen call computes: disjoint ascending rows, disjoint ascending keys, one window.

    `rows` and `keys` are the slices that the call works on. Gaps between runs become sequences without keys or without queries,
    so that operands stay slices: `cu_seqlens_q/kv` are relative to the slices' starts.
    """

    runs: tuple[Run, ...]
    device: torch.device

    @property
    def rows(self) -> slice:
        return slice(self.runs[0].q0, self.runs[-1].q1)

    @property
    def keys(self) -> slice:
        return slice(self.runs[0].k0, self.runs[-1].k1)

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.runs[0].left, self.runs[0].right

    @property
    def is_causal(self) -> bool:
        return self.window == (None, 0)

    @property
    def is_dense(self) -> bool:
        """Whether one sequence fills the slices: no cu_seqlens needed."""
        return len(self.runs) == 1

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence of the call, gaps included."""
        return tuple(pair for pair in self._sequences() if pair != (0, 0))

    def _sequences(self) -> Iterator[tuple[int, int]]:
        q, k = self.runs[0].q0, self.runs[0].k0
        for run in self.runs:
            yield run.q0 - q, 0
            yield 0, run.k0 - k
            yield run.q1 - run.q0, run.k1 - run.k0
            q, k = run.q1, run.k1

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        return self._cumulative(0)

    @cached_property
    def cu_seqlens_kv(self) -> Tensor:
        return self._cumulative(1)

    def _cumulative(self, side: int) -> Tensor:
        lengths = [0, *(pair[side] for pair in self.lengths)]
        return torch.tensor(np.cumsum(lengths), dtype=torch.int32, device=self.device)

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """The rows and the keys of the runs, as positions in the slices: for backends that take no sequence without keys or queries."""
        rows = [torch.arange(run.q0, run.q1) - self.rows.start for run in self.runs]
        keys = [torch.arange(run.k0, run.k1) - self.keys.start for run in self.runs]
        return torch.cat(rows).to(self.device), torch.cat(keys).to(self.device)

    @cached_property
    def without_gaps(self) -> "Round":
        """The same runs, packed one behind the other: the call on what `members` select."""
        packed, q, k = [], 0, 0
        for run in self.runs:
            n, m = run.q1 - run.q0, run.k1 - run.k0
            packed.append(Run(q, q + n, k, k + m, run.left, run.right))
            q, k = q + n, k + m
        return Round(tuple(packed), self.device)

    @cached_property
    def max_seqlen_q(self) -> int:
        return max(pair[0] for pair in self.lengths)

    @cached_property
    def max_seqlen_kv(self) -> int:
        return max(pair[1] for pair in self.lengths)


@dataclass(frozen=True, eq=False)
class Segment:
    """Which of `num_keys` keys each local query sees.

    `intervals` int32 `[rows, 2, 2]` are half-open, disjoint and ascending; unused ones are (0, 0) and last.
    `cache` is where a kernel keeps what it derives from the segment (a mask plan, a block list), so that repeated calls pay once.
    """

    intervals: Tensor
    num_keys: int

    @property
    def num_rows(self) -> int:
        return len(self.intervals)

    @cached_property
    def cache(self) -> dict[Any, Any]:
        return {}

    def dense(self) -> Tensor:
        """bool `[rows, keys]`, True is visible."""
        keys = torch.arange(self.num_keys, device=self.intervals.device)
        start, stop = self.intervals[:, :, :1], self.intervals[:, :, 1:]
        return ((start <= keys) & (keys < stop)).any(1)

    @cached_property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        return int((self.intervals[..., 1] - self.intervals[..., 0]).sum())

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The segment as few varlen calls; a row's second interval comes in a later round and is merged by lse."""
        host = self.intervals.cpu().numpy().astype(np.int64)
        runs = [run for side in (0, 1) for run in find_runs(host[:, side, 0], host[:, side, 1])]
        return tuple(Round(tuple(group), self.intervals.device) for group in _grouped(_unified(runs)))


def find_runs(start: np.ndarray, stop: np.ndarray) -> list[Run]:
    """Greedy runs over the rows of one interval per row (`start`, `stop` int64 `[rows]`); rows with an empty interval are in none.

    Going down a run, the start is constant and then moves by one a row, the stop moves by one a row and is then constant.
    """
    occupied = stop > start
    runs: list[Run] = []
    for first, last in _stretches(occupied):
        runs += _runs_of_stretch(start[first:last], stop[first:last], first)
    return runs


def _stretches(occupied: np.ndarray) -> list[tuple[int, int]]:
    """Maximal ranges of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], occupied.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _runs_of_stretch(start: np.ndarray, stop: np.ndarray, offset: int) -> list[Run]:
    da, db = np.diff(start), np.diff(stop)
    kind = np.where((da >= 0) & (da <= 1) & (db >= 0) & (db <= 1), 2 * da + db, -1)
    changes = np.concatenate(([0], np.flatnonzero(np.diff(kind)) + 1, [len(kind)])) if len(kind) else np.array([0])
    cuts = [0]
    start_moved = stop_rested = False
    for begin, end in zip(changes[:-1].tolist(), changes[1:].tolist(), strict=True):
        step = int(kind[begin])
        is_single_keys = step == 3 and stop[begin] - start[begin] == 1 and end - begin < SHORT_BAND
        breaks = range(begin, end) if step < 0 or is_single_keys else ()
        if not breaks and ((start_moved and step < 2) or (stop_rested and step % 2)):
            breaks = range(begin, begin + 1)
        for row in breaks:
            cuts.append(row + 1)
            start_moved = stop_rested = False
        if end > begin + len(breaks):
            start_moved, stop_rested = start_moved or step >= 2, stop_rested or step % 2 == 0
    pairs = zip(cuts, [*cuts[1:], len(start)], strict=True)
    return [run for first, last in pairs for run in _make_runs(start[first:last], stop[first:last], offset + first)]


def _make_runs(start: np.ndarray, stop: np.ndarray, offset: int) -> list[Run]:
    """One run, or two where FlashAttention-2 would take the window for another.

    A right edge a whole key range away is unlimited to it. And beside a limited left side it takes "unlimited" for the number of keys,
    which hides keys from the first of more rows than keys: those see all keys and become a run of their own.
    """
    rows, k0, k1 = len(start), int(start[0]), int(stop[-1])
    right = int(stop[0]) - 1 - k1 + rows if stop[0] < k1 else None
    if right is not None and right >= k1 - k0:
        rest = int(np.searchsorted(stop, k1)) + 1
        return _make_runs(start[:rest], stop[:rest], offset) + _make_runs(start[rest:], stop[rest:], offset + rest)
    left = k1 - 1 - int(start[-1]) if start[-1] > k0 else None
    if left is not None and right is None and rows > k1 - k0:
        spare = rows - (k1 - k0)
        return [Run(offset, offset + spare, k0, k1, None, None), Run(offset + spare, offset + rows, k0, k1, left, None)]
    return [Run(offset, offset + rows, k0, k1, left, right)]


def _unified(runs: list[Run]) -> list[Run]:
    """One-row runs are full and causal alike: they join the causal ones, so that they cost no call of their own."""
    if not any((run.left, run.right) == (None, 0) for run in runs):
        return runs
    return [Run(run.q0, run.q1, run.k0, run.k1, None, 0) if run.q1 - run.q0 == 1 else run for run in runs]


def _grouped(runs: list[Run]) -> list[list[Run]]:
    """First fit: a run joins the first round of its window that ends before it, in rows and in keys."""
    rounds: dict[tuple[int | None, int | None], list[list[Run]]] = {}
    for run in runs:
        same_window = rounds.setdefault((run.left, run.right), [])
        fit = next((group for group in same_window if group[-1].q1 <= run.q0 and group[-1].k1 <= run.k0), None)
        if fit is None:
            same_window.append([run])
        else:
            fit.append(run)
    return [group for same_window in rounds.values() for group in same_window]
