"""Picked: some of a mask's queries, keys or heads as a mask: the reference of a few rows or columns is that of a smaller case."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.mask import Device, Mask, MaskMod


class _Picked(Mask):
    """What both views share: the mask's own axes. Equal only to itself: it holds a tensor."""

    mask: Mask
    name = "picked"

    @property
    def heads(self) -> int:
        return self.mask.heads

    @property
    def batch(self) -> int:
        return self.mask.batch


@dataclass(eq=False)
class PickedQueries(_Picked):
    """The queries `picked`, ascending int64, and all keys."""

    mask: Mask
    picked: Tensor

    @property
    def seqlen_q(self) -> int:
        return len(self.picked)

    @property
    def seqlen_kv(self) -> int:
        return self.mask.seqlen_kv

    def predicate(self, device: Device = "cpu") -> MaskMod:
        mod, picked = self.mask.predicate(device), self.picked.to(device)
        return lambda b, h, q_idx, kv_idx: mod(b, h, picked[q_idx], kv_idx)

    def row_intervals(self, device: Device = "cpu") -> Tensor | None:
        rows = self.mask.row_intervals(device)
        return None if rows is None else rows[:, :, self.picked.to(device)]


@dataclass(eq=False)
class PickedKeys(_Picked):
    """All queries, and the keys `picked`, ascending int64."""

    mask: Mask
    picked: Tensor

    @property
    def seqlen_q(self) -> int:
        return self.mask.seqlen_q

    @property
    def seqlen_kv(self) -> int:
        return len(self.picked)

    def predicate(self, device: Device = "cpu") -> MaskMod:
        mod, picked = self.mask.predicate(device), self.picked.to(device)
        return lambda b, h, q_idx, kv_idx: mod(b, h, q_idx, picked[kv_idx])

    def row_intervals(self, device: Device = "cpu") -> Tensor | None:
        rows = self.mask.row_intervals(device)
        if rows is None:
            return None
        # A run of keys is the run of those picked keys that lie in it; runs that hold none are empty and go last.
        runs = torch.searchsorted(self.picked.to(device, torch.int32), rows.contiguous()).to(torch.int32)
        empty = runs[..., :1, 1] <= runs[..., :1, 0]
        runs = torch.where(empty[..., None], runs.flip(-2), runs)
        return runs.masked_fill((runs[..., 1] <= runs[..., 0])[..., None], 0)


@dataclass(eq=False)
class PickedHeads(_Picked):
    """Some query heads, in a row, of a mask whose heads differ."""

    mask: Mask
    first: int
    count: int

    @property
    def heads(self) -> int:
        return self.count

    @property
    def seqlen_q(self) -> int:
        return self.mask.seqlen_q

    @property
    def seqlen_kv(self) -> int:
        return self.mask.seqlen_kv

    def predicate(self, device: Device = "cpu") -> MaskMod:
        mod, first = self.mask.predicate(device), self.first
        return lambda b, h, q_idx, kv_idx: mod(b, h + first, q_idx, kv_idx)

    def row_intervals(self, device: Device = "cpu") -> Tensor | None:
        rows = self.mask.row_intervals(device)
        return None if rows is None else rows[:, self.first : self.first + self.count]
