"""Index forms of a block map: what block-sparse backends take instead of a bool matrix.

A block map is a bool tensor `[heads, blocks_q, blocks_kv]`; True means that every token of the query block sees every token of the
key block. All functions run on the map's device in whole-tensor operations; none loops over rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from pytest_longca.block_map import BlockMap
from pytest_longca.errors import InvalidArgument

if TYPE_CHECKING:
    from pytest_longca.mask import Device, Mask


class BlockSparse(Protocol):
    """What a mask that has the form of a block map offers beside what every mask does."""

    seqlen_q: int
    seqlen_kv: int

    def sizes_q(self) -> tuple[int, ...]:
        """Tokens of each query block."""

    def sizes_kv(self) -> tuple[int, ...]:
        """Tokens of each key block."""

    def expand(self, device: "Device" = "cpu") -> Tensor:
        """The map, bool `[1 or heads_q, blocks_q, blocks_kv]`."""


@dataclass(frozen=True, slots=True)
class Csr:
    """The selected columns of each row of a map, ascending.

    `indptr` int64 `[heads * rows + 1]`; `indices` int32 `[selected]`, columns counted inside their head.
    """

    indptr: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class PaddedLists:
    """The same as a rectangle: `index` int32 `[heads, rows, capacity]`, -1 after the last; `num` int32 `[heads, rows]`."""

    index: Tensor
    num: Tensor


@dataclass(frozen=True, slots=True)
class TileLists:
    """What a kernel visits for each row of a map: tiles of tokens, `start[t] <= token < stop[t]`.

    `indptr` int64 `[heads * rows + 1]`, `start` int32 `[tiles]`; `stop` int32 `[tiles]` and `num_full` int32 `[heads * rows]`, how many
    tiles of each row are full (they come first), or both None where every tile is; `part` int32 `[tiles]` is which of the row's
    concatenated column ranges (query heads of a group) the tile lies in, or None if one.
    """

    indptr: Tensor
    start: Tensor
    stop: Tensor | None
    part: Tensor | None
    num_full: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The tokens of one side cut into tiles that never cross a block.

    `start`, `stop` and `block` int32 `[tiles]`: first token, one past the last token *of the tile*, block.
    """

    start: Tensor
    stop: Tensor
    block: Tensor


def of(mask: "Mask") -> BlockSparse:
    """The mask as one that has a block map; ask only masks with that form."""
    return cast(BlockSparse, mask)


def uniform_size(mask: "Mask") -> int | None:
    """The one size of all blocks on both sides, or None."""
    sizes = {*of(mask).sizes_q(), *of(mask).sizes_kv()}
    return sizes.pop() if len(sizes) == 1 else None


def has_empty_rows(mask: "Mask") -> bool:
    """Whether a query block selects no key. A map with the same number in each row is not expanded for it: large ones take seconds."""
    drawn = getattr(mask, "block_map", None)
    if isinstance(drawn, BlockMap) and drawn.kind == "topk":
        return False
    filled = torch.tensor(of(mask).sizes_kv()) > 0
    return not bool((of(mask).expand() & filled).any(-1).all())


def groups_share(mask: "Mask", group: int) -> bool:
    """Whether the query heads of each group of `group` have one map."""
    drawn = getattr(mask, "block_map", None)
    if mask.heads == 1 or group == 1 or (isinstance(drawn, BlockMap) and drawn.group % group == 0):
        return True
    by_group = of(mask).expand().unflatten(0, (-1, group))
    return bool((by_group == by_group[:, :1]).all())


def checked_map(mask: "Mask", heads: int, device: "Device") -> Tensor:
    """The mask's map on `device`, after `check_map`."""
    sparse = of(mask)
    block_map = sparse.expand(device)
    check_map(block_map, heads, sparse.sizes_q(), sparse.sizes_kv(), sparse.seqlen_q, sparse.seqlen_kv)
    return block_map


