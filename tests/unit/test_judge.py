"""The judge: honest kernels stay below their limits, and each kind of fault is seen and named."""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pytest_longca import judge as judging
from pytest_longca.case import Case, Direction, Values
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.judge import Result, Verdict, judge
from pytest_longca.kernel import SUMS_IN_DTYPE, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.limits import Bound
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.masks.window import GlobalSlidingWindow
from pytest_longca.reference import Reference, compute
from tests.unit.dispatched import Dispatched

MASKS = [Causal(150, 150), Full(90, 103), GlobalSlidingWindow(133, 133, 5, 4)]
DTYPES = ["fp32", "bf16", "fp16"]


def run(kernel: Kernel, case: Case, inputs: Inputs) -> Result:
    call = kernel.bind(case, inputs)
    out, lse = call.forward()
    dq, dk, dv = call.backward(inputs.do)
    return Result(out.detach(), None if lse is None else lse.detach(), dq, dk, dv, sums_in_dtype=SUMS_IN_DTYPE in call.facts)


def verdicts_of(kernel: Kernel, case: Case) -> dict[str, Verdict]:
    inputs = make_inputs(case)
    return {verdict.tensor: verdict for verdict in judge(case, inputs, compute(case, inputs), run(kernel, case, inputs))}


@pytest.mark.parametrize("kernel", [Naive(), Sdpa()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("values", list(Values))
@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_kernels_pass(kernel: Kernel, values: Values, dtype: str) -> None:
    for mask in MASKS:
        case = Case(mask=mask, heads_q=6, heads_kv=2, head_dim=32, dtype=dtype, values=values, seed=3)
        wrong = [verdict.message for verdict in verdicts_of(kernel, case).values() if not verdict.ok]
        assert not wrong


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (7, 1)]),
    head_dims=st.tuples(st.sampled_from([8, 16, 40]), st.sampled_from([8, 24])),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(list(Values)),
    scale=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 1000),
)
def test_naive_passes_on_small_cases(
    lengths: tuple[int, int], heads: tuple[int, int], head_dims: tuple[int, int], dtype: str, values: Values, scale: float, seed: int
) -> None:
    sizes = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    case = Case(mask=Causal(*lengths), dtype=dtype, values=values, seed=seed, scale=scale, **sizes)
    wrong = [f"{verdict.tensor}: {verdict.message}" for verdict in verdicts_of(Naive(), case).values() if not verdict.ok]
    assert not wrong


@pytest.mark.parametrize("direction", [Direction.FWD, Direction.FWD_BWD])
@pytest.mark.parametrize("lengths", [(0, 9), (150, 141)])
@pytest.mark.parametrize("spoiled", [False, True])
def test_tensors_measured_together_have_the_verdicts_that_each_has_alone(
    lengths: tuple[int, int], direction: Direction, spoiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mask=Causal(*lengths), batch=2, heads_q=6, heads_kv=2, head_dim=40, head_dim_v=24, dtype="bf16")
    inputs = make_inputs(case)
    result = run(Naive(), dataclasses.replace(case, scale=0.2) if spoiled else case, inputs)
    reference = compute(dataclasses.replace(case, direction=direction), inputs)  # without a backward, nothing is held against gradients
    together = judge(case, inputs, reference, result)
    monkeypatch.setattr(judging, "ROWS_AT_ONCE", -1)
    alone = judge(case, inputs, reference, result)
    assert [verdict.tensor for verdict in together] == [verdict.tensor for verdict in alone]
    for one, other in zip(together, alone, strict=True):
        assert (one.ok, one.message, one.place) == (other.ok, other.message, other.place)
        assert one.stats == pytest.approx(other.stats, rel=1e-13)


