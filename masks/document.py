"""The masks of packed documents: full and causal ones, a shared question, causal blockwise, and block causal."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca.errors import InvalidArgument
from pytest_longca.intervals import canonical
from pytest_longca.lengths import checked_count, checked_lengths, document_ends, document_ids, document_starts, same_length, spread, starts
from pytest_longca.mask import Device, Family, Form, Mask, MaskMod, Varlen, cached_predicate
from pytest_longca.sampling import awkward_lengths, draw, draw_lengths, scaled

if TYPE_CHECKING:
    from pytest_longca.sampling import LengthSource

DEFAULT_BLOCK = 1024
STATIC = frozenset({Form.PREDICATE, Form.ROW_INTERVALS})


@dataclass(frozen=True, slots=True)
class _Documents(Mask):
    """Documents one after another, each as many queries as keys."""

    doc_lens: tuple[int, ...]
    family: ClassVar[Family] = Family.HETEROGENEOUS
    forms: ClassVar[frozenset[Form]] = STATIC

    def __post_init__(self) -> None:
        object.__setattr__(self, "doc_lens", checked_lengths("doc_lens", self.doc_lens))

    @property
    def seqlen_q(self) -> int:
        return sum(self.doc_lens)

    @property
    def seqlen_kv(self) -> int:
        return sum(self.doc_lens)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        same_length(cls.name, seqlen, seqlen_kv)
        return cls(awkward_lengths(rng, seqlen))

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(draw_lengths(seqlen, seed, lengths))


@dataclass(frozen=True, slots=True)
class _RegularDocuments(Mask):
    """Documents one after another whose keys may be more or fewer than their queries; `doc_lens_kv` None is the same lengths."""

    doc_lens: tuple[int, ...]
    doc_lens_kv: tuple[int, ...] | None = None
    family: ClassVar[Family] = Family.REGULAR
    forms: ClassVar[frozenset[Form]] = STATIC | {Form.VARLEN}
    unequal_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "doc_lens", checked_lengths("doc_lens", self.doc_lens))
        if self.doc_lens_kv is None:
            return
        lens_kv = checked_lengths("doc_lens_kv", self.doc_lens_kv)
        if len(lens_kv) != len(self.doc_lens):
            raise InvalidArgument(
                f"doc_lens_kv has {len(lens_kv)} documents and doc_lens has {len(self.doc_lens)}: "
                f"give each document both lengths; 0 is a length"
            )
        object.__setattr__(self, "doc_lens_kv", None if lens_kv == self.doc_lens else lens_kv)

    @property
    def lens_kv(self) -> tuple[int, ...]:
        return self.doc_lens if self.doc_lens_kv is None else self.doc_lens_kv

    @property
    def seqlen_q(self) -> int:
        return sum(self.doc_lens)

    @property
    def seqlen_kv(self) -> int:
        return sum(self.lens_kv)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        lens = awkward_lengths(rng, seqlen)
        return cls(lens, None if seqlen_kv in (None, seqlen) else awkward_lengths(rng, seqlen_kv or 0, len(lens)))

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        return cls(draw_lengths(seqlen, seed, lengths))

    def _first_key(self, device: Device) -> Tensor:
        """Where the keys of each query's document start: int32 `[seqlen_q]`."""
        return spread(starts(self.lens_kv)[:-1], self.doc_lens, device)


@dataclass(frozen=True, slots=True)
class FullDocument(_RegularDocuments):
    """All keys of the query's own document.

    >>> print(FullDocument((2, 4)).draw())
    ##----
    ##----
    --####
    --####
    --####
    --####
    """

    name: ClassVar[str] = "full_document"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        of_q, of_kv = document_ids(self.doc_lens, device), document_ids(self.lens_kv, device)
        return lambda b, h, q_idx, kv_idx: of_q[q_idx] == of_kv[kv_idx]

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return canonical(self._first_key(device), spread(starts(self.lens_kv)[1:], self.doc_lens, device))

    def varlen(self) -> Varlen:
        return Varlen(self.doc_lens, self.lens_kv)


