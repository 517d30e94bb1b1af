"""The reference against float64 loops, in one tile and in many, in fp64 and in halves."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pytest_longca import arithmetic, sweep
from pytest_longca.arithmetic import Arithmetic, Exact, Split, halves
from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.catalogue import MASKS, load
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.mask import Mask, PredicateMask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalDocument, SharedQuestion
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full
from pytest_longca.masks.window import GlobalSlidingWindow
from pytest_longca.reference import Reference, cached_reference, compute, forget_references, halves_suffice
from pytest_longca.sweep import budget_of
from tests.unit.dispatched import Dispatched

TENSORS = ("out", "dq", "dk", "dv")
TRUTH = json.loads((Path(__file__).parents[1] / "data" / "attention.json").read_text())["cases"]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few hundred tokens have many of them, in several pieces."""
    monkeypatch.setattr(sweep, "SMALL_CELLS", 0)
    monkeypatch.setattr(sweep, "SHARED_CPU", sweep.Budget(8, 4, 16))
    monkeypatch.setattr(sweep, "PER_HEAD_CPU", sweep.Budget(8, 4, 16))


def truth_mask(entry: dict) -> Mask:
    """The mask of a truth case: its class takes those of the params that are its fields."""
    mask_class = load(MASKS[entry["mask"]])
    params = {"doc_lens" if name == "doc_lens_q" else name: frozen(value) for name, value in entry["params"].items()}
    if entry["mask"] == "uniform_block":
        lengths = {side: sum(params[f"block_sizes_{side}"]) for side in ("q", "kv")}
        params |= {"seqlen_q": lengths["q"], "seqlen_kv": lengths["kv"], "block_size": params["block_sizes_q"][0]}
    names = {field.name for field in dataclasses.fields(mask_class)}
    return mask_class(**{name: value for name, value in params.items() if name in names})


def frozen(value: object) -> object:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def truth_case(entry: dict) -> tuple[Case, Inputs]:
    operands = {name: torch.tensor(entry[name], dtype=torch.float64)[None] for name in ("q", "k", "v", "do")}
    (_, _, heads_q, head_dim), (_, _, heads_kv, head_dim_v) = operands["q"].shape, operands["v"].shape
    sizes = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return Case(mask=truth_mask(entry), dtype="fp64", scale=entry["scale"], **sizes), Inputs(**operands)


def numbers(nested: object) -> Tensor:
    """Nested lists of numbers and of "-inf" as a tensor."""
    return torch.tensor(nested_floats(nested), dtype=torch.float64)


def nested_floats(nested: object) -> object:
    return [nested_floats(item) for item in nested] if isinstance(nested, list) else float(nested)


def assert_is_truth(entry: dict) -> None:
    case, inputs = truth_case(entry)
    reference = compute(case, inputs)
    for name in (*TENSORS, "lse"):
        torch.testing.assert_close(getattr(reference, name), numbers(entry[name])[None], rtol=0, atol=2e-9)


all_truth = pytest.mark.parametrize("entry", TRUTH, ids=[f"{entry['mask']}-{entry['scale']}" for entry in TRUTH])


@all_truth
def test_reference_agrees_with_plain_float64_loops(entry: dict) -> None:
    assert_is_truth(entry)


@all_truth
def test_reference_in_small_tiles_agrees_with_plain_float64_loops(entry: dict, small_tiles: None) -> None:
    assert_is_truth(entry)


def random_blocks(heads: int, blocks: int) -> UniformBlock:
    block_map = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(1)) < 0.3
    return UniformBlock(blocks * 8, blocks * 8, 8, block_map)


def scattered_blocks(heads: int, blocks: int) -> UniformBlock:
    """Every third block of keys, most heads each: too scattered for ranges of keys."""
    chosen = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(2)) < 0.7
    return UniformBlock(blocks * 8, blocks * 8, 8, chosen & (torch.arange(blocks) % 3 == 0))