def test_sums_in_bf16_are_allowed_only_to_kernels_that_declare_them() -> None:
    case = Case(mask=Full(736, 736), heads_q=8, heads_kv=1, head_dim=32, dtype="bf16")
    inputs = make_inputs(case)
    reference, result = compute(case, inputs), run(Sdpa(), case, inputs)
    assert result.sums_in_dtype and all(verdict.ok for verdict in judge(case, inputs, reference, result))
    undeclared = judge(case, inputs, reference, dataclasses.replace(result, sums_in_dtype=False))
    assert {"dk", "dv"} <= {verdict.tensor for verdict in undeclared if not verdict.ok}


def sloppy(case: Case, inputs: Inputs) -> Result:
    """Everything in the inputs' dtype: scores, softmax and all sums' results."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scores = (q @ k.mT * case.scale).masked_fill(~case.mask.dense(), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return Result(out.detach(), None, *torch.autograd.grad(out, leaves, inputs.do))


@pytest.mark.parametrize("values", [Values.NORMAL, Values.BIASED, Values.PEAKED])
def test_scores_and_softmax_in_bf16_are_too_coarse(values: Values) -> None:
    case = Case(mask=Causal(600, 600), heads_q=4, heads_kv=4, head_dim=64, dtype="bf16", values=values)
    inputs = make_inputs(case)
    verdicts = judge(case, inputs, compute(case, inputs), sloppy(case, inputs))
    assert "dv" in {verdict.tensor for verdict in verdicts if not verdict.ok}


class Bench:
    """An honest result in bf16 that a test spoils."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs = make_inputs(case)
        self.reference: Reference = compute(case, self.inputs)
        self.result = run(Naive(), case, self.inputs)

    def spoiled(self, **changes: Callable[[Tensor], Tensor]) -> dict[str, Verdict]:
        tensors = {name: getattr(self.result, name).clone() for name in ("out", "lse", "dq", "dk", "dv")}
        for name, change in changes.items():
            tensors[name] = change(tensors[name])
        return {verdict.tensor: verdict for verdict in judge(self.case, self.inputs, self.reference, Result(**tensors))}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Case(mask=Causal(300, 300), batch=2, heads_q=8, heads_kv=2, head_dim=64, dtype="bf16"))


def in_place(function: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        function(x)
        return x

    return change


def names_of_wrong(verdicts: dict[str, Verdict]) -> list[str]:
    return [name for name, verdict in verdicts.items() if not verdict.ok]


def test_a_key_whose_dk_is_one_percent_too_large_is_seen(bench: Bench) -> None:
    keys = [10, 40, 77, 150, 222, 280, 295]
    seen = [not bench.spoiled(dk=in_place(lambda x, key=key: x[0, key, 1].mul_(1.01)))["dk"].ok for key in keys]
    assert all(seen)


def test_a_head_that_is_half_a_percent_too_large_is_seen(bench: Bench) -> None:
    for name in ("out", "dq", "dk", "dv"):
        verdicts = bench.spoiled(**{name: in_place(lambda x: x[:, :, 1].copy_(x[:, :, 1].float() * 1.005))})
        assert names_of_wrong(verdicts) == [name]
        assert "head" in verdicts[name].message


def test_a_factor_of_some_heads_is_told_of_these_heads_alone(bench: Bench) -> None:
    verdict = bench.spoiled(dk=in_place(lambda x: x[:, :, 1].copy_(x[:, :, 1].float() * 1.25)))["dk"]
    assert "only head 1 of 2; all of what is wrong there is 1.25 times what it should be" in verdict.message


def test_noise_of_three_roundings_in_a_tile_is_seen(bench: Bench) -> None:
    reference = bench.reference.out[1, 128:256, 3]
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0)) * reference.abs() * 0.012
    verdict = bench.spoiled(out=in_place(lambda x: x[1, 128:256, 3].add_(noise)))["out"]
    assert not verdict.ok and verdict.place is not None
    assert (verdict.place.batch, verdict.place.head) == (1, 3) and verdict.place.tiles_128 == (1,)


