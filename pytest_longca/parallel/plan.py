"""Plan: from the token ids that each ring rank holds to the segments that its block kernel computes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pytest_longca.intervals import canonical
from pytest_longca.parallel.segment import Segment


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One block's work on one rank: slices of the local rows and of the block's keys, and the mask between them."""

    rows: slice
    keys: slice
    segment: Segment


@dataclass(eq=False)
class Plan:
    """Where every token is, and what the ring rank `own` computes of each block.

    `intervals` int32 `[tokens, 2, 2]` are the mask's row intervals, `shards` the ascending ids of each ring rank. A block is named by the
    ring ranks that it came from: its keys are those ranks' ids, sorted.
    """

    intervals: Tensor
    shards: list[Tensor]
    own: int
    device: torch.device
    is_exact: bool = False  # see make_step
    _steps: dict[tuple[int, ...], Step | None] = field(default_factory=dict)
    _orders: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each ring rank."""
        return [len(ids) for ids in self.shards]

    def step(self, sources: tuple[int, ...]) -> Step | None:
        """The work between this rank's rows and the block of `sources`, or None if no row sees any of its keys."""
        if sources not in self._steps:
            keys = torch.cat([self.shards[source] for source in sources]).sort().values
            self._steps[sources] = make_step(self.intervals[self.shards[self.own]], keys, self.device, self.is_exact)
        return self._steps[sources]

    def order(self, sources: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The permutation that sorts the concatenated shards of `sources` by token id, and its inverse."""
        if sources not in self._orders:
            order = torch.cat([self.shards[source] for source in sources]).argsort()
            self._orders[sources] = order.to(self.device), order.argsort().to(self.device)
        return self._orders[sources]


def make_step(intervals: Tensor, key_ids: Tensor, device: torch.device, is_exact: bool = False) -> Step | None:
    """The mask between rows with global `intervals` int32 `[rows, 2, 2]` and ascending `key_ids`.

    Cut to the rows and keys that take part, in eighths of all, so that backends that compile for each shape meet few shapes, unless
    `is_exact`. None if there are none.
    """
    local = localise(intervals, key_ids)
    occupied = local[..., 1] > local[..., 0]
    rows = occupied.any(1).nonzero().flatten()
    if len(rows) == 0:
        return None
    first_row, end_row = _widened(int(rows[0]), int(rows[-1]) + 1, len(local), is_exact)
    first_key, end_key = _widened(int(local[..., 0][occupied].min()), int(local[..., 1].max()), len(key_ids), is_exact)
    local = local[first_row:end_row] - first_key * occupied[first_row:end_row, :, None].to(torch.int32)
    segment = Segment(local.contiguous().to(device), end_key - first_key)
    return Step(slice(first_row, end_row), slice(first_key, end_key), segment)


def _widened(start: int, stop: int, total: int, is_exact: bool) -> tuple[int, int]:
    unit = 1 if is_exact else -(-total // 8)
    return start // unit * unit, min(total, -(-stop // unit) * unit)


def localise(intervals: Tensor, key_ids: Tensor) -> Tensor:
    """Global intervals as ranges of positions in ascending `key_ids`: still two at most, canonical int32 `[rows, 2, 2]`."""
    ranges = torch.searchsorted(key_ids, intervals.to(key_ids.dtype).contiguous())
    return canonical(ranges[:, 0, 0], ranges[:, 0, 1], ranges[:, 1, 0].maximum(ranges[:, 0, 0]), ranges[:, 1, 1])[0, 0]