AWKWARD = [
    Causal(77, 93),
    CausalSlidingWindow(90, 90, 7),
    GlobalSlidingWindow(70, 70, 5, 3),
    SharedQuestion((13, 0, 31, 26)),
    CausalDocument((5, 0, 40, 1, 33)),
    PredicateMask(lambda b, h, q, kv: (q * 7 + kv * 3) % 5 == 0, 60, 52),
    PredicateMask(lambda b, h, q, kv: (q + kv + b) % 3 != 0, 61, 61, num_batches=2),
    PredicateMask(lambda b, h, q, kv: (kv % 6 == h) & (kv <= q + b), 64, 64, num_batches=2, num_heads=6),
    random_blocks(6, 9),
    scattered_blocks(6, 20),
]


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.EXPANDED])
@pytest.mark.parametrize("mask", AWKWARD, ids=lambda mask: mask.name)
def test_reference_and_its_bounds_do_not_depend_on_the_tiles(mask: Mask, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch": 2, "heads_q": 6, "heads_kv": 2, "head_dim": 8, "head_dim_v": 12}
    case = Case(mask=mask, dtype="fp16", values=Values.BIASED, layouts=(layout,) * 4, **sizes)
    inputs = make_inputs(case)
    whole = compute(case, inputs)
    monkeypatch.setattr(sweep, "SMALL_CELLS", 0)
    monkeypatch.setattr(sweep, "SHARED_CPU", sweep.Budget(16, 4, 12))
    monkeypatch.setattr(sweep, "PER_HEAD_CPU", sweep.Budget(8, 4, 12))
    tiled = compute(case, inputs)
    for one, two in zip(whole.tensors(), tiled.tensors(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.7, -0.7])
def test_reference_is_what_autograd_finds(scale: float) -> None:
    case = Case(mask=Causal(50, 61), batch=2, heads_q=4, heads_kv=2, head_dim=8, dtype="fp64", scale=scale, layouts=(Layout.BHSD,) * 4)
    inputs = make_inputs(case)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = (q @ k.repeat_interleave(2, 1).mT * scale).masked_fill(~case.mask.dense(), -math.inf)
    out = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    reference = compute(case, inputs)
    expected = (out, *torch.autograd.grad(out, leaves, inputs.do))
    for name, value in zip(TENSORS, expected, strict=True):
        torch.testing.assert_close(getattr(reference, name), value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(reference.lse, scores.logsumexp(-1))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_sequence_has_an_empty_or_zero_reference(shape: tuple[int, int]) -> None:
    case = Case(mask=Full(*shape), heads_q=4, heads_kv=2, head_dim=8)
    reference = compute(case, make_inputs(case))
    assert reference.out.shape == (1, shape[0], 4, 8) and not reference.out.any()
    assert reference.lse.shape == (1, 4, shape[0]) and bool((reference.lse == -math.inf).all())
    assert reference.dk is not None and reference.dk.shape == (1, shape[1], 2, 8) and not reference.dk.any()


@pytest.mark.parametrize("arithmetic", [Exact(), Split(False)], ids=["exact", "split"])
def test_rows_that_see_no_key_leave_every_limit_a_number(arithmetic: Arithmetic) -> None:
    case = Case(mask=Causal(40, 9), heads_q=2, head_dim=16, dtype="bf16")
    reference = compute(case, make_inputs(case), arithmetic)
    assert all(bool(x.isfinite().all()) for bound in reference.bounds.values() for x in bound.tensors())


def test_forward_only_cases_have_no_gradients() -> None:
    case = Case(mask=Full(5, 5), head_dim=8, direction=Direction.FWD)
    reference = compute(case, make_inputs(case))
    assert reference.dq is None and set(reference.bounds) == {"out", "lse"}


def test_halves_carry_sixteen_bits() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-20, 20).repeat(250)
    high, low = halves(x)
    assert float(((high.float() + low.float() - x).abs() / x.abs()).max()) < 2**-16
    assert float((high.float() - x).abs().div(x.abs()).max()) > 2**-10  # the low half is needed


def error_of_scale(reference: Reference, truth: Reference, name: str) -> float:
    """The largest row error, as a fraction of the row's sum of absolute terms."""
    error = torch.linalg.vector_norm(getattr(reference, name).double() - getattr(truth, name), dim=-1)
    return float((error / truth.bounds[name].scale).nan_to_num().max())


def truth_and_halves(values: Values, dtype: str, low: Arithmetic, layout: Layout = Layout.CONTIGUOUS) -> tuple[Reference, Reference]:
    case = Case(mask=Causal(512, 512), heads_q=4, heads_kv=2, head_dim=64, dtype=dtype, values=values, layouts=(layout,) * 4)
    inputs = make_inputs(case)
    return compute(case, inputs, Exact()), compute(case, inputs, low)


OPERANDS = [(Values.NORMAL, Layout.CONTIGUOUS), (Values.BIASED, Layout.EXPANDED), (Values.LARGE, Layout.CONTIGUOUS)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("values", "layout"), OPERANDS)
def test_halves_are_within_2e_5_of_fp64(
    values: Values, layout: Layout, dtype: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SHARED_CPU", sweep.Budget(128, 64, 256))
    truth, found = truth_and_halves(values, dtype, Split(), layout)
    for name in TENSORS:
        assert error_of_scale(found, truth, name) < 2e-5
        bound, true_bound = found.bounds[name], truth.bounds[name]
        for field in ("scale", "spread", "along"):
            torch.testing.assert_close(getattr(bound, field).double(), getattr(true_bound, field), rtol=0.03, atol=1e-6)
    torch.testing.assert_close(found.lse.double(), truth.lse, rtol=3e-6, atol=3e-6)


SUFFICE = [(Values.NORMAL, True), (Values.LARGE, True), (Values.PEAKED, False), (Values.SENTINEL, False)]


@pytest.mark.parametrize(("values", "suffice"), SUFFICE)
def test_halves_are_refused_where_fp32_scores_are_too_coarse(values: Values, suffice: bool) -> None:
    case = Case(mask=Causal(512, 512), heads_q=2, heads_kv=2, head_dim=128, dtype="bf16", values=values)
    assert halves_suffice(case, make_inputs(case)) is suffice


def test_a_tile_is_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sparse mask they are most of the time on a GPU, whose products need no casts: there they are 46 fewer."""
    monkeypatch.setattr(sweep, "SMALL_CELLS", 0)
    monkeypatch.setattr(sweep, "SHARED_CPU", sweep.Budget(32, 16, 64))
    counts = []
    for documents in (1, 5):  # of one tile each
        case = Case(mask=CausalDocument((32,) * documents), heads_q=4, heads_kv=2, head_dim=16, dtype="bf16")
        inputs = make_inputs(case)
        with Dispatched() as calls:
            compute(case, inputs, Split(False))
        counts.append(calls.count.total())
    of_a_tile = (counts[1] - counts[0]) / 4
    assert of_a_tile <= 380, f"{of_a_tile} operations"


class HighHalvesOnly(Split):
    """The fault that compiling a naive split makes: the low halves are lost."""

    def product(self, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
        return self.bound(a[0], b[0])


def test_losing_the_low_halves_is_seen() -> None:
    truth, found = truth_and_halves(Values.NORMAL, "bf16", HighHalvesOnly())
    assert all(error_of_scale(found, truth, name) > 2e-5 for name in TENSORS)


def test_references_are_kept_for_the_next_kernel_and_freed_beyond_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_references()
    first, second, third = (Case(mask=Full(8, 8), head_dim=8, seed=seed) for seed in (1, 2, 3))
    one = cached_reference(first, make_inputs(first))
    assert cached_reference(first, make_inputs(first)) is one
    monkeypatch.setattr("pytest_longca.reference.CACHED_BYTES", one.num_bytes - 1)
    two = cached_reference(second, make_inputs(second))
    for _ in range(3):  # before and after each kernel's timing
        assert cached_reference(first, make_inputs(first)) is one
        assert cached_reference(second, make_inputs(second)) is two
    cached_reference(third, make_inputs(third))
    assert cached_reference(first, make_inputs(first)) is not one
    forget_references()


def test_a_reference_with_gradients_serves_every_pass_and_one_without_serves_the_forward() -> None:
    forget_references()
    forward, backward, both = (Case(mask=Full(8, 8), head_dim=8, direction=direction) for direction in Direction)
    assert cached_reference(forward, make_inputs(forward)).dq is None
    one = cached_reference(backward, make_inputs(backward))
    assert one.dq is not None
    assert cached_reference(both, make_inputs(both)) is one
    assert cached_reference(forward, make_inputs(forward)) is one
    forget_references()


@pytest.mark.parametrize(("batch", "terms", "transposed"), [(1, 40, False), (1, 43, True), (3, 40, True), (3, 40, False), (2, 7, True)])
def test_long_sums_are_taken_in_sections(monkeypatch: pytest.MonkeyPatch, batch: int, terms: int, transposed: bool) -> None:
    monkeypatch.setattr(arithmetic, "SECTION", 8)
    summed: list[int] = []
    monkeypatch.setattr(arithmetic, "_bmm", lambda a, b: summed.append(a.shape[2]) or torch.bmm(a, b))
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(batch, terms, 5, generator=generator).mT if transposed else torch.randn(batch, 5, terms, generator=generator)
    b = torch.randn(batch, terms, 3, generator=generator)
    torch.testing.assert_close(Split().product((a,), (b,)), a @ b)
    assert max(summed) == (40 if batch > 1 and not transposed else min(8, terms)), "what would be copied is summed at once"


def test_tile_of_one_stack_keeps_a_gpu_as_busy_as_one_of_many() -> None:
    one = Case(mask=Causal(8192, 65536), heads_q=8, heads_kv=1, head_dim=128, dtype="bf16")
    many = dataclasses.replace(one, heads_q=64, heads_kv=8)
    budgets = [budget_of(case, torch.device("cuda")) for case in (one, many)]
    assert len({case.heads_q * budget.rows * budget.keys for case, budget in zip((one, many), budgets, strict=True)}) == 1
    assert all(budget.keys % budget.granule == 0 for budget in budgets)
