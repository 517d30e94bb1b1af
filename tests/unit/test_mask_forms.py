"""Every form of every mask, decoded back to a dense table: against 112 tables made by brute force, and against the predicate."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from pytest_longca.block_map import ExplicitMap
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.intervals import canonical, columns_of, endpoint_rows, from_predicate
from pytest_longca.mask import Form, Mask, PredicateMask, from_mask_mod
from pytest_longca.tiles import Tiles, tile_lists, tiles_of_predicate

TABLES = json.loads((Path(__file__).parents[1] / "data" / "masks.json").read_text())["cases"]


def mask_of(table: dict[str, Any]) -> Mask:
    parameters = {key: tuple(value) if isinstance(value, list) else value for key, value in table["params"].items()}
    cls = load(MASKS[table["mask"]])
    if "block_map" in parameters:
        parameters["block_map"] = ExplicitMap.of(table["params"]["block_map"])
        sizes_q, sizes_kv = parameters["block_sizes_q"], parameters["block_sizes_kv"]
        parameters |= {"seqlen_q": sum(sizes_q), "seqlen_kv": sum(sizes_kv), "block_size": sizes_q[0]}
    if "doc_lens_q" in parameters:
        parameters["doc_lens"] = parameters["doc_lens_q"]
    return cls(**{key: value for key, value in parameters.items() if key in cls.__dataclass_fields__})


def truth_of(table: dict[str, Any]) -> Tensor:
    heads = table["rows_per_head"] if "rows_per_head" in table else [table["rows"]]
    return torch.tensor([[[cell == "1" for cell in row] for row in rows] for rows in heads])[None]


def decode_runs(runs: Tensor, size: int) -> Tensor:
    """bool `[..., size]` of runs `[..., 2, 2]`."""
    at = torch.arange(size)
    return ((runs[..., 0, None] <= at) & (at < runs[..., 1, None])).any(-2)


def decode_varlen(mask: Mask) -> Tensor:
    """Each document by the documented meaning of Varlen, in plain loops."""
    form = mask.varlen()
    assert form is not None
    out = torch.zeros(mask.seqlen_q, mask.seqlen_kv, dtype=torch.bool)
    q0 = kv0 = 0
    for len_q, len_kv in zip(form.lens_q, form.lens_kv, strict=True):
        for i in range(len_q):
            diagonal = i + len_kv - len_q
            for j in range(len_kv):
                seen = j <= diagonal or not form.is_causal
                if form.window is not None:
                    seen = seen and diagonal - form.window[0] <= j <= diagonal + form.window[1]
                out[q0 + i, kv0 + j] = seen
        q0, kv0 = q0 + len_q, kv0 + len_kv
    return out[None, None]


def decode_block_mask(mask: Mask, block_q: int, block_kv: int) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of the BlockMask as token tables, and nothing from its mask_mod."""
    form = mask.block_mask(block_size=(block_q, block_kv))
    assert form.seq_lengths == (mask.seqlen_q, mask.seqlen_kv)
    out = []
    for counts, indices in ((form.kv_num_blocks, form.kv_indices), (form.full_kv_num_blocks, form.full_kv_indices)):
        tiles = torch.zeros(counts.shape[1], counts.shape[2], -(-mask.seqlen_kv // block_kv), dtype=torch.bool)
        for head in range(counts.shape[1]):
            for tile in range(counts.shape[2]):
                listed = indices[0, head, tile, : counts[0, head, tile]].tolist()
                assert listed == sorted(set(listed))
                tiles[head, tile, listed] = True
        tokens = tiles.repeat_interleave(block_q, 1).repeat_interleave(block_kv, 2)
        out.append(tokens[None, :, : mask.seqlen_q, : mask.seqlen_kv])
    return out[0], out[1]


@pytest.fixture(params=TABLES, ids=[f"{table['mask']}-{i % 8}" for i, table in enumerate(TABLES)])
def table(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]  # a table


def test_predicate_draws_the_table(table: dict[str, Any]) -> None:
    assert torch.equal(mask_of(table).dense(), truth_of(table))


def test_area_counts_the_table(table: dict[str, Any]) -> None:
    assert mask_of(table).area() == table["area"] == int(truth_of(table).sum())


def test_row_intervals_draw_the_table(table: dict[str, Any]) -> None:
    mask, truth = mask_of(table), truth_of(table)
    rows = mask.row_intervals()
    if rows is None:
        assert Form.ROW_INTERVALS not in mask.forms
        assert (truth.int().diff(dim=-1, prepend=torch.zeros(*truth.shape[:-1], 1)) == 1).sum(-1).max() > 2
    else:
        assert torch.equal(decode_runs(rows, mask.seqlen_kv), truth)


def test_columns_draw_the_table(table: dict[str, Any]) -> None:
    mask, masked = mask_of(table), ~truth_of(table).transpose(-1, -2)
    columns = mask.columns()
    if columns is None:
        assert Form.ROW_INTERVALS not in mask.forms
        assert (masked.int().diff(dim=-1, prepend=torch.zeros(*masked.shape[:-1], 1)) == 1).sum(-1).max() > 2
    else:
        assert torch.equal(decode_runs(columns, mask.seqlen_q), masked)


@pytest.mark.parametrize("blocks", [(4, 4), (5, 3)])
def test_block_mask_is_exact(table: dict[str, Any], blocks: tuple[int, int]) -> None:
    truth = truth_of(table)
    partial, full = decode_block_mask(mask_of(table), *blocks)
    assert not (partial & full).any()
    assert truth[full].all(), "a full tile hides something"
    assert not truth[~(partial | full)].any(), "an absent tile shows something"
    for block in truth_tiles(truth, partial, *blocks):
        assert block.any() and not block.all(), "a partial tile is not partial"


def truth_tiles(truth: Tensor, chosen: Tensor, block_q: int, block_kv: int) -> list[Tensor]:
    """The tiles of the truth whose first token is chosen."""
    return [
        truth[0, head, q : q + block_q, kv : kv + block_kv]
        for head in range(truth.shape[1])
        for q in range(0, truth.shape[2], block_q)
        for kv in range(0, truth.shape[3], block_kv)
        if chosen[0, head, q, kv]
    ]


def test_varlen_draws_the_table(table: dict[str, Any]) -> None:
    mask = mask_of(table)
    if Form.VARLEN in mask.forms:
        assert torch.equal(decode_varlen(mask), truth_of(table))
    else:
        assert mask.varlen() is None


def test_the_tables_cover_every_mask() -> None:
    assert {table["mask"] for table in TABLES} == set(MASKS)


def test_a_table_of_one_mask_does_not_fit_another() -> None:
    """The comparison can fail: the causal tables are not the full mask's."""
    table = next(table for table in TABLES if table["mask"] == "causal")
    assert not torch.equal(mask_of(table | {"mask": "full"}).dense(), truth_of(table))
    with pytest.raises(InvalidArgument, match="window is None"):
        load(MASKS["full_sliding_window"])(4, 4, None)


@st.composite
def sampled(draw: st.DrawFn, names: tuple[str, ...] = tuple(MASKS)) -> Mask:
    """Any mask over short sequences, unequal and empty ones where the mask allows it."""
    cls = load(MASKS[draw(st.sampled_from(names), label="mask")])
    fewest = 1 if cls.name == "variable_block" else 0
    seqlen_q = draw(st.integers(fewest, 40), label="seqlen_q")
    seqlen_kv = draw(st.integers(fewest, 40), label="seqlen_kv") if cls.unequal_lengths and draw(st.booleans()) else seqlen_q
    rng = Random(draw(st.integers(0, 1 << 20), label="seed"))
    return cls.sample(rng, seqlen_q, seqlen_kv)  # type: ignore[no-any-return]  # a mask


def assert_canonical(runs: Tensor) -> None:
    """Ascending, disjoint, not touching, unused ones (0, 0) and last."""
    (start0, end0), (start1, end1) = runs[..., 0, :].unbind(-1), runs[..., 1, :].unbind(-1)
    used0, used1 = end0 > start0, end1 > start1
    assert runs.dtype is torch.int32
    assert not runs[..., 0, :][~used0].any() and not runs[..., 1, :][~used1].any()
    assert (used0 | ~used1).all() and (start1 > end0)[used1].all() and (runs >= 0).all()


@settings(deadline=None, max_examples=300)
@given(sampled())
def test_row_intervals_are_the_predicate(mask: Mask) -> None:
    rows, searched = mask.row_intervals(), from_predicate(mask)
    if rows is None or searched is None:
        assert rows is searched is None and Form.ROW_INTERVALS not in mask.forms
    else:
        assert_canonical(rows)
        assert torch.equal(rows, searched)
        assert torch.equal(decode_runs(rows, mask.seqlen_kv), mask.dense())
    assert mask.area() == int(mask.dense().sum())


@settings(deadline=None, max_examples=300)
@given(sampled())
def test_columns_are_the_predicate(mask: Mask) -> None:
    columns = mask.columns()
    bare = PredicateMask(mask.predicate(), mask.seqlen_q, mask.seqlen_kv, num_heads=mask.heads)
    searched = bare.columns()
    if columns is None or searched is None:
        assert columns is searched is None and Form.ROW_INTERVALS not in mask.forms
    else:
        assert_canonical(columns)
        assert torch.equal(columns, searched)
        assert torch.equal(~decode_runs(columns, mask.seqlen_q).transpose(-1, -2), mask.dense())


@settings(deadline=None, max_examples=200)
@given(sampled(), st.integers(1, 17), st.integers(1, 17))
def test_tiles_are_the_predicate(mask: Mask, block_q: int, block_kv: int) -> None:
    tiles = mask.tiles("cpu", block_q, block_kv)
    counted = tiles_of_predicate(mask, "cpu", block_q, block_kv)
    assert torch.equal(tiles.partial, counted.partial) and torch.equal(tiles.full, counted.full)
    partial, full = (x.repeat_interleave(block_q, 2).repeat_interleave(block_kv, 3) for x in (tiles.partial, tiles.full))
    partial, full = (x[:, :, : mask.seqlen_q, : mask.seqlen_kv] for x in (partial, full))
    dense = mask.dense()
    assert dense[full].all() and not dense[~(partial | full)].any()
    assert all(tile.any() and not tile.all() for tile in truth_tiles(dense, partial, block_q, block_kv))


@settings(deadline=None, max_examples=100)
@given(sampled(), st.integers(1, 17), st.integers(1, 17))
def test_tile_lists_name_the_tiles_both_ways(mask: Mask, block_q: int, block_kv: int) -> None:
    tiles = mask.tiles("cpu", block_q, block_kv)
    for lists, flip in ((tiles.by_query(), False), (tiles.by_key(), True)):
        for flags, counts, indices in (
            (tiles.partial, lists.partial_counts, lists.partial_indices),
            (tiles.full, lists.full_counts, lists.full_indices),
        ):
            own = flags.transpose(-1, -2) if flip else flags
            assert counts.dtype is indices.dtype is torch.int32 and indices.shape == own.shape
            for row, count, index in zip(own.flatten(0, 2), counts.flatten(), indices.flatten(0, 2), strict=True):
                assert index[:count].tolist() == row.nonzero()[:, 0].tolist()
                assert not index[count:].any()


def test_tile_lists_of_intervals_are_the_masks() -> None:
    mask = load(MASKS["causal_document"])((5, 0, 9))
    by_query, by_key = tile_lists(mask.row_intervals(), 14, 4, 3)
    tiles = mask.tiles("cpu", 4, 3)
    assert isinstance(tiles, Tiles)
    assert torch.equal(by_query.partial_indices, tiles.by_query().partial_indices)
    assert torch.equal(by_key.full_counts, tiles.by_key().full_counts)


@settings(deadline=None, max_examples=200)
@given(sampled(), st.integers(1, 3))
def test_endpoint_rows_are_the_predicate(mask: Mask, batch: int) -> None:
    rows = mask.row_intervals()
    if rows is None:
        return
    ends = endpoint_rows(rows, batch)
    assert ends.dtype is torch.int32 and ends.is_contiguous() and ends.shape[1] in (1, 3, 5)
    assert (ends.diff(dim=1) >= 0).all() and (ends >= 0).all() and (ends <= mask.seqlen_kv).all()
    key = torch.arange(mask.seqlen_kv)
    visible = key < ends[:, 0, :, None]
    for first in range(1, ends.shape[1], 2):
        visible |= (ends[:, first, :, None] <= key) & (key < ends[:, first + 1, :, None])
    dense = mask.dense()[0]  # [heads, seqlen_q, seqlen_kv]
    assert torch.equal(visible, dense.repeat(1, batch, 1))


@settings(deadline=None, max_examples=150)
@given(sampled(("full", "causal", "full_sliding_window", "causal_sliding_window", "full_document", "causal_document")))
def test_varlen_is_the_predicate(mask: Mask) -> None:
    assert torch.equal(decode_varlen(mask), mask.dense())


def runs_of_table() -> st.SearchStrategy[Tensor]:
    """Small tables of any pattern, `[rows, keys]`."""
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 8))
    return shapes.flatmap(
        lambda shape: st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda cells: torch.tensor(cells).view(shape)
        )
    )