def test_nan_is_never_equal_and_infinity_is_named(bench: Bench) -> None:
    verdicts = bench.spoiled(dv=in_place(lambda x: x[1, 7, 1, 3].fill_(math.nan)), lse=in_place(lambda x: x[0, 2, 5].fill_(math.inf)))
    assert verdicts["dv"].error_over_limit == verdicts["lse"].error_over_limit == math.inf
    assert "batch 1, head 1, row 7, column 3" in verdicts["dv"].message and "NaN" in verdicts["dv"].message
    assert "batch 0, head 2, row 5" in verdicts["lse"].message and "inf" in verdicts["lse"].message


def test_an_error_without_a_limit_that_is_a_number_does_not_pass(bench: Bench) -> None:
    unknown = Bound(*(torch.full_like(x, math.nan) for x in bench.reference.bounds["dk"].tensors()))
    without = dataclasses.replace(bench.reference, bounds={**bench.reference.bounds, "dk": unknown})
    assert [verdict.tensor for verdict in judge(bench.case, bench.inputs, without, bench.result) if not verdict.ok] == ["dk"]


def test_a_right_result_is_judged_in_few_operations_and_one_copy_to_the_host(bench: Bench) -> None:
    with Dispatched() as calls:
        judge(bench.case, bench.inputs, bench.reference, bench.result)
    assert not calls.count["aten._local_scalar_dense.default"], "each asks the device apart"
    assert calls.count.total() <= 350, str(calls)


def test_a_wrong_form_is_an_error_of_its_own(bench: Bench) -> None:
    verdicts = bench.spoiled(out=Tensor.float, dq=lambda x: x.transpose(1, 2), lse=lambda x: x.bfloat16())
    assert verdicts["out"].message.startswith("dtype torch.float32")
    assert verdicts["dq"].message.startswith("shape (2, 8, 300, 64)")
    assert names_of_wrong(verdicts) == ["out", "lse", "dq"]


def test_a_verdict_is_json(bench: Bench) -> None:
    verdict = bench.spoiled(dk=in_place(lambda x: x[0, 3].zero_()))["dk"]
    assert json.loads(json.dumps(verdict.to_json()))["place"]["row"] == 3


EMPTY = Case(mask=Causal(20, 12), heads_q=2, heads_kv=2, head_dim=16)


@pytest.mark.parametrize(("name", "head_axis_first", "value", "text"), [
    ("out", False, 1e-30, "is not 0"),
    ("out", False, math.nan, "NaN"),
    ("dq", False, 1e-20, "is not 0"),
    ("lse", True, math.inf, "this backend gives inf"),
    ("lse", True, -1e30, "this backend gives"),
])  # fmt: skip
def test_rows_that_see_no_key_are_exact(name: str, head_axis_first: bool, value: float, text: str) -> None:
    bench = Bench(EMPTY)
    assert not names_of_wrong(bench.spoiled())
    at = (0, 1, 3) if head_axis_first else (0, 3, 1)
    verdict = bench.spoiled(**{name: in_place(lambda x: x[at].fill_(value))})[name]
    assert not verdict.ok and text in verdict.message


SIGNED: list[tuple[str, dict[str, Callable[[Tensor], Tensor]], str, str]] = [
    ("lse in base 2", {"lse": lambda x: x / math.log(2)}, "lse", "1 / ln 2"),
    ("dq scaled twice", {"dq": lambda x: x * 0.125}, "dq", "the scale"),
    ("dk halved", {"dk": lambda x: x / 2}, "dk", "1/2"),
    ("gradient never written", {"dv": torch.zeros_like}, "dv", "all zeros"),
    ("row-sum term", {"dq": lambda x: x + 0.5, "dk": lambda x: x + 0.5}, "dq", "row-sum term"),
    ("head map", {"out": lambda x: x * torch.tensor([1, 2, 1, 1, 1, 2, 1, 1])[:, None].bfloat16()}, "out", "head map"),
    ("heads exchanged", {"out": lambda x: x[:, :, [0, 2, 1, 3, 4, 5, 6, 7]].contiguous()}, "out", "head 1 holds what belongs to head 2"),
    ("tail", {"dv": in_place(lambda x: x[:, 256:].zero_())}, "dv", "past 256"),
    ("second batch", {"dq": in_place(lambda x: x[1].add_(1.0))}, "dq", "batch 1, never the first"),
    ("one tile", {"dq": in_place(lambda x: x[0, 64:80, 2].add_(1.0))}, "dq", "16-row tile 4"),
]


