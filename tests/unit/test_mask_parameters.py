"""What masks accept, refuse, draw, and cost at 512K tokens."""

import doctest
import importlib
import weakref
from collections.abc import Callable
from dataclasses import fields
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_longca.block_map import BlockMap, ExplicitMap, parse_block_map
from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.intervals import area_of, columns_of
from pytest_longca.lengths import Lengths
from pytest_longca.mask import Family, Mask
from pytest_longca.sampling import LengthList
from tests.unit.machine_speed import over_quiet_ms

MIB = 1 << 20


@pytest.mark.parametrize("module", sorted({path.partition(":")[0] for path in MASKS.values()}))
def test_every_docstring_draws_its_mask(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed


@pytest.mark.parametrize("module", ["mask", "lengths", "sampling", "block_map", "ids", "errors"])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"pytest_longca.{module}"))
    assert result.attempted and not result.failed


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative length": ("full", {"seqlen_q": -1, "seqlen_kv": 4}, "seqlen_q is -1: it must be between 0 and"),
    "absurd length": ("causal", {"seqlen_q": 4, "seqlen_kv": 1 << 40}, "seqlen_kv is 1099511627776: it must be between 0 and"),
    "length of another type": ("causal", {"seqlen_q": 4.5, "seqlen_kv": 4}, "seqlen_q is 4.5: it must be an integer"),
    "negative window": ("full_sliding_window", {"seqlen_q": 4, "seqlen_kv": 4, "window": -2}, "window is -2"),
    "negative document": ("causal_document", {"doc_lens": (3, -1)}, r"doc_lens\[1\] is -1"),
    "no document": ("full_document", {"doc_lens": ()}, "doc_lens is empty"),
    "text for lengths": ("full_document", {"doc_lens": "34"}, "doc_lens is '34': it must be a sequence of integers"),
    "number for lengths": ("full_document", {"doc_lens": 7}, "doc_lens is 7: it must be a sequence of integers"),
    "absurd sum": ("full_document", {"doc_lens": (1 << 30, 1)}, "the sum of doc_lens is 1073741825"),
    "documents that differ": ("full_document", {"doc_lens": (3, 4), "doc_lens_kv": (7,)}, "doc_lens_kv has 1 documents and doc_lens has 2"),
    "unequal global": (
        "global_sliding_window",
        {"seqlen_q": 4, "seqlen_kv": 5, "window": 1, "num_global": 1},
        "global_sliding_window with seqlen_q 4 and seqlen_kv 5: this mask needs equal lengths",
    ),
    "unequal prefix": ("prefix_lm_causal", {"seqlen_q": 4, "seqlen_kv": 5, "prefix": 1}, "needs equal lengths"),
    "long prefix": (
        "prefix_lm_causal",
        {"seqlen_q": 4, "seqlen_kv": 4, "prefix": 5},
        "prefix is 5: it must not be longer than the sequence of 4",
    ),
    "long document prefix": (
        "prefix_lm_document",
        {"doc_lens": (3, 4), "prefixes": (3, 5)},
        r"prefixes\[1\] is 5: it must not be longer than its document, doc_lens\[1\] = 4",
    ),
    "prefixes that do not match": ("prefix_lm_document", {"doc_lens": (3, 4), "prefixes": (3,)}, "1 prefixes and 2 doc_lens"),
    "block of nothing": ("block_causal_document", {"doc_lens": (3,), "block_size": 0}, "block_size is 0: it must be between 1 and"),
    "length and block": (
        "uniform_block",
        {"seqlen_q": 128, "seqlen_kv": 100, "block_size": 64, "block_map": BlockMap()},
        "seqlen_kv is 100 and block_size 64: the length must be a multiple of the block",
    ),
    "map of the wrong shape": (
        "uniform_block",
        {"seqlen_q": 4, "seqlen_kv": 4, "block_size": 2, "block_map": ExplicitMap.of([[[True]]])},
        r"a block map of \(1, 1\) blocks for \(2, 2\)",
    ),
    "empty block": (
        "variable_block",
        {"block_sizes_q": (3, 0), "block_sizes_kv": (3,), "block_map": BlockMap()},
        r"block_sizes_q\[1\] is 0",
    ),
    "sizes that do not match the map": (
        "variable_block",
        {"block_sizes_q": (3,), "block_sizes_kv": (3, 1), "block_map": ExplicitMap.of([[[True]]])},
        r"a block map of \(1, 1\) blocks for \(1, 2\)",
    ),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_a_mask_refuses(bad: str) -> None:
    name, parameters, words = REFUSED[bad]
    with pytest.raises(InvalidArgument, match=words):
        load(MASKS[name])(**parameters)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockMap(density=1.5), "density is 1.5"),
        (lambda: BlockMap("topq"), "unknown block map kind 'topq': did you mean 'topk'"),
        (lambda: BlockMap(heads=6, group=4), "6 heads in groups of 4"),
        (lambda: ExplicitMap.of(torch.zeros(64, 64, 64, dtype=torch.bool)), "an explicit block map of 32768 bytes"),
        (lambda: ExplicitMap(1, 2, 2, "9"), "bits '9': 1x2x2 blocks are 2 digits"),
        (lambda: ExplicitMap.of(torch.zeros(2, 2, dtype=torch.bool)), r"shape \(2, 2\): it must be \[heads, blocks_q, blocks_kv\]"),
        (lambda: parse_block_map("topk:lots:h1:g1:s0"), "block map 'topk:lots:h1:g1:s0': it reads"),
    ],
)
def test_a_block_map_refuses(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make()


@pytest.mark.parametrize("name", MASK_GROUPS["heterogeneous"])
def test_a_heterogeneous_mask_needs_equal_lengths(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} with seqlen_q 8 and seqlen_kv 9"):
        load(MASKS[name]).sample(Random(0), 8, 9)


@pytest.mark.parametrize("name", MASKS)
def test_samples_have_the_lengths_asked_for_and_repeat(name: str) -> None:
    cls = load(MASKS[name])
    for seed in range(20):
        mask = cls.sample(Random(seed), 24)
        assert (mask.seqlen_q, mask.seqlen_kv) == (24, 24)
        assert mask == cls.sample(Random(seed), 24)
        if cls.unequal_lengths:
            mask = cls.sample(Random(seed), 24, 30)
            assert (mask.seqlen_q, mask.seqlen_kv) == (24, 30)


def test_samples_are_awkward() -> None:
    """Empty and one-token documents, windows beyond the sequence and of nothing, whole and no prefixes, all turn up."""
    draw = {name: [load(MASKS[name]).sample(Random(seed), 24) for seed in range(200)] for name in MASKS}
    lens = [mask.doc_lens for mask in draw["causal_document"]]
    assert any(0 in x for x in lens) and any(1 in x for x in lens) and any(len(x) == 1 for x in lens)
    windows = {mask.window for mask in draw["full_sliding_window"]}
    assert 0 in windows and 24 in windows and max(windows) > 24 and len(windows) > 8
    assert {0, 24} <= {mask.prefix for mask in draw["prefix_lm_causal"]}
    prefixes = [(p, n) for mask in draw["prefix_lm_document"] for p, n in zip(mask.prefixes, mask.doc_lens, strict=True)]
    assert any(p == n > 0 for p, n in prefixes) and any(p == 0 < n for p, n in prefixes)
    maps = [mask.expand() for mask in draw["uniform_block"] if mask.block_map.kind == "random"]
    assert any(not x.any(2).all() for x in maps) and any(not x.any(1).all() for x in maps)
    assert {mask.heads for mask in draw["variable_block"]} > {1, 2}


@pytest.mark.parametrize("name", MASKS)
def test_the_default_is_for_speed_and_seeded(name: str) -> None:
    cls = load(MASKS[name])
    mask = cls.default(8192, 5)
    assert (mask.seqlen_q, mask.seqlen_kv) == (8192, 8192)
    assert mask == cls.default(8192, 5)
    for field, value in (("window", 1024), ("num_global", 512)):
        assert getattr(mask, field, value) == value
    if name == "block_causal_document":
        assert mask.block_size == 1024 and all(n % 1024 == 0 and n <= 8192 for n in mask.doc_lens)


DOCUMENTS = [name for name in MASKS if any(field.name == "doc_lens" for field in fields(load(MASKS[name])))]


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("seqlen", [256, 512, 1023])
def test_a_short_default_has_documents_too(name: str, seqlen: int) -> None:
    for seed in range(100):
        lens = load(MASKS[name]).default(seqlen, seed).doc_lens
        assert sum(lens) == seqlen and len(lens) >= 3 and max(lens) <= seqlen // 3


@pytest.mark.parametrize("name", sorted(MASKS.keys() - {"causal", "full"}))
def test_a_default_of_the_cpu_is_neither_causal_nor_full(name: str) -> None:
    areas = [load(MASKS[name]).default(512, seed).area() for seed in range(3)]
    assert not {512 * 512, 512 * 513 // 2} & set(areas)


@pytest.mark.parametrize("name", MASKS)
def test_what_the_paper_measured_has_its_defaults(name: str) -> None:
    """From 1K tokens on: the published histograms, windows and blocks of 1024, 512 global tokens."""
    mask = load(MASKS[name]).default(1024, 3)
    recipe = getattr(getattr(mask, "doc_lens", None), "recipe", "pile:1024:s3")
    assert recipe == ("uniform1-8x1024:1024:s3" if name == "block_causal_document" else "pile:1024:s3")
    for field, value in (("window", 1024), ("num_global", 512)):
        assert getattr(mask, field, value) == value


def test_default_lengths_can_be_the_users() -> None:
    for name in ("full_document", "prefix_lm_document", "block_causal_document"):
        assert load(MASKS[name]).default(25, 0, LengthList((10,))).doc_lens == (10, 10, 5)


def test_block_defaults_take_block_size_density_heads_and_group() -> None:
    mask = load(MASKS["uniform_block"]).default(1024, 3, block_size=128, density=0.25, heads=4, group=2)
    assert mask.expand().shape == (4, 8, 8) and (mask.expand().sum(-1) == 2).all()
    mask = load(MASKS["variable_block"]).default(1000, 3, block_size=64, heads=2)
    assert isinstance(mask.block_sizes_q, Lengths) and mask.block_sizes_q != mask.block_sizes_kv
    assert mask.heads == 2 and all(32 <= n <= 64 for n in mask.block_sizes_q[:-1])


def test_a_top_k_map_has_as_many_blocks_in_each_row() -> None:
    for density, count in ((0.0, 1), (0.1, 2), (0.5, 10), (1.0, 20)):
        assert (BlockMap("topk", density, heads=3, seed=1).expand(30, 20).sum(-1) == count).all()


def test_a_random_map_has_its_density_popular_columns_and_empty_rows() -> None:
    for density in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0):
        dense = BlockMap("random", density, heads=3, seed=1).expand(50, 40)
        assert dense.sum((1, 2)).tolist() == [round(density * 2000)] * 3
    dense = BlockMap("random", 0.2, heads=8, seed=1).expand(64, 64)
    in_column = dense.sum(1)
    assert (in_column.amax(1) > 2.5 * in_column.float().mean(1)).all()
    assert (dense.sum(2) == 0).any() and (in_column == 0).any()


def test_the_heads_of_a_group_share_a_map_and_others_do_not() -> None:
    dense = BlockMap("topk", 0.5, heads=4, group=2, seed=9).expand(16, 16)
    assert torch.equal(dense[0], dense[1]) and torch.equal(dense[2], dense[3]) and not torch.equal(dense[1], dense[2])


def test_a_map_is_the_same_everywhere() -> None:
    """The bits themselves, so that another version of torch or NumPy that draws otherwise is noticed."""
    assert ExplicitMap.of(BlockMap("topk", 0.5, heads=1, seed=3).expand(3, 8)).bits == "1e4d4d"
    assert ExplicitMap.of(BlockMap("random", 0.5, heads=1, seed=3).expand(3, 8)).bits == "1e05cf"


def test_an_explicit_map_is_the_same_after_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1, 1), (2, 3, 5), (3, 8, 8), (1, 0, 4)):
        dense = torch.rand(shape, generator=generator) < 0.5
        packed = ExplicitMap.of(dense)
        assert torch.equal(packed.expand(*shape[1:]), dense) and parse_block_map(packed.token) == packed


