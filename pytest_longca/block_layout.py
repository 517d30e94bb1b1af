"""The padded layout of block-sparse kernels that take blocks of one size: every block starts at a multiple of it, its tokens first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_longca import blocks

if TYPE_CHECKING:
    from pytest_longca.mask import Device, Mask


@dataclass(frozen=True, slots=True)
class PaddedSide:
    """Where the tokens of one side lie. `slots` int64 `[tokens]`, or None where no block is padded; `sizes` int32 `[blocks]`."""

    slots: Tensor | None
    sizes: Tensor
    num_tokens: int

    def pad(self, x: Tensor) -> Tensor:
        """BSHD tokens to padded BHSD, zeros between; differentiable."""
        x = x.transpose(1, 2)
        if self.slots is None:
            return x
        batch, heads, _, dim = x.shape
        return x.new_zeros(batch, heads, self.num_tokens, dim).index_copy(2, self.slots, x)

    def unpad(self, x: Tensor) -> Tensor:
        """Padded `[batch, heads, tokens, ...]` without the padding."""
        return x if self.slots is None else x.index_select(2, self.slots)


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """A block mask in blocks of one size: `block_map` bool `[1 or heads_q, blocks_q, blocks_kv]`, and where tokens lie."""

    block_map: Tensor
    q: PaddedSide
    kv: PaddedSide

    @property
    def is_padded(self) -> bool:
        return self.q.slots is not None or self.kv.slots is not None

    def facts(self) -> dict[str, str]:
        """What a record should say of the padding, which happens inside the call and is timed with it."""
        if not self.is_padded:
            return {"padding": "none"}
        tokens = sum(int(side.sizes.sum()) for side in (self.q, self.kv))
        return {"padding": f"inside the call, {(self.q.num_tokens + self.kv.num_tokens) / tokens:.2f} times the tokens"}


def padded_blocks(mask: "Mask", heads: int, device: "Device", block: int) -> PaddedBlocks:
    """The mask in blocks of `block` tokens: a larger block becomes several, a shorter one is padded."""
    sparse = blocks.of(mask)
    block_map = blocks.checked_map(mask, heads, device)
    sides = [_side(sizes, block, device) for sizes in (sparse.sizes_q(), sparse.sizes_kv())]
    for axis, (_, pieces) in enumerate(sides, start=1):
        block_map = (
            block_map if int(pieces.max()) == int(pieces.min()) == 1 else block_map.repeat_interleave(pieces.to(block_map.device), axis)
        )
    return PaddedBlocks(block_map, sides[0][0], sides[1][0])


def _side(sizes: Sequence[int], block: int, device: "Device") -> tuple[PaddedSide, Tensor]:
    """The side's layout, and how many padded blocks each of its blocks becomes."""
    lengths = torch.tensor(sizes, dtype=torch.int64)
    pieces = (lengths + block - 1) // block
    tiles = blocks.row_tiles(sizes, block, device)
    num_tokens = block * tiles.start.numel()
    if num_tokens == sum(sizes):
        slots = None
    else:
        length = tiles.stop - tiles.start
        shift = torch.arange(length.numel(), device=length.device) * block - tiles.start
        slots = torch.arange(sum(sizes), device=length.device) + shift.repeat_interleave(length)
    return PaddedSide(slots, tiles.stop - tiles.start, num_tokens), pieces