@settings(deadline=None, max_examples=300)
@given(runs_of_table())
def test_any_table_has_its_forms_or_none(cells: Tensor) -> None:
    mask = PredicateMask(lambda b, h, q, kv: cells[q, kv], *cells.shape)
    rows = mask.row_intervals()
    most_in_row = (cells.int().diff(dim=1, prepend=torch.zeros(len(cells), 1)) == 1).sum(1).max()
    assert (rows is None) == bool(most_in_row > 2)
    masked = ~cells.T
    most_in_column = (masked.int().diff(dim=1, prepend=torch.zeros(len(masked), 1)) == 1).sum(1).max()
    columns = mask.columns()
    assert (columns is None) == bool(most_in_column > 2)
    if rows is not None:
        assert torch.equal(decode_runs(rows, cells.shape[1])[0, 0], cells)
    if columns is not None:
        assert torch.equal(decode_runs(columns, cells.shape[0])[0, 0], masked)


def test_canonical_merges_touching_and_drops_empty_runs() -> None:
    start0, end0, start1, end1 = torch.tensor(
        [[0, 2, 2, 4], [0, 2, 1, 3], [0, 2, 3, 5], [3, 3, 4, 6], [1, 2, 2, 2], [5, 4, 7, 7], [2, 6, 3, 4]], dtype=torch.int32
    ).unbind(1)
    wanted = [[[0, 4], [0, 0]], [[0, 3], [0, 0]], [[0, 2], [3, 5]], [[4, 6], [0, 0]], [[1, 2], [0, 0]], [[0, 0], [0, 0]], [[2, 6], [0, 0]]]
    assert canonical(start0, end0, start1, end1)[0, 0].tolist() == wanted


