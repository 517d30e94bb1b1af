"""The global sliding window: a window, and tokens that see all and are seen by all."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca.intervals import canonical
from pytest_longca.lengths import checked_count, same_length
from pytest_longca.mask import Device, Family, Form, Mask, MaskMod, cached_predicate
from pytest_longca.sampling import awkward_edge, scaled

if TYPE_CHECKING:
    from pytest_longca.sampling import LengthSource

DEFAULT_WINDOW = 1024
DEFAULT_GLOBAL = 512


@dataclass(frozen=True, slots=True)
class GlobalSlidingWindow(Mask):
    """Keys at most `window` away; and the first `num_global` tokens see all and are seen by all.

    >>> print(GlobalSlidingWindow(6, 6, window=1, num_global=1).draw())
    ######
    ###---
    ####--
    #-###-
    #--###
    #---##
    """

    seqlen_q: int
    seqlen_kv: int
    window: int
    num_global: int
    name: ClassVar[str] = "global_sliding_window"
    family: ClassVar[Family] = Family.HETEROGENEOUS
    forms: ClassVar[frozenset[Form]] = frozenset({Form.PREDICATE, Form.ROW_INTERVALS})

    def __post_init__(self) -> None:
        for field in ("seqlen_q", "seqlen_kv", "window", "num_global"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
        same_length(self.name, self.seqlen_q, self.seqlen_kv)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        same_length(cls.name, seqlen, seqlen_kv)
        awkward = (0, 1, seqlen // 2, seqlen, seqlen + 3, awkward_edge(rng, seqlen))
        window, num_global = (rng.choice((*awkward, rng.randint(0, seqlen), rng.randint(0, seqlen))) for _ in range(2))
        return cls(seqlen, seqlen, window, num_global)

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(seqlen, seqlen, scaled(DEFAULT_WINDOW, seqlen), scaled(DEFAULT_GLOBAL, seqlen))

    @property
    def reach(self) -> int:
        """The window, no wider than the sequence."""
        return min(self.window, self.seqlen_q)

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        reach, num_global = self.reach, self.num_global

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ((q_idx - kv_idx).abs() <= reach) | (q_idx < num_global) | (kv_idx < num_global)

        return mask_mod

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        row = torch.arange(self.seqlen_q, dtype=torch.int32, device=device)
        global_end = torch.where(row < self.num_global, self.seqlen_kv, min(self.num_global, self.seqlen_kv)).to(torch.int32)
        end = (row + self.reach + 1).clamp(max=self.seqlen_kv)
        return canonical(torch.zeros_like(row), global_end, (row - self.reach).clamp(min=0), end)
