"""The dynamic masks: blocks of queries see blocks of keys as a map says, a map for each head; blocks of one size, or each of its own."""

import functools
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_longca.block_map import KINDS, AnyBlockMap, BlockMap, ExplicitMap
from pytest_longca.errors import InvalidArgument
from pytest_longca.intervals import two_runs
from pytest_longca.lengths import checked_count, checked_lengths, document_ids
from pytest_longca.mask import Device, Family, Form, Mask, MaskMod, TimedShape, cached_predicate
from pytest_longca.sampling import draw
from pytest_longca.tiles import Tiles, tiles_of_blocks

if TYPE_CHECKING:
    from pytest_longca.sampling import LengthSource

DEFAULT_BLOCK = 64
DEFAULT_DENSITY = 0.5
SAMPLED_BLOCKS = 32
"""A sampled mask has at most this many blocks a side: their number is squared, and then there are the heads."""


@dataclass(frozen=True, slots=True)
class _Blocks(Mask):
    """What the two block masks share: all but how the sequences are cut into blocks."""

    family: ClassVar[Family] = Family.BLOCK
    forms: ClassVar[frozenset[Form]] = frozenset({Form.PREDICATE, Form.BLOCK_MAP})
    unequal_lengths: ClassVar[bool] = True
    if TYPE_CHECKING:

        @property
        def block_map(self) -> AnyBlockMap: ...

    @abstractmethod
    def sizes_q(self) -> tuple[int, ...]:
        """Tokens of each query block."""

    @abstractmethod
    def sizes_kv(self) -> tuple[int, ...]:
        """Tokens of each key block."""

    @property
    @abstractmethod
    def blocks_text(self) -> str:
        """The blocks' sizes for people."""

    @property
    def heads(self) -> int:
        return self.block_map.heads

    def expand(self, device: Device = "cpu") -> Tensor:
        """The block map, bool `[heads, blocks_q, blocks_kv]`. Do not write to it."""
        return self.block_map.expand(len(self.sizes_q()), len(self.sizes_kv())).to(device)

    @classmethod
    def timed(cls, seqlen: int, shape: TimedShape) -> "list[Self]":
        """One mask for each block size and density; the query heads of a group share a map."""
        group = shape.heads_q // shape.heads_kv
        return [
            cls.default(seqlen, shape.seed, shape.lengths, block_size=block_size, density=density, heads=shape.heads_q, group=group)
            for block_size in shape.block_sizes
            for density in shape.densities
        ]

    @classmethod
    @abstractmethod
    def default(
        cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None, *,
        block_size: int = DEFAULT_BLOCK, density: float = DEFAULT_DENSITY, heads: int = 1, group: int = 1,
    ) -> Self:  # fmt: skip
        """The mask that speed is measured on."""

    def _check_map(self) -> None:
        """Raise InvalidArgument if an explicit map does not fit the blocks; a drawn one fits any."""
        if isinstance(self.block_map, Sequence | Tensor):
            object.__setattr__(self, "block_map", ExplicitMap.of(self.block_map))
        if isinstance(self.block_map, ExplicitMap):
            self.expand()

    def _tensor_sizes(self, device: Device) -> tuple[Tensor, Tensor]:
        return tuple(torch.tensor(sizes, dtype=torch.int64, device=device) for sizes in (self.sizes_q(), self.sizes_kv()))  # type: ignore[return-value]  # two of them

    def area(self) -> int:
        return _area(self)

    def row_intervals(self, device: Device = "cpu") -> Tensor | None:
        runs = two_runs(self.expand(device))  # [heads, blocks_q, 2, 2], in blocks
        if runs is None:
            return None
        sizes_q, sizes_kv = self._tensor_sizes(device)
        edges = torch.nn.functional.pad(sizes_kv.cumsum(0), (1, 0)).to(torch.int32)
        return edges[runs.long()].repeat_interleave(sizes_q, 1)[None]

    def tiles(self, device: Device = "cpu", block_q: int = 128, block_kv: int = 128) -> Tiles:
        return tiles_of_blocks(self.expand(device), *self._tensor_sizes(device), block_q, block_kv)


@functools.lru_cache(maxsize=256)
def _area(mask: _Blocks) -> int:
    sizes_q, sizes_kv = (torch.tensor(sizes, dtype=torch.float64) for sizes in (mask.sizes_q(), mask.sizes_kv()))
    # float64 for its speed; sums of integers are exact in it up to 2**53, which is 90 million tokens squared.
    return sum(int(sizes_q @ (head.double() @ sizes_kv)) for head in mask.expand())