class LiveBytes(TorchDispatchMode):
    """How many bytes of tensors made under this mode are alive, and were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor.untyped_storage())
        return out

    def track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.seen:
            self.seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key, storage.nbytes())

    def release(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_the_meter_sees_temporaries_and_their_end() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(MIB, dtype=torch.int8)
        assert int((torch.ones(3 * MIB, dtype=torch.int8) + 1).sum()) == 6 * MIB
    assert (live.peak // MIB, live.now) == (7, kept.nbytes)


def static_forms(mask: Mask) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Row intervals, and what follows from them."""
    rows = mask.row_intervals()
    assert rows is not None
    return rows, area_of(rows), columns_of(rows, mask.seqlen_kv)


def peak_bytes(mask: Mask) -> int:
    with LiveBytes() as live:
        forms = static_forms(mask)
    assert live.now >= sum(x.nbytes for x in forms if isinstance(x, torch.Tensor)), "the meter lost the results"
    return live.peak


@pytest.mark.parametrize("name", MASK_GROUPS["static"])
def test_forms_of_a_512k_mask_take_at_most_100_ms_and_64_mib(name: str, one_core: None) -> None:
    mask = load(MASKS[name]).default(512 * 1024)
    assert peak_bytes(mask) <= 64 * MIB
    rows, area, columns = static_forms(mask)
    assert len(rows) and columns is not None and area > 0
    taken_ms, limit_ms = over_quiet_ms(lambda: static_forms(mask), 100)
    assert taken_ms <= limit_ms


