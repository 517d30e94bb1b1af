"""Drawn cases: awkward where it matters, always possible, plain when shrunk."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.catalogue import MASKS
from pytest_longca.errors import InvalidArgument
from pytest_longca.ids import parse_case
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.kernels.flashinfer import FlashInfer
from pytest_longca.kernels.flashmask import FlashMask
from pytest_longca.kernels.naive import Naive
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Form
from pytest_longca.strategies import (
    COMPILED_CASES,
    COMPILED_LENGTHS,
    INTERPRETED_SCORES,
    LONG_SCORES,
    ORDINARY_LENGTH,
    SCORES,
    TILE_EDGES,
    cases,
    probe_cases,
)
from pytest_longca.warming import compiled_alike

MANY = settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def drawn(strategy: st.SearchStrategy[Case], number: int = 150) -> list[Case]:
    found: list[Case] = []

    @settings(MANY, max_examples=number, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def scores(case: Case) -> int:
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv


class Narrow(Naive):
    """A kernel with the limits of the narrowest hardware kernels."""

    name = "narrow"
    capabilities = Capabilities(dtypes=frozenset({"bf16"}), head_dims=(64, 128), gqa=False, unequal_head_dims=False, backward=False)

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        is_odd = case.layouts != (Layout.CONTIGUOUS,) * 4 or case.scale != case.head_dim**-0.5
        return "contiguous operands and the usual scale only" if is_odd else None


class Blocky(Narrow):
    """One block size only, and a map for each query head."""

    capabilities = Capabilities(masks=frozenset({Form.BLOCK_MAP}), dtypes=frozenset({"bf16"}), head_dims=(64, 128))

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        return None if getattr(case.mask, "block_size", 0) == 128 else "blocks of 128 only"


@given(cases())
@MANY
def test_every_drawn_case_is_affordable_and_its_id_reads_back(case: Case) -> None:
    is_long = max(case.seqlen_q, case.seqlen_kv) > ORDINARY_LENGTH
    assert scores(case) <= (LONG_SCORES if is_long else max(SCORES, case.batch * case.heads_q * 8 * 8)) or case.mask.heads > 1
    assert parse_case(case.id) == case


@pytest.mark.parametrize("mask", [name for name in MASKS if not name.endswith("_block")])
@pytest.mark.parametrize("kernel", [Naive(), Narrow()], ids=lambda kernel: kernel.name)
def test_only_what_the_kernel_supports_is_drawn(kernel: Kernel, mask: str) -> None:
    found = drawn(cases([mask], kernel), 40)
    assert len(found) == 40
    assert all(kernel.supports(case, CPU) is None for case in found)


def test_a_kernel_for_one_block_size_gets_masks_of_that_size() -> None:
    found = drawn(cases(["uniform_block"], Blocky()), 30)
    assert {getattr(case.mask, "block_size") for case in found} == {128}  # noqa: B009  # a field of this mask kind alone
    assert probe_cases("uniform_block", Blocky())


def test_every_awkward_thing_is_drawn() -> None:
    found = drawn(cases(["causal_document", "full_document"]), 400)
    wanted: dict[str, Callable[[Case], bool]] = {
        "empty document": lambda case: 0 in case.mask.doc_lens,  # type: ignore[attr-defined]  # documents
        "one-token document": lambda case: 1 in case.mask.doc_lens,  # type: ignore[attr-defined]
        "unequal lengths": lambda case: case.seqlen_q != case.seqlen_kv,
        "a length at a tile edge": lambda case: case.seqlen_q in TILE_EDGES,
        "rows that see nothing": lambda case: bool((~case.mask.dense().any(-1)).any()),
        "more documents than a warp has threads": lambda case: len(case.mask.doc_lens) > 32,  # type: ignore[attr-defined]
        "a document of whole tiles": lambda case: any(n and n % 64 == 0 for n in case.mask.doc_lens[:-1]),  # type: ignore[attr-defined]
        "four tiles of 128": lambda case: case.seqlen_q > 384,
        "few queries and many keys": lambda case: case.seqlen_q <= 16 and case.seqlen_kv > 512,
        "five tiles of 64 in several heads": lambda case: case.seqlen_kv > 256 and case.heads_kv > 1,
        "five tiles of 64 in several batch elements": lambda case: case.seqlen_kv > 256 and case.batch > 1,
        "three tiles of queries in several batch elements": lambda case: case.seqlen_q > 160 and case.batch > 1,
        "two tiles of 128 and a group of 8": lambda case: case.seqlen_q > 128 and case.group == 8,
        "few queries, many keys and a group": lambda case: case.seqlen_q <= 16 and case.seqlen_kv > 512 and case.group > 2,
        "what models have": lambda case: case.head_dim == case.head_dim_v == 128 and case.dtype == "bf16" and case.group >= 4,
        "32 query heads": lambda case: case.heads_q == 32,
        "a large head_dim": lambda case: case.head_dim == 256,
        "no scale": lambda case: case.scale == 1.0,
        "a scale above 1": lambda case: case.scale > 1,
        "group 7": lambda case: case.group == 7,
        "group unequal heads_kv": lambda case: case.group == 3 and case.heads_kv == 2,
        "odd multiple of 8": lambda case: case.head_dim % 16 == 8,
        "unequal head dims": lambda case: case.head_dim_v != case.head_dim,
        "batch": lambda case: case.batch == 3,
        "four layouts apart": lambda case: len(set(case.layouts)) == 4,
        "custom scale": lambda case: case.scale == 0.37,
        **{f"dtype {dtype}": lambda case, dtype=dtype: case.dtype == dtype for dtype in ("fp32", "bf16", "fp16")},  # type: ignore[misc]  # default argument
        **{f"values {values}": lambda case, values=values: case.values is values for values in Values},  # type: ignore[misc]
        **{f"layout {layout}": lambda case, layout=layout: layout in case.layouts for layout in Layout},  # type: ignore[misc]
    }
    assert [what for what, is_it in wanted.items() if not any(map(is_it, found))] == []


def test_examples_are_no_near_copies_of_each_other() -> None:
    found = drawn(cases(["causal"], Naive()), 50)
    assert len(set(found)) >= 45
    assert len({(case.seqlen_q, case.seqlen_kv) for case in found}) >= 30
    assert sum(case.seqlen_q * case.seqlen_kv <= 1 for case in found) <= 8


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda case: case.seqlen_q > 16, lambda case: case.seqlen_q == 17),
        (lambda case: case.group > 1 and case.seqlen_q > 2, lambda case: (case.group, case.heads_kv, case.seqlen_q) == (2, 1, 3)),
        (lambda case: 1 in case.mask.doc_lens, lambda case: case.seqlen_q == 1),
        (lambda case: len(case.mask.doc_lens) > 1 and case.mask.doc_lens[-1] > 2, lambda case: case.seqlen_q == 3),
    ],
)
def test_cases_shrink_to_few_heads_short_lengths_and_plain_operands(
    fails: Callable[[Case], bool], smallest: Callable[[Case], bool]
) -> None:
    case = find(cases(["causal_document"], Naive()), fails, settings=settings(MANY, max_examples=2000))
    assert smallest(case), case.id
    assert (case.batch, case.dtype, case.values, case.layouts, case.seed) == (1, "fp32", Values.NORMAL, (Layout.CONTIGUOUS,) * 4, 0)


def test_a_kernel_that_compiles_for_each_shape_gets_few_lengths_on_a_gpu() -> None:
    class Compiled(Naive):
        compiles_per_shape = True

    examples = drawn(cases(["causal"], Compiled(), H200), 60)
    assert {case.seqlen_q for case in examples} <= set(COMPILED_LENGTHS)
    assert 3 <= len({compiled_alike(case) for case in examples}) <= COMPILED_CASES < len(set(examples))
    assert len({case.seqlen_q for case in drawn(cases(["causal"], Compiled(), CPU), 60)}) > 10
    assert {case.seqlen_q for case in probe_cases("causal", Compiled(), H200)} <= set(COMPILED_LENGTHS)


class PerHeadDim(Naive):
    name = "per_head_dim"
    compiles_per_head_dim = True


def codes(cases: list[Case]) -> set[tuple[object, ...]]:
    """What such a kernel compiles for, but for the mask."""
    return {(case.dtype, case.group, case.head_dim, case.head_dim_v) for case in cases}


@pytest.mark.parametrize("mask", ["causal", "prefix_lm_causal", "full_document"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_kernel_that_compiles_for_each_head_dim_gets_few_on_a_gpu(mask: str, seed: int) -> None:
    found = drawn(cases([mask], PerHeadDim(), H200, seed=seed), 210)
    assert len(codes(found)) == 4
    assert {64, 128} < {case.head_dim for case in found} and len({case.head_dim for case in found}) == 4
    unequal = {case.head_dim for case in found if case.head_dim_v != case.head_dim}
    assert len(unequal) == 1 and unequal.isdisjoint({64, 128})
    assert len({case.dtype for case in found}) == 3 and len({case.group for case in found}) >= 2
    assert len({case.seqlen_q for case in found}) > 40 and max(case.seqlen_q for case in found) > ORDINARY_LENGTH


@pytest.mark.parametrize("mask", ["uniform_block", "variable_block"])
def test_flashinfer_whose_every_head_dim_and_dtype_takes_nvcc_a_minute_has_few(mask: str) -> None:
    found = drawn(cases([mask], FlashInfer(), H200), 100)
    assert {case.head_dim for case in found} == {64, 128, 256} and len({(case.head_dim, case.dtype) for case in found}) <= 4


def test_masks_and_seeds_have_other_head_dims_and_a_cpu_has_all() -> None:
    def of(mask: str, seed: int, machine: Machine = H200) -> frozenset[int]:
        return frozenset(case.head_dim for case in drawn(cases([mask], PerHeadDim(), machine, seed=seed), 60))

    assert len({of(mask, seed) for mask in ("full", "causal", "full_document") for seed in range(3)}) >= 6
    assert of("causal", 5) == of("causal", 5)
    assert len(of("causal", 0, CPU)) > 8


def test_what_fails_with_one_of_few_head_dims_shrinks_within_them() -> None:
    strategy = cases(["causal"], PerHeadDim(), H200, seed=3)
    others = {case.head_dim for case in drawn(strategy)} - {64, 128}
    case = find(strategy, lambda case: case.seqlen_q > 16, settings=settings(MANY, max_examples=2000))
    assert (case.seqlen_q, case.head_dim_v, case.group, case.dtype) == (17, case.head_dim, 1, "fp32") and case.head_dim in (64, 128)
    assert case.layouts == (Layout.CONTIGUOUS,) * 4
    case = find(strategy, lambda case: case.head_dim in others and case.seqlen_q > 16, settings=settings(MANY, max_examples=2000))
    assert (case.seqlen_q, case.batch) == (17, 1) and case.head_dim in others


@pytest.mark.parametrize("seed", [0, 7])
def test_a_run_over_all_masks_has_what_few_head_dims_lack_on_one(seed: int) -> None:
    static = [name for name in MASKS if not name.endswith("_block")]
    found = [case for mask in static for case in drawn(cases([mask], FlashMask(), H200, dtypes=("bf16", "fp16"), seed=seed), 40)]
    usual = [case for case in found if case.head_dim in (64, 128)]
    assert len({(case.dtype, case.head_dim) for case in usual}) == 4
    assert len({(case.group > 1, case.head_dim) for case in usual}) == 4
    assert len({(case.group > 1, case.dtype) for case in usual}) == 4
    assert {case.group for case in found} == {1, 2, 3, 4, 7, 8}
    assert {case.head_dim % 16 for case in found} == {0, 8} and len({case.head_dim for case in found}) >= 8
    assert {case.head_dim_v < case.head_dim for case in found if case.head_dim_v != case.head_dim} == {True, False}


def test_an_interpreted_kernel_gets_small_cases_on_a_cpu() -> None:
    class Interpreted(Naive):
        is_triton = True

    assert max(map(scores, drawn(cases(["causal"], Interpreted(), CPU), 100))) <= INTERPRETED_SCORES


@pytest.mark.parametrize("mask", MASKS)
def test_probe_cases_cover_every_length_and_both_forms_of_grouping(mask: str) -> None:
    found = probe_cases(mask, Naive())
    assert {case.seqlen_q for case in found} >= set(range(12, 21))
    assert all(case.batch > 1 for case in found)
    assert probe_cases(mask, Naive()) == found
    if found[0].mask.unequal_lengths:
        assert any(case.seqlen_q != case.seqlen_kv for case in found)


def test_a_forward_only_kernel_gets_forward_cases() -> None:
    assert {case.direction for case in drawn(cases(["full"], Narrow()), 20) + probe_cases("full", Narrow())} == {Direction.FWD}


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'causal'"):
        cases(["casual"])
    with pytest.raises(InvalidArgument, match="max_seqlen is 0: it must be at least 1"):
        cases(max_seqlen=0)
    with pytest.raises(InvalidArgument, match="no dtype is left to draw: kernel narrow takes none of fp32"):
        cases(kernel=Narrow(), dtypes=["fp32"])
