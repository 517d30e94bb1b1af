"""Tiles: which blocks of a mask are empty, partial or full, and the ordered lists of them that sparse kernels take."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_longca.intervals import chunks
from pytest_longca.predicates import Device, evaluate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from pytest_longca.mask import Mask


@dataclass(frozen=True, slots=True)
class TileLists:
    """For each tile of one side, the tiles of the other side that it meets, ascending; entries past the count are 0.

    Counts are int32 `[batch or 1, heads or 1, tiles]`, indices int32 `[batch or 1, heads or 1, tiles, tiles of the other side]`.
    """

    partial_counts: Tensor
    partial_indices: Tensor
    full_counts: Tensor
    full_indices: Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which tiles have some but not all pairs visible, and which have all: bool `[batch or 1, heads or 1, tiles_q, tiles_kv]`."""

    partial: Tensor
    full: Tensor

    def by_query(self) -> TileLists:
        """For each query tile its key tiles: the forward's and dq's order."""
        return _lists(torch.stack((self.partial, self.full)))

    def by_key(self) -> TileLists:
        """For each key tile its query tiles: the order of dk and dv."""
        return _lists(torch.stack((self.partial, self.full)).transpose(-1, -2))


def _lists(flags: Tensor) -> TileLists:
    """The lists of (partial, full): together, since on a GPU each of their many small operations costs its launch."""
    (partial_counts, full_counts), (partial_indices, full_indices) = ordered(flags)
    return TileLists(partial_counts, partial_indices, full_counts, full_indices)