def test_columns_stop_early_where_there_are_too_many_events() -> None:
    """Rows that take turns give every key a masked run each: None, and not a table of seqlen_q times seqlen_kv events."""
    rows = torch.zeros(1, 1, 6, 2, 2, dtype=torch.int32)
    rows[0, 0, ::2, 0, 1] = 4
    assert columns_of(rows, 4) is None


def test_forms_keep_batch_and_head_axes() -> None:
    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + h - b

    mask = PredicateMask(mod, 9, 7, num_batches=3, num_heads=2)
    dense = mask.dense()
    assert dense.shape == (3, 2, 9, 7)
    assert dense[:, :, 3].sum(-1).tolist() == [[4, 5], [3, 4], [2, 3]]
    rows, columns = mask.row_intervals(), mask.columns()
    assert rows is not None and columns is not None
    assert torch.equal(decode_runs(rows, 7), dense) and torch.equal(~decode_runs(columns, 9).transpose(-1, -2), dense)
    assert mask.block_mask(block_size=4).kv_num_blocks.shape == (3, 2, 3)
    assert mask.area() == int(dense.sum())


def test_large_masks_are_evaluated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_longca.intervals.CHUNK_ELEMENTS", 50)
    monkeypatch.setattr("pytest_longca.intervals.CHUNK_ROWS", 5)
    mask = load(MASKS["global_sliding_window"])(23, 23, 2, 3)
    bare = PredicateMask(mask.predicate(), 23, 23)
    assert torch.equal(bare.row_intervals(), mask.row_intervals())
    assert torch.equal(~decode_runs(mask.columns(), 23).transpose(-1, -2), mask.dense())
    assert torch.equal(tiles_of_predicate(bare, "cpu", 4, 5).partial, mask.tiles("cpu", 4, 5).partial)


