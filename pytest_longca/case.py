"""Case: everything that decides what a kernel is asked, in one hashable value without tensors."""

import enum
from dataclasses import dataclass, field

from pytest_longca.errors import InvalidArgument
from pytest_longca.mask import Mask


class Direction(enum.StrEnum):
    """Which passes run: the forward, the backward (after an untimed forward), or both."""

    FWD = "fwd"
    BWD = "bwd"
    FWD_BWD = "fwd_bwd"

    @property
    def needs_backward(self) -> bool:
        return self is not Direction.FWD


class Values(enum.StrEnum):
    """How q, k, v and do are drawn (all normal unless said)."""

    NORMAL = "normal"
    BIASED = "biased"  # keys and values share a large mean
    PEAKED = "peaked"  # large queries and keys: nearly one-hot rows
    LARGE = "large"  # keys times 10
    LOW = "low"  # all logits near -120
    HIGH = "high"  # all logits near +100
    SENTINEL = "sentinel"  # all logits below -50000
    FAINT = "faint"  # do divided by 4096, as after the mean over a batch
    LOUD = "loud"  # do times 256, as under a loss scale


class Layout(enum.StrEnum):
    """How one operand lies in memory; its logical shape is always [batch, seqlen, heads, head_dim]."""

    CONTIGUOUS = "contiguous"
    BHSD = "bhsd"  # a transposed view of [batch, heads, seqlen, head_dim]
    FUSED = "fused"  # a slice of one buffer that holds q, k and v side by side
    OFFSET = "offset"  # a view that starts inside its storage
    PADDED = "padded"  # rows longer than head_dim
    EXPANDED = "expanded"  # heads share memory (stride 0)
    SHARED = "shared"  # batch elements share memory (stride 0)
    SINGLE = "single"  # one number (stride 0 on every axis), as the do of out.sum() is


OPERANDS = ("q", "k", "v", "do")
DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to a kernel: mask, sizes, dtype, scale, direction, input values, layouts and seed.

    `head_dim_v` defaults to `head_dim`, `scale` to `head_dim ** -0.5`. `layouts` names one Layout for each of q, k, v, do.
    Raises InvalidArgument on sizes that cannot be.
    """

    mask: Mask
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = "fp32"
    direction: Direction = Direction.FWD_BWD
    scale: float = 0.0
    values: Values = Values.NORMAL
    layouts: tuple[Layout, Layout, Layout, Layout] = field(default=(Layout.CONTIGUOUS,) * 4)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        object.__setattr__(self, "scale", self.scale or self.head_dim**-0.5)
        for name in ("batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.heads_q % self.heads_kv:
            raise InvalidArgument(
                f"heads {self.heads_q}:{self.heads_kv}: the query heads must be a multiple of the key/value heads, "
                f"as in {self.heads_kv * max(1, self.heads_q // self.heads_kv)}:{self.heads_kv}"
            )
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype {self.dtype!r}: one of {', '.join(DTYPES)}")
        if self.mask.heads not in (1, self.heads_q):
            raise InvalidArgument(
                f"the mask has {self.mask.heads} heads and the case {self.heads_q} query heads: they must be equal, or the mask's 1"
            )
        if self.mask.batch not in (1, self.batch):
            raise InvalidArgument(f"the mask has batch {self.mask.batch} and the case {self.batch}: they must be equal, or the mask's 1")

    @property
    def seqlen_q(self) -> int:
        return self.mask.seqlen_q

    @property
    def seqlen_kv(self) -> int:
        return self.mask.seqlen_kv

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def area(self) -> int:
        """Visible (query, key) pairs, summed over batch and query heads."""
        return self.mask.area() * (self.batch // self.mask.batch) * (self.heads_q // self.mask.heads)

    @property
    def num_scores(self) -> int:
        """All (query, key) pairs, visible or not, of batch and query heads."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv

    @property
    def id(self) -> str:
        """The case as one line that `parse_case` reads back."""
        from pytest_longca.ids import format_case

        return format_case(self)

    def flop(self, direction: Direction | None = None) -> int:
        """Floating point operations of the visible pairs (design: one convention for all kernels).

        Forward `2 * area * (head_dim + head_dim_v)`, backward `2 * area * (3 * head_dim + 2 * head_dim_v)`.
        """
        direction = direction or self.direction
        fwd = 2 * self.area * (self.head_dim + self.head_dim_v)
        bwd = 2 * self.area * (3 * self.head_dim + 2 * self.head_dim_v)
        return {Direction.FWD: fwd, Direction.BWD: bwd, Direction.FWD_BWD: fwd + bwd}[direction]


def named(case: Case) -> str:
    """The case's id, or as much as a mask without one allows."""
    try:
        return case.id
    except InvalidArgument:
        return repr(case)
