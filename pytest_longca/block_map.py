"""Block maps: which key blocks each query block sees, as small values that expand to bool tensors where they are used."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.lengths import checked_count

KINDS = ("topk", "random")
MAX_EXPLICIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A map drawn by its seed, the same on every machine.

    `kind` is "topk" (each query block sees the same number of key blocks, at least one) or "random" (the density holds for the map as
    a whole; popular columns, and empty rows and columns). The query heads of a `group` share one map.
    """

    kind: str = "topk"
    density: float = 0.5
    heads: int = 1
    group: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("block map kind", self.kind, KINDS)
        object.__setattr__(self, "density", float(self.density))
        if not 0 <= self.density <= 1:
            raise InvalidArgument(f"density is {self.density}: it must be between 0 and 1")
        for field in ("heads", "group"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field), 1))
        object.__setattr__(self, "seed", checked_count("seed", self.seed))
        if self.heads % self.group:
            raise InvalidArgument(f"a block map of {self.heads} heads in groups of {self.group}: the heads must be a multiple of the group")

    @property
    def token(self) -> str:
        """The map in an id.

        >>> BlockMap("topk", 0.5, heads=8, seed=3).token
        'topk:0.5:h8:g1:s3'
        """
        return f"{self.kind}:{self.density!r}:h{self.heads}:g{self.group}:s{self.seed}"

    def expand(self, num_blocks_q: int, num_blocks_kv: int) -> Tensor:
        """bool `[heads, num_blocks_q, num_blocks_kv]` on the CPU. Shared between callers: do not write to it."""
        return _expanded(self, num_blocks_q, num_blocks_kv)


@functools.lru_cache(maxsize=2)
def _expanded(drawn: BlockMap, num_blocks_q: int, num_blocks_kv: int) -> Tensor:
    generator = torch.Generator().manual_seed(drawn.seed)
    out = torch.zeros(drawn.heads, num_blocks_q, num_blocks_kv, dtype=torch.bool)
    if out.numel():
        draw = _top_k if drawn.kind == "topk" else _random
        for first in range(0, drawn.heads, drawn.group):
            out[first : first + drawn.group] = draw(num_blocks_q, num_blocks_kv, drawn.density, generator)
    return out


