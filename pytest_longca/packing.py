"""How a regular mask reaches FlashAttention and cuDNN: a band, and cu_seqlens when there is more than one document.

One helper for all of them, so that document lengths, windows and the batch mean the same to each. The batch is folded into the packing:
every batch element repeats the mask's documents.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.mask import Varlen

ALIGNMENT_BYTES = 16
"""What vectorised loads and TMA descriptors need of every base address and stride."""


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys around the bottom-right diagonal are visible: inclusive sides, None is unlimited.

    A side that no document can reach is None, so that a window wider than the sequence is the same as no window.
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        """Plain causal: everything up to the diagonal."""
        return self.left is None and self.right == 0

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    def sides(self, unlimited: int | None) -> tuple[int | None, int | None]:
        """`(left, right)` with `unlimited` as the backend's word for None."""
        return tuple(unlimited if side is None else side for side in (self.left, self.right))  # type: ignore[return-value]  # two sides


def band_of(varlen: Varlen) -> Band:
    """The band of a regular mask."""
    left, right = varlen.window or (None, None)
    if varlen.is_causal:
        right = 0
    if left is not None and left >= max(varlen.lens_kv, default=0) - 1:
        left = None
    if right is not None and right >= max(varlen.lens_q, default=0) - 1 and not varlen.is_causal:
        right = None
    return Band(left, right)


def sees_nothing(seqlen_q: int, seqlen_kv: int, band: Band) -> bool:
    """Whether a document has a query that sees no key: only the first rows can, as the band is bottom-right aligned."""
    return seqlen_q > 0 and (seqlen_kv == 0 or (band.right is not None and seqlen_kv - seqlen_q + band.right < 0))


@dataclass(frozen=True, slots=True)
class Packing:
    """A case's regular mask for a kernel with cu_seqlens: dense BSHD for one document, packed THD for more.

    `cu_seqlens_q/kv` are int32 `[batch * documents + 1]`, None when dense.
    """

    batch: int
    lens_q: tuple[int, ...]
    lens_kv: tuple[int, ...]
    band: Band
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None

    @property
    def max_seqlen_q(self) -> int:
        return max(self.lens_q, default=0)

    @property
    def max_seqlen_kv(self) -> int:
        return max(self.lens_kv, default=0)

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def has_empty_rows(self) -> bool:
        """Whether any query sees no key."""
        return any(sees_nothing(q, kv, self.band) for q, kv in zip(self.lens_q, self.lens_kv, strict=True))

    @property
    def form(self) -> str:
        """One line for the record."""
        kind = f"packed, {self.batch * len(self.lens_q)} documents" if self.is_packed else "dense"
        return f"{kind}, band {self.band.left, self.band.right}"

    def pack(self, x: Tensor) -> Tensor:
        """`[batch, seqlen, heads, head_dim]` to `[tokens, heads, head_dim]` when packed: a view where the strides allow, else a copy."""
        return x.flatten(0, 1) if self.is_packed else x

    def unpack(self, out: Tensor) -> Tensor:
        """The inverse of `pack`, a view."""
        return out.unflatten(0, (self.batch, -1)) if self.is_packed else out

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """`[heads, tokens]` (packed) to `[batch, heads, seqlen_q]`, a view; a dense lse has that shape already."""
        return lse.unflatten(1, (self.batch, -1)).transpose(0, 1) if self.is_packed else lse


def regular_form(case: Case) -> Varlen:
    """The mask's regular form, which `supports` has asked for."""
    varlen = case.mask.varlen()
    assert varlen is not None, f"{case.mask.name} has no regular form: supports must refuse it"
    return varlen


def packing_of(case: Case, device: torch.device | str, always_packed: bool = False) -> Packing:
    """The packing of a case whose mask is regular."""
    varlen = regular_form(case)
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
    if varlen.is_packed or always_packed:
        cu_seqlens = tuple(_cu_seqlens(lens * case.batch, device) for lens in (varlen.lens_q, varlen.lens_kv))  # type: ignore[assignment]  # two of them
    return Packing(case.batch, varlen.lens_q, varlen.lens_kv, band_of(varlen), *cu_seqlens)


def _cu_seqlens(lens: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)


def dense_or_varlen(
    packing: Packing, dense: Callable[..., Any], varlen: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """FlashAttention's function of `(q, k, v)` for a packing: its dense form, or its varlen form with the lengths, with `options`."""
    if not packing.is_packed:
        return functools.partial(dense, **options)
    return functools.partial(
        varlen,
        cu_seqlens_q=packing.cu_seqlens_q,
        cu_seqlens_k=packing.cu_seqlens_kv,
        max_seqlen_q=packing.max_seqlen_q,
        max_seqlen_k=packing.max_seqlen_kv,
        **options,
    )


def aligned(x: Tensor) -> Tensor:
    """`x`, copied if its strides or its address are none that vectorised loads and TMA take."""
    unit = ALIGNMENT_BYTES // x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride % unit == 0 for stride in strides) and x.data_ptr() % ALIGNMENT_BYTES == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def copied(operands: Mapping[str, Tensor], packing: Packing | None = None) -> str:
    """Which operands the call must copy for their layout, for the record; "none" is what a timing should see."""
    names = []
    for name, x in operands.items():
        ready = aligned(x)
        ready = packing.pack(ready) if packing else ready
        if ready.data_ptr() != x.data_ptr():
            names.append(name)
    return ", ".join(names) or "none"
