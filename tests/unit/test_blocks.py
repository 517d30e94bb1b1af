"""Index forms of a block map against loops over its cells."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_longca import blocks
from pytest_longca.block_layout import padded_blocks
from pytest_longca.block_map import BlockMap, ExplicitMap
from pytest_longca.errors import InvalidArgument
from pytest_longca.masks.block import UniformBlock, VariableBlock


@st.composite
def block_maps(draw: st.DrawFn, max_heads: int = 3, max_rows: int = 5, max_columns: int = 6) -> Tensor:
    shape = [draw(st.integers(1, high)) for high in (max_heads, max_rows, max_columns)]
    bits = draw(st.integers(0, 2 ** (shape[0] * shape[1] * shape[2]) - 1))
    return torch.tensor([bool(bits >> i & 1) for i in range(shape[0] * shape[1] * shape[2])]).view(shape)


def selected(block_map: Tensor, head: int, row: int) -> list[int]:
    return [column for column in range(block_map.shape[2]) if block_map[head, row, column]]


@given(block_maps())
def test_csr_lists_the_selected_columns_of_each_row(block_map: Tensor) -> None:
    lists = blocks.csr(block_map)
    heads, rows, _ = block_map.shape
    found = [lists.indices[a:b].tolist() for a, b in zip(lists.indptr, lists.indptr[1:], strict=False)]
    assert found == [selected(block_map, head, row) for head in range(heads) for row in range(rows)]
    assert (lists.indptr.dtype, lists.indices.dtype) == (torch.int64, torch.int32)


@given(block_maps(), st.integers(0, 3))
def test_padded_lists_hold_the_columns_and_then_minus_one(block_map: Tensor, spare: int) -> None:
    longest = int(block_map.sum(-1).max())
    lists = blocks.padded_lists(block_map, longest + spare or None)
    capacity = lists.index.shape[2]
    assert capacity == (longest + spare or 1)
    for head in range(block_map.shape[0]):
        for row in range(block_map.shape[1]):
            columns = selected(block_map, head, row)
            assert lists.num[head, row] == len(columns)
            assert lists.index[head, row].tolist() == columns + [-1] * (capacity - len(columns))
    blocks.check_lists(lists, block_map.shape[2])


@given(block_maps(max_heads=2), st.integers(1, 3))
def test_transposed_names_the_heads_of_a_group_one_after_the_other(block_map: Tensor, group: int) -> None:
    per_head = block_map.repeat_interleave(group, 0)
    seen = blocks.transposed(per_head, block_map.shape[0])
    rows = block_map.shape[1]
    assert seen.shape == (block_map.shape[0], block_map.shape[2], group * rows)
    for kv_head, column, entry in seen.nonzero().tolist():
        assert per_head[kv_head * group + entry // rows, entry % rows, column]
    assert int(seen.sum()) == int(per_head.sum())


@given(block_maps(), st.integers(1, 3))
def test_refine_keeps_what_is_visible(block_map: Tensor, factor: int) -> None:
    fine = blocks.refine(block_map, factor)
    assert all(fine[h, i, j] == block_map[h, i // factor, j // factor] for h, i, j in torch.ones_like(fine).nonzero().tolist())


@given(st.data(), st.integers(1, 6))
def test_row_tiles_cover_each_block_and_never_cross_one(data: st.DataObject, tile: int) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    tiles = blocks.row_tiles(sizes, tile, "cpu")
    owner = [block for block, size in enumerate(sizes) for _ in range(size)]
    covered: list[int] = []
    for start, stop, block in zip(tiles.start.tolist(), tiles.stop.tolist(), tiles.block.tolist(), strict=True):
        assert 0 < stop - start <= tile
        assert {owner[token] for token in range(start, stop)} == {block}
        covered += range(start, stop)
    assert covered == list(range(sum(sizes)))


@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_tile_lists_visit_the_selected_tokens_once_full_tiles_first(data: st.DataObject, tile: int, parts: int) -> None:
    part_map = data.draw(block_maps(max_heads=2, max_rows=3))
    columns = part_map.shape[2]
    block_map = torch.cat([part_map.roll(part, 1) for part in range(parts)], 2)
    sizes = data.draw(st.one_of(st.just([tile * 2] * columns), st.lists(st.integers(0, 9), min_size=columns, max_size=columns)))
    lists = blocks.tile_lists(block_map, sizes, tile, parts)
    starts = [sum(sizes[:block]) for block in range(columns)]
    for row in range(block_map.shape[0] * block_map.shape[1]):
        head, block_row = divmod(row, block_map.shape[1])
        wanted = [
            (column // columns, starts[column % columns] + token)
            for column in selected(block_map, head, block_row)
            for token in range(sizes[column % columns])
        ]
        tiles = []
        for t in range(int(lists.indptr[row]), int(lists.indptr[row + 1])):
            first = int(lists.start[t])
            stop = first + tile if lists.stop is None else int(lists.stop[t])
            tiles.append([(0 if lists.part is None else int(lists.part[t]), token) for token in range(first, stop)])
        full = len(tiles) if lists.num_full is None else int(lists.num_full[row])
        assert [len(tokens) == tile for tokens in tiles] == [t < full for t in range(len(tiles))]
        for some in (tiles[:full], tiles[full:]):
            assert some == sorted(some)
        assert sorted(token for tokens in tiles for token in tokens) == wanted


def test_touching_blocks_fill_tiles_together() -> None:
    lists = blocks.tile_lists(torch.tensor([[[True, True, True, False, True]]]), [3, 2, 3, 1, 5], 4)
    assert lists.stop is not None and lists.num_full is not None
    assert list(zip(lists.start.tolist(), lists.stop.tolist(), strict=True)) == [(0, 4), (4, 8), (9, 13), (13, 14)]
    assert lists.num_full.tolist() == [3]


@pytest.mark.parametrize(
    ("block_map", "sizes_q", "sizes_kv", "lengths", "says"),
    [
        (torch.ones(1, 2, 2), [3, 3], [3, 3], (6, 6), "it must be bool"),
        (torch.ones(2, 2, dtype=torch.bool), [3, 3], [3, 3], (6, 6), "it must be bool"),
        (torch.ones(1, 2, 3, dtype=torch.bool), [3, 3], [3, 3], (6, 6), "for 2 query and 2 key blocks"),
        (torch.ones(3, 2, 2, dtype=torch.bool), [3, 3], [3, 3], (6, 6), "3 heads for 4 query heads"),
        (torch.ones(1, 2, 2, dtype=torch.bool), [3, 3], [3, 4], (6, 6), "key block sizes add up to 7 and the sequence has 6 tokens"),
        (torch.ones(1, 2, 2, dtype=torch.bool), [7, -1], [3, 3], (6, 6), "query block sizes contain -1"),
    ],
)
def test_a_map_that_does_not_fit_is_named(
    block_map: Tensor, sizes_q: list[int], sizes_kv: list[int], lengths: tuple[int, int], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        blocks.check_map(block_map, 4, sizes_q, sizes_kv, *lengths)


@pytest.mark.parametrize(
    ("index", "num", "says"),
    [
        ([[[0, 3]]], [[2]], "names block 3: there are blocks 0 to 2"),
        ([[[-1, 0]]], [[1]], "names block -1"),
        ([[[0, 1]]], [[3]], "3 to 3 entries"),
    ],
)
def test_a_list_that_would_read_out_of_bounds_is_refused(index: list[list[list[int]]], num: list[list[int]], says: str) -> None:
    lists = blocks.PaddedLists(torch.tensor(index, dtype=torch.int32), torch.tensor(num, dtype=torch.int32))
    with pytest.raises(InvalidArgument, match=says):
        blocks.check_lists(lists, 3)


@pytest.mark.parametrize(
    ("block_map", "empty", "shared"),
    [
        (BlockMap("topk", 0.1, heads=4, group=2), False, True),
        (BlockMap("topk", 0.5, heads=4, group=1, seed=1), False, False),
        (ExplicitMap.of([[[1, 0], [0, 0]]]), True, True),
        (ExplicitMap.of([[[1, 0], [0, 1]]] * 4), False, True),
        (ExplicitMap.of([[[1, 0], [0, 1]]] * 3 + [[[1, 0], [1, 1]]]), False, False),
    ],
)
def test_what_adapters_ask_of_a_map(block_map: BlockMap | ExplicitMap, empty: bool, shared: bool) -> None:
    mask = UniformBlock(6, 6, 3, block_map)
    assert blocks.has_empty_rows(mask) == empty
    assert blocks.groups_share(mask, 2) == shared


def test_uniform_size_is_the_one_size_of_both_sides() -> None:
    assert blocks.uniform_size(UniformBlock(8, 12, 4, BlockMap())) == 4
    assert blocks.uniform_size(VariableBlock((4, 4), (4,), BlockMap())) == 4
    assert blocks.uniform_size(VariableBlock((4, 4), (4, 3), BlockMap())) is None


@given(st.data(), st.integers(1, 5))
def test_the_padded_layout_keeps_every_pair_that_is_visible(data: st.DataObject, block: int) -> None:
    block_map = data.draw(block_maps(max_rows=3, max_columns=3))
    sizes = [tuple(data.draw(st.integers(1, 9)) for _ in range(count)) for count in block_map.shape[1:]]
    mask = VariableBlock(sizes[0], sizes[1], ExplicitMap.of(block_map))
    layout = padded_blocks(mask, block_map.shape[0], "cpu", block)

    rows = layout.block_map.repeat_interleave(block, 1).repeat_interleave(block, 2)
    used = torch.arange(layout.kv.num_tokens) % block < layout.kv.sizes.repeat_interleave(block)
    visible = layout.q.unpad((rows & used)[None])[0].float()  # [heads, seqlen_q, padded keys]
    back = layout.kv.unpad(visible.transpose(1, 2)[None])[0].transpose(1, 2)
    assert torch.equal(back.bool(), mask.dense()[0])
    assert torch.equal(back.sum(2), visible.sum(2)), "a padding slot is visible"

    tokens = torch.arange(mask.seqlen_q, dtype=torch.float32).view(1, -1, 1, 1) + 1
    padded = layout.q.pad(tokens)
    assert torch.equal(layout.q.unpad(padded).transpose(1, 2), tokens)
    assert padded.sum() == tokens.sum()
    assert layout.is_padded == (layout.q.num_tokens != mask.seqlen_q or layout.kv.num_tokens != mask.seqlen_kv)