class HandledBytes(TorchDispatchMode):
    """How many bytes operations read and write, each operand and each result once; a view handles none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if not is_view:
            self.total += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out


HANDLED = {
    "full": 448, "causal": 1368, "full_sliding_window": 1953, "causal_sliding_window": 1950, "full_document": 945,
    "causal_document": 1516, "shared_question": 2047, "global_sliding_window": 2486, "causal_blockwise": 1516, "prefix_lm_causal": 676,
    "prefix_lm_document": 1212, "block_causal_document": 1743,
}  # fmt: skip
"""Bytes for each token that the operations of a mask's forms handle: what they take is in proportion."""


@pytest.mark.parametrize("name", MASK_GROUPS["static"])
def test_forms_of_a_512k_mask_handle_no_more_than_they_did(name: str) -> None:
    """A form that does its work twice is seen on any machine, whether or not it still fits into 100 ms."""
    mask = load(MASKS[name]).default(512 * 1024)
    with HandledBytes() as handled:
        static_forms(mask)
    assert handled.total <= 1.25 * HANDLED[name] * 512 * 1024


@pytest.mark.parametrize("name", MASK_GROUPS["static"])
def test_forms_grow_with_the_length_not_its_square(name: str) -> None:
    cls = load(MASKS[name])
    small, large = (peak_bytes(cls.default(seqlen)) for seqlen in (8 * 1024, 512 * 1024))
    assert large <= 64 * small


def test_the_largest_block_map_expands_to_one_byte_a_block() -> None:
    """64 heads of 2048 x 2048 blocks would be 256 MiB of map; 2 heads must hold little more than their own and one head's ranks."""
    mask = load(MASKS["uniform_block"]).default(128 * 1024, heads=2)
    with LiveBytes() as live:
        dense = mask.expand()
    assert dense.shape == (2, 2048, 2048) and mask.family is Family.BLOCK
    assert live.peak <= 2 * 2048**2 + 3 * 8 * 2048**2 + MIB
