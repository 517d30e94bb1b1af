"""The regular masks over one sequence: full, causal and the two sliding windows. Bottom-right aligned, windows inclusive."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca.intervals import canonical
from pytest_longca.lengths import checked_count
from pytest_longca.mask import Device, Family, Form, Mask, MaskMod, Varlen, cached_predicate
from pytest_longca.sampling import awkward_edge, scaled

if TYPE_CHECKING:
    from pytest_longca.sampling import LengthSource

DEFAULT_WINDOW = 1024
REGULAR = frozenset({Form.PREDICATE, Form.ROW_INTERVALS, Form.VARLEN})


@dataclass(frozen=True, slots=True)
class _Regular(Mask):
    """One sequence of queries and one of keys; `offset` aligns their ends."""

    seqlen_q: int
    seqlen_kv: int
    family: ClassVar[Family] = Family.REGULAR
    forms: ClassVar[frozenset[Form]] = REGULAR
    unequal_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seqlen_q", checked_count("seqlen_q", self.seqlen_q))
        object.__setattr__(self, "seqlen_kv", checked_count("seqlen_kv", self.seqlen_kv))

    @property
    def offset(self) -> int:
        return self.seqlen_kv - self.seqlen_q

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        return cls(seqlen, seqlen if seqlen_kv is None else seqlen_kv)

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(seqlen, seqlen)

    def _rows(self, device: Device, before: int | None, after: int | None) -> Tensor:
        """Row intervals of the keys from `before` before the diagonal to `after` after it; None is all."""
        diagonal = torch.arange(self.seqlen_q, dtype=torch.int32, device=device) + self.offset
        start = torch.zeros_like(diagonal) if before is None else (diagonal - before).clamp(0, self.seqlen_kv)
        end = torch.full_like(diagonal, self.seqlen_kv) if after is None else (diagonal + after + 1).clamp(0, self.seqlen_kv)
        return canonical(start, end)


@dataclass(frozen=True, slots=True)
class Full(_Regular):
    """Every key is visible.

    >>> print(Full(6, 6).draw())
    ######
    ######
    ######
    ######
    ######
    ######
    """

    name: ClassVar[str] = "full"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        return lambda b, h, q_idx, kv_idx: (q_idx >= 0) & (kv_idx >= 0)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return self._rows(device, None, None)

    def varlen(self) -> Varlen:
        return Varlen((self.seqlen_q,), (self.seqlen_kv,))


@dataclass(frozen=True, slots=True)
class Causal(_Regular):
    """Keys up to the query's own position, counted from the ends of both sequences.

    >>> print(Causal(6, 6).draw())
    #-----
    ##----
    ###---
    ####--
    #####-
    ######
    """

    name: ClassVar[str] = "causal"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        offset = self.offset
        return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return self._rows(device, None, 0)

    def varlen(self) -> Varlen:
        return Varlen((self.seqlen_q,), (self.seqlen_kv,), is_causal=True)


@dataclass(frozen=True, slots=True)
class _Windowed(_Regular):
    """Regular masks with a window; `reach` is the window, no wider than anything that it could hide."""

    window: int

    def __post_init__(self) -> None:
        _Regular.__post_init__(self)
        object.__setattr__(self, "window", checked_count("window", self.window))

    @property
    def reach(self) -> int:
        return min(self.window, self.seqlen_q + self.seqlen_kv)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        awkward = (0, 1, seqlen // 2, max(0, seqlen - 1), seqlen, seqlen + 3, awkward_edge(rng, seqlen))
        window = rng.choice((*awkward, rng.randint(0, seqlen), rng.randint(0, seqlen)))
        return cls(seqlen, seqlen if seqlen_kv is None else seqlen_kv, window)

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(seqlen, seqlen, scaled(DEFAULT_WINDOW, seqlen))


@dataclass(frozen=True, slots=True)
class FullSlidingWindow(_Windowed):
    """Keys at most `window` away on either side.

    >>> print(FullSlidingWindow(6, 6, window=1).draw())
    ##----
    ###---
    -###--
    --###-
    ---###
    ----##
    """

    name: ClassVar[str] = "full_sliding_window"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        offset, reach = self.offset, self.reach
        return lambda b, h, q_idx, kv_idx: (q_idx + offset - kv_idx).abs() <= reach

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return self._rows(device, self.reach, self.reach)

    def varlen(self) -> Varlen:
        return Varlen((self.seqlen_q,), (self.seqlen_kv,), window=(self.window, self.window))


@dataclass(frozen=True, slots=True)
class CausalSlidingWindow(_Windowed):
    """The query's own position and the `window` keys before it.

    >>> print(CausalSlidingWindow(6, 6, window=2).draw())
    #-----
    ##----
    ###---
    -###--
    --###-
    ---###
    """

    name: ClassVar[str] = "causal_sliding_window"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        first, last = self.offset - self.reach, self.offset
        return lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx + first) & (kv_idx <= q_idx + last)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return self._rows(device, self.reach, 0)

    def varlen(self) -> Varlen:
        return Varlen((self.seqlen_q,), (self.seqlen_kv,), is_causal=True, window=(self.window, 0))