@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_evaluates_the_predicate_as_we_do(name: str) -> None:
    """FlexAttention calls a mask_mod under vmap, with scalars."""
    for seed in range(5):
        mask = load(MASKS[name]).sample(Random(seed), 12)
        assert torch.equal(create_mask(mask.predicate(), 1, mask.heads, 12, 12, device="cpu"), mask.dense())


@pytest.mark.parametrize("name", MASKS)
def test_the_same_predicate_comes_back(name: str) -> None:
    mask = load(MASKS[name]).sample(Random(1), 12)
    assert mask.predicate() is mask.predicate("cpu") is mask.predicate(torch.device("cpu"))


def test_a_users_mask_mod_is_a_class_of_masks() -> None:
    cls = from_mask_mod("strided", lambda b, h, q, kv: (q - kv) % 3 == 0)
    mask = cls.sample(Random(0), 7)
    assert mask == cls.default(7) and mask.name == "strided" and cls.forms == {Form.PREDICATE}
    assert mask.row_intervals() is None and mask.area() == 17
    assert mask != from_mask_mod("other", lambda b, h, q, kv: q == kv).default(7)
    assert Form.ROW_INTERVALS in from_mask_mod("diagonal", lambda b, h, q, kv: q == kv, two_runs_a_row=True).forms


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda b, h, q, kv: 1.0 * (q >= kv), "returned torch.float32"),
        (lambda b, h, q, kv: True, "returned bool"),
        (lambda b, h, q, kv: (q >= kv)[..., :2], r"returned shape \(1, 1, 5, 2\)"),
        (lambda b, h, q, kv: (q >= kv)[None], r"returned shape \(1, 1, 1, 5, 6\)"),
    ],
    ids=["float", "scalar", "short", "deep"],
)
def test_a_bad_mask_mod_is_named(mod: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"mask 'mine' {words}"):
        PredicateMask(mod, 5, 6, label="mine").dense()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_mask_for_which_there_was_no_memory_is_no_bad_one(error: Exception) -> None:
    def mod(*_: object) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        PredicateMask(mod, 5, 6).dense()
    assert caught.value is error