@pytest.mark.parametrize(("changes", "tensor", "text"), [row[1:] for row in SIGNED], ids=[row[0] for row in SIGNED])
def test_an_error_is_named_by_its_looks(bench: Bench, changes: dict[str, Callable[[Tensor], Tensor]], tensor: str, text: str) -> None:
    verdicts = bench.spoiled(**changes)
    assert set(names_of_wrong(verdicts)) == set(changes)
    assert text in verdicts[tensor].message


def test_gradients_not_summed_over_the_group_are_named(bench: Bench) -> None:
    case = bench.case
    expanded = Inputs(bench.inputs.q, *(x.repeat_interleave(case.group, 2) for x in (bench.inputs.k, bench.inputs.v)), bench.inputs.do)
    per_head = run(Naive(), Case(mask=case.mask, batch=2, heads_q=8, heads_kv=8, head_dim=64, dtype="bf16"), expanded)
    verdicts = bench.spoiled(dk=lambda x: per_head.dk[:, :, ::4].contiguous(), dv=lambda x: per_head.dv[:, :, ::4].contiguous())
    assert "not summed over the query group" in verdicts["dk"].message
    assert "not summed over the query group" in verdicts["dv"].message


def test_an_ignored_scale_is_named_once_and_only_where_it_explains_the_tensor() -> None:
    case = Case(mask=Causal(20, 20), head_dim=64, scale=0.61)
    bench = Bench(case)
    text = "looks like scale 1/sqrt(head_dim), not 0.61"
    ignored = run(Naive(), dataclasses.replace(case, scale=0.0), bench.inputs)
    verdicts = bench.spoiled(out=lambda x: ignored.out, lse=lambda x: ignored.lse)
    assert names_of_wrong(verdicts) == ["out", "lse"]
    assert [name for name, verdict in verdicts.items() if text in verdict.message] == ["out"]
    assert "head map" not in verdicts["out"].message and "times what it should be" not in verdicts["lse"].message, "no other guess"
    assert "looks like scale" not in bench.spoiled(out=lambda x: x * 2)["out"].message


def test_a_top_left_diagonal_is_named() -> None:
    case = Case(mask=Causal(60, 90), head_dim=32)
    bench = Bench(case)
    rows, keys = torch.arange(60)[:, None], torch.arange(90)
    scores = (bench.inputs.q[0, :, 0] @ bench.inputs.k[0, :, 0].T * case.scale).masked_fill(keys > rows, -math.inf)
    out = (scores.softmax(-1) @ bench.inputs.v[0, :, 0])[None, :, None]
    assert "top-left" in bench.spoiled(out=lambda x: out)["out"].message


def test_half_precision_may_overflow_only_where_the_truth_does() -> None:
    case = Case(mask=Full(4, 4), head_dim=8, dtype="fp16")
    inputs = make_inputs(case)
    inputs.do.mul_(20000.0)
    bench = Bench(case)
    bench.inputs, bench.reference = inputs, compute(case, inputs)
    big = bench.reference.dv.abs().amax()
    assert float(big) > 30000
    dv = bench.reference.dv.clone()
    dv[0, 0, 0, 0] = 70000.0
    bench.reference = dataclasses.replace(bench.reference, dv=dv)
    assert bench.spoiled(dv=lambda x: bench.reference.dv.to(torch.float16))["dv"].ok
    assert not bench.spoiled(dv=lambda x: torch.full_like(x, math.inf))["dv"].ok