def _ranks(num_blocks_q: int, num_blocks_kv: int, generator: torch.Generator) -> Tensor:
    """Random int64, all different, below 2**61."""
    total = num_blocks_q * num_blocks_kv
    ranks = torch.randint((1 << 61) // total, (num_blocks_q, num_blocks_kv), generator=generator)
    return ranks.mul_(total).add_(torch.arange(total).view(num_blocks_q, num_blocks_kv))


def _smallest(ranks: Tensor, count: int) -> Tensor:
    """The `count`-th smallest of each row: int64 `[rows]`. NumPy finds it seven times as fast as torch's kthvalue."""
    return torch.from_numpy(np.partition(ranks.numpy(), count - 1, axis=1)[:, count - 1])


def _top_k(num_blocks_q: int, num_blocks_kv: int, density: float, generator: torch.Generator) -> Tensor:
    count = max(1, round(density * num_blocks_kv))
    ranks = _ranks(num_blocks_q, num_blocks_kv, generator)
    return ranks <= _smallest(ranks, count)[:, None]


def _random(num_blocks_q: int, num_blocks_kv: int, density: float, generator: torch.Generator) -> Tensor:
    ranks = _ranks(num_blocks_q, num_blocks_kv, generator)
    popular = torch.rand(num_blocks_kv, generator=generator) < 1 / 8
    ranks[:, popular] //= 4
    # An eighth of what the density leaves out goes into empty rows, another into empty columns.
    never = torch.rand(num_blocks_q, 1, generator=generator) < (1 - density) / 8
    never = never | (torch.rand(num_blocks_kv, generator=generator) < (1 - density) / 8)
    count = min(round(density * ranks.numel()), int((~never).sum()))
    if not count:
        return torch.zeros_like(never)
    ranks.masked_fill_(never, 1 << 62)
    return ranks <= _smallest(ranks.view(1, -1), count)


@dataclass(frozen=True, slots=True)
class ExplicitMap:
    """A small map spelled out: `bits` is its packed rows as hexadecimal, the first block in the highest bit."""

    heads: int
    num_blocks_q: int
    num_blocks_kv: int
    bits: str

    def __post_init__(self) -> None:
        wanted = -(-self.heads * self.num_blocks_q * self.num_blocks_kv // 8)
        if wanted > MAX_EXPLICIT_BYTES:
            raise InvalidArgument(f"an explicit block map of {wanted} bytes: at most {MAX_EXPLICIT_BYTES}; draw a larger one with BlockMap")
        if not re.fullmatch(r"(?:[0-9a-f]{2})*", self.bits) or len(self.bits) != 2 * wanted:
            raise InvalidArgument(
                f"block map bits {self.bits!r}: {self.heads}x{self.num_blocks_q}x{self.num_blocks_kv} blocks are {2 * wanted} digits 0-9a-f"
            )

    @classmethod
    def of(cls, blocks: Tensor | Sequence[Sequence[Sequence[bool]]]) -> Self:
        """The map of nested lists or a bool tensor `[heads, num_blocks_q, num_blocks_kv]`.

        >>> ExplicitMap.of([[[True, False], [False, True]]]).token
        'bits:1x2x2:90'
        """
        dense = torch.as_tensor(blocks, dtype=torch.bool)
        if dense.dim() != 3:
            raise InvalidArgument(f"a block map of shape {tuple(dense.shape)}: it must be [heads, blocks_q, blocks_kv]")
        size = -(-dense.numel() // 8)
        digits = "".join("1" if bit else "0" for bit in dense.flatten().tolist()).ljust(8 * size, "0")
        heads, num_blocks_q, num_blocks_kv = dense.shape
        return cls(heads, num_blocks_q, num_blocks_kv, int(digits or "0", 2).to_bytes(size, "big").hex())

    @property
    def token(self) -> str:
        """The map in an id."""
        return f"bits:{self.heads}x{self.num_blocks_q}x{self.num_blocks_kv}:{self.bits}"

    def expand(self, num_blocks_q: int, num_blocks_kv: int) -> Tensor:
        """bool `[heads, num_blocks_q, num_blocks_kv]`. Raises InvalidArgument if the map has another shape."""
        shape = (self.num_blocks_q, self.num_blocks_kv)
        if shape != (num_blocks_q, num_blocks_kv):
            raise InvalidArgument(f"a block map of {shape} blocks for {(num_blocks_q, num_blocks_kv)}: the map and the blocks must agree")
        digits = bin(int("1" + self.bits, 16))[3:]
        flat = torch.tensor([digit == "1" for digit in digits[: self.heads * num_blocks_q * num_blocks_kv]], dtype=torch.bool)
        return flat.view(self.heads, num_blocks_q, num_blocks_kv)


AnyBlockMap = BlockMap | ExplicitMap


def parse_block_map(token: str) -> AnyBlockMap:
    """The map whose `token` this is. Raises InvalidArgument if it is none."""
    if match := re.fullmatch(r"([a-z]+):([0-9.e+-]+):h(\d+):g(\d+):s(\d+)", token):
        kind, density, heads, group, seed = match.groups()
        return BlockMap(kind, _density(density), int(heads), int(group), int(seed))
    if match := re.fullmatch(r"bits:(\d+)x(\d+)x(\d+):([0-9a-f]*)", token):
        return ExplicitMap(int(match[1]), int(match[2]), int(match[3]), match[4])
    raise InvalidArgument(f"block map {token!r}: it reads KIND:DENSITY:hHEADS:gGROUP:sSEED, as in topk:0.5:h8:g1:s3, or bits:HxQxKV:HEX")


def _density(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"density is {text!r}: it must be a number between 0 and 1") from None