@dataclass(frozen=True, slots=True)
class CausalDocument(_RegularDocuments):
    """The keys of the query's own document, up to its position counted from the document's ends.

    >>> print(CausalDocument((2, 4)).draw())
    #-----
    ##----
    --#---
    --##--
    --###-
    --####
    """

    name: ClassVar[str] = "causal_document"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        first = self._first_key(device)
        if self.doc_lens_kv is None:
            return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx >= first[q_idx])
        shift = self._shift(device)
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx + shift[q_idx]) & (kv_idx >= first[q_idx])

    def _shift(self, device: Device) -> Tensor:
        """From each query to the key that its document's ends align it with: int32 `[seqlen_q]`."""
        ends = zip(starts(self.doc_lens)[1:], starts(self.lens_kv)[1:], strict=True)
        return spread([kv - q for q, kv in ends], self.doc_lens, device)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        end = torch.arange(1, self.seqlen_q + 1, dtype=torch.int32, device=device)
        return canonical(self._first_key(device), end if self.doc_lens_kv is None else end + self._shift(device))

    def varlen(self) -> Varlen:
        return Varlen(self.doc_lens, self.lens_kv, is_causal=True)


@dataclass(frozen=True, slots=True)
class SharedQuestion(_Documents):
    """Causal documents that all see document 0, the question, and not each other.

    >>> print(SharedQuestion((2, 2, 2)).draw())
    #-----
    ##----
    ###---
    ####--
    ##--#-
    ##--##
    """

    name: ClassVar[str] = "shared_question"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        question, first = self.doc_lens[0], document_starts(self.doc_lens, device)
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx >= first[q_idx]) | (kv_idx < question))

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        end = torch.arange(1, self.seqlen_q + 1, dtype=torch.int32, device=device)
        question = end.clamp(max=self.doc_lens[0])
        start = torch.maximum(document_starts(self.doc_lens, device), question)
        return canonical(torch.zeros_like(end), question, start, end)


@dataclass(frozen=True, slots=True)
class CausalBlockwise(_Documents):
    """Causal documents that do not see each other, but for the last one, which sees all before it.

    >>> print(CausalBlockwise((2, 2, 2)).draw())
    #-----
    ##----
    --#---
    --##--
    #####-
    ######
    """

    name: ClassVar[str] = "causal_blockwise"

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        first = self._first_visible(device)
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx >= first[q_idx])

    def _first_visible(self, device: Device) -> Tensor:
        return spread([*starts(self.doc_lens)[:-2], 0], self.doc_lens, device)

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return canonical(self._first_visible(device), torch.arange(1, self.seqlen_q + 1, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class BlockCausalDocument(_Documents):
    """Documents cut into blocks of `block_size` from their start: a query sees its own block and those before it in its document.

    >>> print(BlockCausalDocument((1, 5), block_size=2).draw())
    #-----
    -##---
    -##---
    -####-
    -####-
    -#####
    """

    block_size: int
    name: ClassVar[str] = "block_causal_document"

    def __post_init__(self) -> None:
        _Documents.__post_init__(self)
        object.__setattr__(self, "block_size", checked_count("block_size", self.block_size, 1))

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        same_length(cls.name, seqlen, seqlen_kv)
        return cls(awkward_lengths(rng, seqlen), rng.choice((1, 2, 3, max(1, seqlen), rng.randint(1, seqlen + 1))))

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        """Documents of 1 to 8 blocks; in a short sequence, which is 8 blocks long, of 1 or 2."""
        block = scaled(DEFAULT_BLOCK, seqlen)
        most = 2 if block < DEFAULT_BLOCK else 8
        return cls(lengths.draw(seqlen, seed) if lengths else draw(f"uniform1-{most}x{block}:{seqlen}:s{seed}"), block)

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        first, size = document_starts(self.doc_lens, device), self.block_size
        last_block = (torch.arange(self.seqlen_q, dtype=torch.int32, device=device) - first) // size

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            into = kv_idx - first[q_idx]
            return (into >= 0) & (into // size <= last_block[q_idx]) & (first[kv_idx] == first[q_idx])

        return mask_mod

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        first = document_starts(self.doc_lens, device)
        into = torch.arange(self.seqlen_q, dtype=torch.int32, device=device) - first
        # Written so that nothing exceeds the sequence by more than a block.
        end = first + into - into % self.block_size + self.block_size
        return canonical(first, torch.minimum(end, document_ends(self.doc_lens, device)))