def ordered(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Counts `[..., rows]` and ascending indices `[..., rows, n]` of the True entries of bool `[..., rows, n]`, int32, padded with 0."""
    width = flags.shape[-1]
    place = flags.cumsum(-1, dtype=torch.int32)
    counts = place[..., -1].contiguous() if width else flags.sum(-1, dtype=torch.int32)
    # What is not set goes to an extra last column, which is cut off.
    place = torch.where(flags, place - 1, width).long()
    indices = torch.zeros(*flags.shape[:-1], width + 1, dtype=torch.int32, device=flags.device)
    indices.scatter_(-1, place, torch.arange(width, dtype=torch.int32, device=flags.device).expand(flags.shape))
    return counts, indices[..., :-1].contiguous()


def tile_lists(rows: Tensor, seqlen_kv: int, block_q: int, block_kv: int) -> tuple[TileLists, TileLists]:
    """The lists of row intervals' tiles: by query tile, and by key tile."""
    tiles = tiles_of_intervals(rows, seqlen_kv, block_q, block_kv)
    return tiles.by_query(), tiles.by_key()


def tiles_of_intervals(rows: Tensor, seqlen_kv: int, block_q: int, block_kv: int) -> Tiles:
    """The tiles of row intervals `[batch, heads, seqlen_q, 2, 2]`, exact, in O(seqlen_q + tiles).

    Each run adds +1 where it begins to touch (or cover) key blocks and -1 where it ends; sums along the keys then count, for every
    tile, the rows that touch it and the rows that cover it.
    """
    batch, heads, seqlen_q = rows.shape[:3]
    num_q, num_kv = -(-seqlen_q // block_q), -(-seqlen_kv // block_kv)
    start, end = rows.long().unbind(-1)
    whole_end = torch.where(end == seqlen_kv, num_kv * block_kv, end)
    first = torch.stack((start, start + (block_kv - 1))) // block_kv  # touched, covered
    last = torch.stack((end + (block_kv - 1), whole_end)) // block_kv
    first_tile = torch.arange(2 * batch * heads, device=rows.device)[:, None] * num_q
    tile = (first_tile + torch.arange(seqlen_q, device=rows.device) // block_q).view(2, batch, heads, seqlen_q, 1)
    touching, covering = _rows_in_range(tile, first, last, (end > start) & (last > first), (2, batch, heads, num_q, num_kv))
    full = covering == _sizes(seqlen_q, block_q, rows.device)[:, None]
    return Tiles(partial=(touching > 0) & ~full, full=full)


def _rows_in_range(tile: Tensor, first: Tensor, last: Tensor, used: Tensor, shape: tuple[int, ...]) -> Tensor:
    """How many rows of each tile have `first <= key block < last`: int32 of `shape`."""
    width = shape[-1] + 1
    steps = torch.zeros(math.prod(shape[:-1]) * width, dtype=torch.int32, device=tile.device)
    one = used.to(torch.int32)
    at = (tile * width + torch.stack((first, last)) * used).flatten()
    steps.scatter_add_(0, at, torch.stack((one, -one)).flatten())
    return steps.view(*shape[:-1], width).cumsum(-1, dtype=torch.int32)[..., :-1]


def _sizes(seqlen: int, block: int, device: Device) -> Tensor:
    """How many tokens each block of a sequence holds: the last one may be short."""
    edges = _edges(seqlen, block, device)
    return edges[1:] - edges[:-1]


def _edges(seqlen: int, block: int, device: Device) -> Tensor:
    return (torch.arange(-(-seqlen // block) + 1, device=device) * block).clamp(max=seqlen)


def tiles_of_blocks(block_map: Tensor, sizes_q: Tensor, sizes_kv: Tensor, block_q: int, block_kv: int) -> Tiles:
    """The tiles of a block map, bool `[heads, blocks_q, blocks_kv]`, whose blocks need not line up with the tiles.

    `sizes_q` and `sizes_kv` are int64 tokens of each block. Works a head at a time: the counts are 4 or 8 times the map's bytes.
    """
    edges_q = _edges(int(sizes_q.sum()), block_q, block_map.device)
    edges_kv = _edges(int(sizes_kv.sum()), block_kv, block_map.device)
    area = (edges_q[1:] - edges_q[:-1])[:, None] * (edges_kv[1:] - edges_kv[:-1])  # [tiles_q, tiles_kv]
    partial, full = [], []
    for head in block_map:
        by_kv = _resample(head.to(torch.int32), sizes_kv, edges_kv)  # [blocks_q, tiles_kv]
        visible = _resample(by_kv.T, sizes_q, edges_q).T  # [tiles_q, tiles_kv]
        full.append(visible == area)
        partial.append((visible > 0) & ~full[-1])
    return Tiles(torch.stack(partial)[None], torch.stack(full)[None])


def _resample(per_token: Tensor, sizes: Tensor, edges: Tensor) -> Tensor:
    """Sums over tiles of a quantity that is constant within blocks: int `[rows, blocks]` to `[rows, tiles]`."""
    if not len(sizes):
        return per_token.new_zeros(per_token.shape[0], len(edges) - 1)
    ends = sizes.cumsum(0)
    before = torch.nn.functional.pad((per_token * sizes).cumsum(1), (1, 0))  # [rows, blocks + 1]
    block = torch.searchsorted(ends, edges, right=True).clamp(max=len(sizes) - 1)
    into = edges - (ends - sizes)[block]
    at_edges = before[:, block] + per_token[:, block] * into
    return at_edges[:, 1:] - at_edges[:, :-1]


def tiles_of_predicate(mask: "Mask", device: Device, block_q: int, block_kv: int) -> Tiles:
    """The tiles of any mask, by evaluating its predicate one row of tiles (or some) at a time: O(S^2) time, O(S) memory."""
    per_tile_row = mask.batch * mask.heads * mask.seqlen_kv * block_q
    num_q, num_kv = -(-mask.seqlen_q // block_q), -(-mask.seqlen_kv // block_kv)
    area = _sizes(mask.seqlen_q, block_q, device)[:, None] * _sizes(mask.seqlen_kv, block_kv, device)
    counts = [torch.zeros(mask.batch, mask.heads, 0, num_kv, dtype=torch.int64, device=device)]
    for tile_rows in chunks(num_q, per_tile_row):
        rows = range(tile_rows.start * block_q, min(tile_rows.stop * block_q, mask.seqlen_q))
        visible = evaluate(mask, device, rows=rows)
        padding = (0, num_kv * block_kv - mask.seqlen_kv, 0, len(tile_rows) * block_q - len(rows))
        padded = torch.nn.functional.pad(visible, padding)
        counts.append(padded.view(mask.batch, mask.heads, len(tile_rows), block_q, num_kv, block_kv).sum((3, 5)))
    visible_pairs = torch.cat(counts, 2)
    full = visible_pairs == area
    return Tiles(partial=(visible_pairs > 0) & ~full, full=full)


def block_mask(mask: "Mask", device: Device = "cpu", block_size: int | tuple[int, int] = 128) -> "BlockMask":
    """FlexAttention's BlockMask of a mask, exact: full blocks are full, absent blocks are empty. `block_size` is (q, kv) or both."""
    from torch.nn.attention.flex_attention import BlockMask

    block_q, block_kv = (block_size, block_size) if isinstance(block_size, int) else block_size
    lists = mask.tiles(device, block_q, block_kv).by_query()
    return BlockMask.from_kv_blocks(
        lists.partial_counts,
        lists.partial_indices,
        lists.full_counts,
        lists.full_indices,
        BLOCK_SIZE=(block_q, block_kv),
        mask_mod=mask.predicate(device),
        seq_lengths=(mask.seqlen_q, mask.seqlen_kv),
    )
