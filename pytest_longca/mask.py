"""Mask: which keys a query may read. One predicate is the truth; every other form is derived from it or proved equal."""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor

from pytest_longca import intervals, tiles
from pytest_longca.errors import InvalidArgument
from pytest_longca.predicates import Device, MaskMod, check_predicate_result, evaluate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from pytest_longca.sampling import LengthSource

__all__ = [
    "Device",
    "Family",
    "Form",
    "Mask",
    "MaskMod",
    "PredicateMask",
    "Varlen",
    "cached_predicate",
    "check_predicate_result",
    "from_mask_mod",
    "try_mask",
]


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


@dataclass(frozen=True, slots=True)
class TimedShape:
    """What a timed mask depends on beside its length: heads, and the options that only some masks read."""

    heads_q: int = 1
    heads_kv: int = 1
    seed: int = 0
    lengths: "LengthSource | None" = None
    block_sizes: tuple[int, ...] = (64,)
    densities: tuple[float, ...] = (0.5,)


class Mask(ABC):
    """Which keys a query may read. Subclasses are frozen dataclasses whose fields reproduce them.

    `unequal_lengths` says whether seqlen_kv may differ from seqlen_q.
    """

    __slots__ = ()

    name: ClassVar[str]
    family: ClassVar[Family] = Family.CUSTOM
    forms: ClassVar[frozenset[Form]] = frozenset({Form.PREDICATE})
    unequal_lengths: ClassVar[bool] = False

    if TYPE_CHECKING:  # fields of some masks, computed by others

        @property
        def seqlen_q(self) -> int: ...

        @property
        def seqlen_kv(self) -> int: ...

    @property
    def label(self) -> str:
        """What error messages call the mask."""
        return self.name

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
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        """A random mask of this kind over `seqlen` tokens, parameters and document lengths drawn from `rng`, the awkward ones often.

        `seqlen_kv` is the keys' length where it differs. Raises InvalidArgument if the mask needs equal lengths and they are not.
        """
        raise NotImplementedError(f"mask {cls.__name__} draws no random parameters: define sample(rng, seqlen)")

    @classmethod
    def default(cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None) -> Self:
        """The mask that speed is measured on: its usual parameters, document lengths drawn by `seed` from `lengths` or the histograms."""
        return cls.sample(Random(seed), seqlen)

    @classmethod
    def timed(cls, seqlen: int, shape: "TimedShape") -> "list[Self]":
        """The masks of this kind that are timed at one length: one, or one for each block size and density."""
        return [cls.default(seqlen, shape.seed, shape.lengths)]

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
        return evaluate(self, device)

    def area(self) -> int:
        """Visible (query, key) pairs, summed over the mask's own batch and head axes."""
        return intervals.area(self)

    def columns(self, device: Device = "cpu") -> Tensor | None:
        """FlashMask's column form: the *masked* queries of each key as at most two half-open intervals.

        int32 `[batch or 1, heads or 1, seqlen_kv, 2, 2]`, unused intervals are `(0, 0)` and last; None if a column has more pieces.
        """
        return intervals.columns(self, device)

    def tiles(self, device: Device = "cpu", block_q: int = 128, block_kv: int = 128) -> tiles.Tiles:
        """Which tiles are partial and which are full, exact."""
        rows = self.row_intervals(device)
        if rows is None:
            return tiles.tiles_of_predicate(self, device, block_q, block_kv)
        return tiles.tiles_of_intervals(rows, self.seqlen_kv, block_q, block_kv)

    def block_mask(self, device: Device = "cpu", block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """FlexAttention's BlockMask, exact: full blocks are full, absent blocks are empty."""
        return tiles.block_mask(self, device, block_size)

    def draw(self, head: int = 0) -> str:
        """The mask as text, a line for each query: # is visible, - is not."""
        rows = self.dense()[0, head].tolist()
        return "\n".join("".join("#" if visible else "-" for visible in row) for row in rows)


Build = TypeVar("Build", bound=Callable[..., MaskMod])


def cached_predicate(build: Build) -> Build:
    """Decorates `predicate`: the same mask on the same device gives the same function, so that what was compiled for it is found again."""
    cached = functools.lru_cache(maxsize=16)(build)

    @functools.wraps(build)
    def predicate(self: Mask, device: Device = "cpu") -> MaskMod:
        return cached(self, torch.device(device))

    return cast(Build, predicate)


@dataclass(frozen=True, slots=True)
class PredicateMask(Mask):
    """A user's FlexAttention mask_mod as a mask; every form that it has is found by evaluating it.

    `mod(b, h, q_idx, kv_idx)` gets broadcastable int tensors and returns a bool tensor, True is visible. A mod that reads `b` or `h`
    says over how many batches or query heads: `num_batches`, `num_heads`. Raises InvalidArgument if it returns anything else.
    """

    mod: MaskMod
    seqlen_q: int
    seqlen_kv: int
    label: str = "custom"
    num_batches: int = 1
    num_heads: int = 1
    name: ClassVar[str] = "custom"
    unequal_lengths: ClassVar[bool] = True

    @property
    def batch(self) -> int:
        return self.num_batches

    @property
    def heads(self) -> int:
        return self.num_heads

    def predicate(self, device: Device = "cpu") -> MaskMod:
        return self.mod


@dataclass(frozen=True, slots=True)
class ModMask(Mask):
    """Base of the classes that `from_mask_mod` makes: the mod is the class's, the lengths are the mask's."""

    seqlen_q: int
    seqlen_kv: int
    mod: ClassVar[MaskMod]
    num_batches: ClassVar[int]
    num_heads: ClassVar[int]
    unequal_lengths: ClassVar[bool] = True

    @property
    def batch(self) -> int:
        return self.num_batches

    @property
    def heads(self) -> int:
        return self.num_heads

    def predicate(self, device: Device = "cpu") -> MaskMod:
        return type(self).mod

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None) -> Self:
        return cls(seqlen, seqlen if seqlen_kv is None else seqlen_kv)