def check_map(block_map: Tensor, heads: int, sizes_q: Sequence[int], sizes_kv: Sequence[int], seqlen_q: int, seqlen_kv: int) -> None:
    """Raise InvalidArgument unless the map, its block sizes and the sequence lengths fit together."""
    if block_map.dtype is not torch.bool or block_map.dim() != 3:
        raise InvalidArgument(f"a block map of {block_map.dtype}{tuple(block_map.shape)}: it must be bool [heads, blocks_q, blocks_kv]")
    wanted = (len(sizes_q), len(sizes_kv))
    if tuple(block_map.shape[1:]) != wanted:
        raise InvalidArgument(
            f"a block map of shape {tuple(block_map.shape)} for {wanted[0]} query and {wanted[1]} key blocks: the last two must agree"
        )
    if block_map.shape[0] not in (1, heads):
        raise InvalidArgument(f"a block map of {block_map.shape[0]} heads for {heads} query heads: one for all, or one each")
    for side, sizes, seqlen in (("query", sizes_q, seqlen_q), ("key", sizes_kv, seqlen_kv)):
        if min(sizes, default=0) < 0:
            raise InvalidArgument(f"{side} block sizes contain {min(sizes)}: a size counts tokens, so it cannot be negative")
        if sum(sizes) != seqlen:
            raise InvalidArgument(f"{side} block sizes add up to {sum(sizes)} and the sequence has {seqlen} tokens: they must be equal")


def check_lists(lists: PaddedLists, num_columns: int) -> None:
    """Raise InvalidArgument unless every listed index is a column; for backends that read out of bounds otherwise. Synchronises."""
    capacity = lists.index.shape[-1]
    if lists.num.numel() and not 0 <= int(lists.num.min()) <= int(lists.num.max()) <= capacity:
        raise InvalidArgument(f"a list has {int(lists.num.min())} to {int(lists.num.max())} entries: there is room for 0 to {capacity}")
    listed = torch.arange(capacity, device=lists.num.device) < lists.num[..., None]
    outside = listed & ((lists.index < 0) | (lists.index >= num_columns))
    if bool(outside.any()):
        bad = int(lists.index[outside][0])
        raise InvalidArgument(f"a list names block {bad}: there are blocks 0 to {num_columns - 1}")


def csr(block_map: Tensor) -> Csr:
    """The map's rows as compressed lists. `block_map` bool `[heads, rows, columns]`."""
    num = block_map.sum(-1, dtype=torch.int64).flatten()
    indptr = torch.zeros(num.numel() + 1, dtype=torch.int64, device=num.device)
    torch.cumsum(num, 0, out=indptr[1:])
    # One flat nonzero, then the column by remainder: a nonzero over three axes writes three times as much.
    flat = block_map.reshape(-1).nonzero().squeeze(1)
    return Csr(indptr, flat.remainder_(max(1, block_map.shape[-1])).to(torch.int32))


def padded_lists(block_map: Tensor, capacity: int | None = None) -> PaddedLists:
    """The map's rows as padded lists; `capacity` defaults to the longest list, at least 1."""
    compressed = csr(block_map)
    heads, rows, _ = block_map.shape
    num = compressed.indptr.diff()
    capacity = capacity or (max(1, int(num.max())) if num.numel() else 1)
    index = torch.full((heads * rows * capacity,), -1, dtype=torch.int32, device=block_map.device)
    shift = torch.arange(num.numel(), device=num.device) * capacity - compressed.indptr[:-1]
    slot = torch.arange(compressed.indices.numel(), device=num.device) + _spread(shift, num, compressed.indices.numel())
    index[slot] = compressed.indices
    return PaddedLists(index.view(heads, rows, capacity), num.to(torch.int32).view(heads, rows))


