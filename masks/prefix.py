"""The prefix language models: causal, but for a prefix that all queries of the sequence or document see."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca.errors import InvalidArgument
from pytest_longca.intervals import canonical
from pytest_longca.lengths import checked_count, checked_lengths, document_starts, same_length, spread
from pytest_longca.mask import Device, Family, Form, Mask, MaskMod, cached_predicate
from pytest_longca.sampling import awkward_edge, awkward_lengths, draw_lengths, draw_prefixes

if TYPE_CHECKING:
    from pytest_longca.sampling import LengthSource

STATIC = frozenset({Form.PREDICATE, Form.ROW_INTERVALS})


@dataclass(frozen=True, slots=True)
class PrefixLmCausal(Mask):
    """Causal, and the first `prefix` keys are visible to all.

    >>> print(PrefixLmCausal(6, 6, prefix=3).draw())
    ###---
    ###---
    ###---
    ####--
    #####-
    ######
    """

    seqlen_q: int
    seqlen_kv: int
    prefix: int
    name: ClassVar[str] = "prefix_lm_causal"
    family: ClassVar[Family] = Family.HETEROGENEOUS
    forms: ClassVar[frozenset[Form]] = STATIC

    def __post_init__(self) -> None:
        for field in ("seqlen_q", "seqlen_kv", "prefix"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
        same_length(self.name, self.seqlen_q, self.seqlen_kv)
        if self.prefix > self.seqlen_kv:
            raise InvalidArgument(f"prefix is {self.prefix}: it must not be longer than the sequence of {self.seqlen_kv}")

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        same_length(cls.name, seqlen, seqlen_kv)
        prefixes = (0, min(1, seqlen), seqlen, awkward_edge(rng, seqlen), rng.randint(0, seqlen), rng.randint(0, seqlen))
        return cls(seqlen, seqlen, rng.choice(prefixes))

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(seqlen, seqlen, Random(seed).randint(0, seqlen))

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        prefix = self.prefix
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < prefix)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        end = torch.arange(1, self.seqlen_q + 1, dtype=torch.int32, device=device).clamp(min=self.prefix)
        return canonical(torch.zeros_like(end), end)


@dataclass(frozen=True, slots=True)
class PrefixLmDocument(Mask):
    """Causal documents that do not see each other, each with a prefix that all of its queries see.

    >>> print(PrefixLmDocument((2, 4), prefixes=(0, 3)).draw())
    #-----
    ##----
    --###-
    --###-
    --###-
    --####
    """

    doc_lens: tuple[int, ...]
    prefixes: tuple[int, ...]
    name: ClassVar[str] = "prefix_lm_document"
    family: ClassVar[Family] = Family.HETEROGENEOUS
    forms: ClassVar[frozenset[Form]] = STATIC

    def __post_init__(self) -> None:
        object.__setattr__(self, "doc_lens", checked_lengths("doc_lens", self.doc_lens))
        object.__setattr__(self, "prefixes", checked_lengths("prefixes", self.prefixes))
        if len(self.prefixes) != len(self.doc_lens):
            raise InvalidArgument(
                f"{len(self.prefixes)} prefixes and {len(self.doc_lens)} doc_lens: give each document a prefix, 0 for none"
            )
        for i, (prefix, length) in enumerate(zip(self.prefixes, self.doc_lens, strict=True)):
            if prefix > length:
                raise InvalidArgument(f"prefixes[{i}] is {prefix}: it must not be longer than its document, doc_lens[{i}] = {length}")

    @property
    def seqlen_q(self) -> int:
        return sum(self.doc_lens)

    @property
    def seqlen_kv(self) -> int:
        return sum(self.doc_lens)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        same_length(cls.name, seqlen, seqlen_kv)
        lens = awkward_lengths(rng, seqlen)
        return cls(lens, tuple(rng.choice((0, min(1, n), n, rng.randint(0, n), rng.randint(0, n))) for n in lens))

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        lens = draw_lengths(seqlen, seed, lengths)
        return cls(lens, draw_prefixes(lens, seed))

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        first, prefix_end = document_starts(self.doc_lens, device), self._prefix_end(device)
        return lambda b, h, q_idx, kv_idx: (kv_idx >= first[q_idx]) & ((kv_idx <= q_idx) | (kv_idx < prefix_end[q_idx]))

    def _prefix_end(self, device: Device) -> Tensor:
        """Where the prefix of each query's document ends: int32 `[seqlen_q]`."""
        return document_starts(self.doc_lens, device) + spread(self.prefixes, self.doc_lens, device)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        end = torch.arange(1, self.seqlen_q + 1, dtype=torch.int32, device=device)
        return canonical(document_starts(self.doc_lens, device), torch.maximum(end, self._prefix_end(device)))