def from_mask_mod(name: str, mask_mod: MaskMod, *, batch: int = 1, heads: int = 1, two_runs_a_row: bool = False) -> type[Mask]:
    """A mask class of a FlexAttention mask_mod, ready for the `pytest_longca_masks` hook.

    `batch` and `heads` are for a mod that reads b or h; `two_runs_a_row` promises that no query sees more than two runs of keys, which
    opens the mask to the kernels that take row intervals.

    >>> strided = from_mask_mod("strided", lambda b, h, q, kv: (q - kv) % 2 == 0)
    >>> print(strided(3, 4).draw())
    #-#-
    -#-#
    #-#-
    """
    forms = {Form.PREDICATE, Form.ROW_INTERVALS} if two_runs_a_row else {Form.PREDICATE}
    body = {"name": name, "mod": staticmethod(mask_mod), "num_batches": batch, "num_heads": heads, "forms": frozenset(forms)}
    return type(name, (ModMask,), {"__slots__": (), "__doc__": mask_mod.__doc__, **body})


TRIAL_LENGTHS = (4, 7)
"""Queries and keys on which a user's mask_mod is tried: no two axes of its result may have the same length by chance."""
TRIAL_SEQLEN = 256
"""Tokens on which a user's mask class is tried: those that its cells ask for first."""
ANSWERS = 8
"""How often it is asked: one that draws a bit for each of the four queries gives the same answer twice once in 16 times."""


def try_mask(cls: type[Mask]) -> None:
    """Raise InvalidArgument unless a user's mask answers on a small grid, always the same, with a bool tensor that broadcasts to it."""
    try:
        mask = cls(*TRIAL_LENGTHS) if issubclass(cls, ModMask) else cls.default(TRIAL_SEQLEN)
    except Exception:  # a class may have no mask of this length, and says so when it is used
        return
    first, *others = [evaluate(mask, "cpu") for _ in range(ANSWERS)]
    if not all(torch.equal(first, other) for other in others):
        raise InvalidArgument(
            f"mask {mask.label!r} gave two answers for the same indices: a mask_mod must be a function of its arguments alone"
        )