def transposed(block_map: Tensor, groups: int | None = None) -> Tensor:
    """The map seen from the keys: bool `[groups, columns, heads / groups * rows]`, the heads of a group side by side.

    `groups` is the number of key/value heads; it defaults to the map's heads, which gives the plain transpose.
    """
    heads, rows, columns = block_map.shape
    groups = groups or heads
    return block_map.view(groups, heads // groups, rows, columns).permute(0, 3, 1, 2).reshape(groups, columns, heads // groups * rows)


def refine(block_map: Tensor, factor: int) -> Tensor:
    """The same visibility in blocks `factor` times smaller on both sides."""
    return block_map.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def row_tiles(sizes: Sequence[int], tile: int, device: torch.device | str) -> RowTiles:
    """Cut blocks of these sizes into tiles of at most `tile` tokens."""
    lengths = torch.tensor(sizes, dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    start, owner = _cut(starts, lengths, tile)
    stop = torch.minimum(start + tile, (starts + lengths)[owner])
    return RowTiles(*(x.to(device=device, dtype=torch.int32) for x in (start, stop, owner)))


def tile_lists(block_map: Tensor, sizes: Sequence[int], tile: int, parts: int = 1) -> TileLists:
    """The tokens that each row of the map selects, as tiles.

    `sizes` are the token counts of one part's columns; the map has `parts` times as many columns. Selected blocks that touch are one
    run of tokens, cut into tiles from its start, so that a tile is short only at the end of a run. A row's short tiles come last.
    """
    uniform = sizes[0] if sizes and min(sizes) == max(sizes) else 0
    if uniform and uniform % tile == 0:
        return _full_tiles(block_map, uniform // tile, len(sizes), tile, parts)
    return _run_tiles(block_map, sizes, tile, parts)


def _full_tiles(block_map: Tensor, factor: int, columns: int, tile: int, parts: int) -> TileLists:
    lists = csr(block_map.repeat_interleave(factor, 2) if factor > 1 else block_map)
    columns *= factor
    part = (lists.indices // columns).to(torch.int32) if parts > 1 else None
    start = lists.indices.remainder(columns) if parts > 1 else lists.indices
    return TileLists(lists.indptr, start.mul(tile), None, part)


def _run_tiles(block_map: Tensor, sizes: Sequence[int], tile: int, parts: int) -> TileLists:
    device = block_map.device
    lengths = torch.tensor(sizes, dtype=torch.int64, device=device)
    ends = lengths.cumsum(0)
    lists = csr(block_map & (lengths > 0).repeat(parts))
    column = lists.indices.long()
    row = _spread(torch.arange(lists.indptr.numel() - 1, device=device), lists.indptr.diff(), column.numel())
    block, part = column % len(sizes), column // len(sizes)
    begin, end = (ends - lengths)[block], ends[block]

    opens = torch.ones_like(column, dtype=torch.bool)
    opens[1:] = (row[1:] != row[:-1]) | (part[1:] != part[:-1]) | (begin[1:] != end[:-1])
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    run_start, run_stop = begin[opens], end[closes]

    whole = (run_stop - run_start) // tile * tile
    start, run = _cut(run_start, whole, tile)
    rest = (run_start + whole < run_stop).nonzero().squeeze(1)
    num_rows = lists.indptr.numel() - 1
    num_full, num_short = (torch.bincount(row[opens][runs], minlength=num_rows) for runs in (run, rest))
    indptr = torch.nn.functional.pad((num_full + num_short).cumsum(0), (1, 0))
    slots = torch.cat([_places(indptr[:-1], num_full, run.numel()), _places(indptr[:-1] + num_full, num_short, rest.numel())])

    def placed(full: Tensor, short: Tensor) -> Tensor:
        out = torch.empty(slots.numel(), dtype=torch.int32, device=device)
        out[slots] = torch.cat([full, short]).to(torch.int32)
        return out

    head = placed(part[opens][run], part[opens][rest]) if parts > 1 else None
    start, stop = placed(start, (run_start + whole)[rest]), placed(start + tile, run_stop[rest])
    return TileLists(indptr, start, stop, head, num_full.to(torch.int32))


def _places(begin: Tensor, num: Tensor, total: int) -> Tensor:
    """Consecutive slots from `begin` on, `num` for each row."""
    return torch.arange(total, device=begin.device) + _spread(begin - (num.cumsum(0) - num), num, total)


def _cut(starts: Tensor, lengths: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Tile starts of consecutive ranges, and the range that each tile belongs to."""
    num = (lengths + (tile - 1)) // tile
    owner = torch.arange(num.numel(), device=num.device).repeat_interleave(num)
    first = num.cumsum(0) - num
    return starts[owner] + (torch.arange(owner.numel(), device=num.device) - first[owner]) * tile, owner


def _spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    return values.repeat_interleave(counts, output_size=total)
