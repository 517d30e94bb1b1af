"""Mask: which keys a query may read. One predicate is the truth; every other form is derived from it or proved equal."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca import intervals
from pytest_longca.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (b, h, q_idx, kv_idx), int tensors that broadcast, to a bool tensor; True is visible."""

Device = torch.device | str


class Family(enum.StrEnum):
    """The paper's three families of masks, and the user's own."""

    REGULAR = "regular"
    HETEROGENEOUS = "heterogeneous"
    BLOCK = "block"
    CUSTOM = "custom"


class Form(enum.StrEnum):
    """What a backend takes a mask as. Every mask has a PREDICATE; the others when it says so."""

    PREDICATE = "a predicate"
    ROW_INTERVALS = "row intervals (at most two runs of visible keys in a row)"
    VARLEN = "a regular form (cu_seqlens, a causal flag, a window)"
    BLOCK_MAP = "a block map"


@dataclass(frozen=True, slots=True)
class Varlen:
    """A regular mask as FlashAttention and cuDNN take it.

    `lens_q` and `lens_kv` are document lengths; causal and window are bottom-right aligned inside each document.
    `window` is inclusive `(left, right)`, None is unlimited.
    """

    lens_q: tuple[int, ...]
    lens_kv: tuple[int, ...]
    is_causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether cu_seqlens are needed: more than one document."""
        return len(self.lens_q) != 1


class Mask(ABC):
    """Which keys a query may read. Subclasses are frozen dataclasses whose fields reproduce them."""

    __slots__ = ()

    name: ClassVar[str]
    family: ClassVar[Family] = Family.CUSTOM
    forms: ClassVar[frozenset[Form]] = frozenset({Form.PREDICATE})

    seqlen_q: int
    seqlen_kv: int

    @property
    def heads(self) -> int:
        """Size of the mask's own head axis: 1, or the number of query heads."""
        return 1

    @property
    def batch(self) -> int:
        """Size of the mask's own batch axis: 1, or the batch."""
        return 1

    @abstractmethod
    def predicate(self, device: Device = "cpu") -> MaskMod:
        """The truth: a FlexAttention mask_mod whose captured tensors live on `device`."""

    @classmethod
    def sample(cls, rng: Random, seqlen: int) -> Self:
        """A random mask of this kind over `seqlen` tokens, parameters and document lengths drawn from `rng`."""
        raise NotImplementedError(f"mask {cls.__name__} draws no random parameters: define sample(rng, seqlen)")

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The predicate, with FlexAttention's signature."""
        return self.predicate(q_idx.device)(b, h, q_idx, kv_idx)

    def row_intervals(self, device: Device = "cpu") -> Tensor | None:
        """The visible keys of each query as at most two disjoint, non-touching, ascending half-open intervals.

        int32 `[batch or 1, heads or 1, seqlen_q, 2, 2]`, unused intervals are `(0, 0)` and come last; None if a row has more pieces.
        """
        return intervals.from_predicate(self, device)

    def varlen(self) -> Varlen | None:
        """The regular form, or None where the mask has none."""
        return None

    def dense(self, device: Device = "cpu") -> Tensor:
        """bool `[batch or 1, heads or 1, seqlen_q, seqlen_kv]`, True is visible. O(S^2): short masks only."""
        b, h, q, kv = (
            torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)])
            for axis, n in enumerate((self.batch, self.heads, self.seqlen_q, self.seqlen_kv))
        )
        visible = self.predicate(device)(b, h, q, kv)
        return visible.expand(self.batch, self.heads, self.seqlen_q, self.seqlen_kv)

    def area(self) -> int:
        """Visible (query, key) pairs, summed over the mask's own batch and head axes."""
        return intervals.area(self)

    def columns(self, device: Device = "cpu") -> Tensor | None:
        """FlashMask's column form: the *masked* queries of each key as at most two half-open intervals.

        int32 `[batch or 1, heads or 1, seqlen_kv, 2, 2]`, unused intervals are empty; None if a column has more pieces.
        """
        return intervals.columns(self, device)

    def block_mask(self, device: Device = "cpu", block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """FlexAttention's BlockMask, exact: full blocks are full, absent blocks are empty."""
        return intervals.block_mask(self, device, block_size)


@dataclass(frozen=True, slots=True)
class PredicateMask(Mask):
    """A user's FlexAttention mask_mod as a mask; every form that it has is found by evaluating it.

    `mod(b, h, q_idx, kv_idx)` gets broadcastable int tensors and returns a bool tensor, True is visible.
    Raises InvalidArgument if it returns anything else.
    """

    mod: MaskMod
    seqlen_q: int
    seqlen_kv: int
    label: str = "custom"
    name: ClassVar[str] = "custom"

    def predicate(self, device: Device = "cpu") -> MaskMod:
        return self.mod

    def dense(self, device: Device = "cpu") -> Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        visible = self.mod(
            zero, zero, torch.arange(self.seqlen_q, device=device)[:, None], torch.arange(self.seqlen_kv, device=device)[None, :]
        )
        check_predicate_result(self.label, visible, (self.seqlen_q, self.seqlen_kv))
        return visible.expand(1, 1, self.seqlen_q, self.seqlen_kv)


def check_predicate_result(name: str, visible: object, shape: tuple[int, ...]) -> None:
    """Raise InvalidArgument unless `visible` is a bool tensor that broadcasts to `shape`."""
    if not isinstance(visible, Tensor):
        raise InvalidArgument(f"mask {name!r} returned {type(visible).__name__}: a mask_mod returns a bool tensor")
    if visible.dtype is not torch.bool:
        raise InvalidArgument(f"mask {name!r} returned {visible.dtype}: a mask_mod returns torch.bool, True where the key is visible")
    try:
        torch.broadcast_shapes(visible.shape, shape)
    except RuntimeError:
        raise InvalidArgument(
            f"mask {name!r} returned shape {tuple(visible.shape)}: it must broadcast to {shape}, one element for each (query, key)"
        ) from None