@dataclass(frozen=True, slots=True)
class UniformBlock(_Blocks):
    """Blocks of one size.

    >>> print(UniformBlock(6, 6, block_size=2, block_map=ExplicitMap.of([[[1, 0, 1], [0, 0, 0], [0, 1, 0]]])).draw())
    ##--##
    ##--##
    ------
    ------
    --##--
    --##--
    """

    seqlen_q: int
    seqlen_kv: int
    block_size: int
    block_map: AnyBlockMap
    name: ClassVar[str] = "uniform_block"

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", checked_count("block_size", self.block_size, 1))
        for field in ("seqlen_q", "seqlen_kv"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
            if getattr(self, field) % self.block_size:
                raise InvalidArgument(
                    f"{field} is {getattr(self, field)} and block_size {self.block_size}: the length must be a multiple of the block; "
                    f"variable_block takes a shorter last block"
                )
        self._check_map()

    def sizes_q(self) -> tuple[int, ...]:
        return (self.block_size,) * (self.seqlen_q // self.block_size)

    def sizes_kv(self) -> tuple[int, ...]:
        return (self.block_size,) * (self.seqlen_kv // self.block_size)

    @property
    def blocks_text(self) -> str:
        return str(self.block_size)

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None, heads: int | None = None) -> Self:
        seqlen_kv = seqlen if seqlen_kv is None else seqlen_kv
        common = gcd(seqlen, seqlen_kv) or 1
        fewest = max(seqlen, seqlen_kv) // SAMPLED_BLOCKS
        sizes = [size for size in range(1, common + 1) if common % size == 0]
        return cls(seqlen, seqlen_kv, rng.choice([size for size in sizes if size >= fewest] or sizes[-1:]), _sample_map(rng, heads))

    @classmethod
    def default(
        cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None, *,
        block_size: int = DEFAULT_BLOCK, density: float = DEFAULT_DENSITY, heads: int = 1, group: int = 1,
    ) -> Self:  # fmt: skip
        return cls(seqlen, seqlen, block_size, BlockMap("topk", density, heads, group, seed))

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        block_map, size = self.expand(device), self.block_size
        if self.heads == 1:
            shared = block_map[0]
            return lambda b, h, q_idx, kv_idx: shared[q_idx // size, kv_idx // size]
        return lambda b, h, q_idx, kv_idx: block_map[h, q_idx // size, kv_idx // size]


@dataclass(frozen=True, slots=True)
class VariableBlock(_Blocks):
    """Blocks of their own sizes.

    >>> print(VariableBlock((1, 5), (2, 3, 1), ExplicitMap.of([[[1, 1, 0], [0, 1, 1]]])).draw())
    #####-
    --####
    --####
    --####
    --####
    --####
    """

    block_sizes_q: tuple[int, ...]
    block_sizes_kv: tuple[int, ...]
    block_map: AnyBlockMap
    name: ClassVar[str] = "variable_block"

    def __post_init__(self) -> None:
        for field in ("block_sizes_q", "block_sizes_kv"):
            object.__setattr__(self, field, checked_lengths(field, getattr(self, field), 1))
        self._check_map()

    @property
    def seqlen_q(self) -> int:
        return sum(self.block_sizes_q)

    @property
    def seqlen_kv(self) -> int:
        return sum(self.block_sizes_kv)

    def sizes_q(self) -> tuple[int, ...]:
        return self.block_sizes_q

    def sizes_kv(self) -> tuple[int, ...]:
        return self.block_sizes_kv

    @property
    def blocks_text(self) -> str:
        """The range that the query blocks were drawn from, if they were: `variable 64-128`."""
        drawn = re.match(r"uniform(\d+-\d+)x", getattr(self.block_sizes_q, "recipe", ""))
        return f"variable {drawn[1]}" if drawn else "variable"

    @classmethod
    def sample(cls, rng: Random, seqlen: int, seqlen_kv: int | None = None, heads: int | None = None) -> Self:
        return cls(_sample_sizes(rng, seqlen), _sample_sizes(rng, seqlen if seqlen_kv is None else seqlen_kv), _sample_map(rng, heads))

    @classmethod
    def default(
        cls, seqlen: int, seed: int = 0, lengths: "LengthSource | None" = None, *,
        block_size: int = DEFAULT_BLOCK, density: float = DEFAULT_DENSITY, heads: int = 1, group: int = 1,
    ) -> Self:  # fmt: skip
        """Blocks of half of `block_size` to all of it."""
        sizes = [draw(f"uniform{-(-block_size // 2)}-{block_size}x1:{seqlen}:s{2 * seed + side}") for side in range(2)]
        return cls(sizes[0], sizes[1], BlockMap("topk", density, heads, group, seed))

    @cached_predicate
    def predicate(self, device: Device = "cpu") -> MaskMod:
        block_map = self.expand(device)
        of_q, of_kv = document_ids(self.block_sizes_q, device), document_ids(self.block_sizes_kv, device)
        if self.heads == 1:
            shared = block_map[0]
            return lambda b, h, q_idx, kv_idx: shared[of_q[q_idx], of_kv[kv_idx]]
        return lambda b, h, q_idx, kv_idx: block_map[h, of_q[q_idx], of_kv[kv_idx]]


def _sample_map(rng: Random, heads: int | None) -> BlockMap:
    heads = heads or rng.choice((1, 2, 4, 6))
    group = rng.choice([group for group in range(1, heads + 1) if heads % group == 0])
    return BlockMap(rng.choice(KINDS), rng.choice((0.1, 0.2, 0.5, 0.8, 1.0)), heads, group, rng.randrange(1 << 16))


def _sample_sizes(rng: Random, seqlen: int) -> tuple[int, ...]:
    if not seqlen:
        raise InvalidArgument("variable_block over 0 tokens: it needs at least one block of at least one token")
    fewest = -(-seqlen // SAMPLED_BLOCKS)
    high = max(fewest, rng.choice((1, 5, 17, 64, 128)))
    return draw(f"uniform{rng.randint(fewest, high)}-{high}x1:{seqlen}:s{rng.randrange(1 << 16)}")
