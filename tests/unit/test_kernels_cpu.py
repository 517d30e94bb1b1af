"""naive, sdpa and flex on the CPU against the reference, row by row within what rounding may cost."""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.exc import InductorError, LoweringException
from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError
from torch._inductor.select_algorithm import NoValidChoicesError
from torch.nn.attention.flex_attention import AuxRequest

from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.catalogue import KERNELS, MASKS, load
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import make_inputs
from pytest_longca.judge import Result, judge
from pytest_longca.kernel import SUMS_IN_DTYPE, Kernel
from pytest_longca.kernels import flex
from pytest_longca.machine import CPU
from pytest_longca.mask import PredicateMask
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full
from pytest_longca.outcome import Unsupported
from pytest_longca.reference import compute


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = load(KERNELS[name])()
    return kernel


def error_over_limit(kernel: Kernel, case: Case) -> dict[str, float]:
    """The worst error of each tensor, in units of what honest rounding may cost."""
    inputs = make_inputs(case)
    call = kernel.bind(case, inputs)
    out, lse = call.forward()
    grads = call.backward(inputs.do) if case.direction.needs_backward else ()
    result = Result(out.detach(), None if lse is None else lse.detach(), *grads, sums_in_dtype=SUMS_IN_DTYPE in call.facts)
    return {verdict.tensor: verdict.error_over_limit for verdict in judge(case, inputs, compute(case, inputs), result)}


def assert_right(name: str, case: Case) -> dict[str, float]:
    kernel = kernel_named(name)
    assert kernel.supports(case, CPU) is None
    worst = error_over_limit(kernel, case)
    assert max(worst.values()) <= 1, worst
    return worst


@st.composite
def cpu_cases(draw: st.DrawFn, direction: Direction) -> Case:
    name = draw(st.sampled_from(sorted(MASKS)))
    cls = load(MASKS[name])
    seqlen = draw(st.integers(1, 70))
    mask = cls.sample(random.Random(draw(st.integers(0, 999))), seqlen)
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 4)]))
    heads_q = mask.heads if mask.heads > 1 else heads_kv * group
    return Case(
        mask=mask,
        batch=draw(st.integers(1, 2)),
        heads_q=heads_q,
        heads_kv=heads_kv if heads_q % heads_kv == 0 else 1,
        head_dim=draw(st.sampled_from([16, 24, 72])),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        direction=direction,
        seed=draw(st.integers(0, 99)),
    )


@given(case=cpu_cases(Direction.FWD_BWD))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_naives_output_and_gradients_are_within_rounding_of_the_reference(case: Case) -> None:
    assert_right("naive", case)


@given(case=cpu_cases(Direction.FWD_BWD))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_sdpas_output_and_gradients_are_within_rounding_of_the_reference(case: Case) -> None:
    assert_right("sdpa", case)


@given(case=cpu_cases(Direction.FWD))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_eager_flex_is_within_rounding_of_the_reference_on_every_mask(case: Case) -> None:
    assert "lse" in assert_right("flex", case)


@pytest.mark.parametrize("name", ["naive", "sdpa", "flex"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(9, 5), (5, 9), (1, 7), (7, 1)])
@pytest.mark.parametrize("mask", ["causal", "causal_sliding_window", "full_sliding_window", "full"])
def test_unequal_lengths_are_aligned_bottom_right_and_empty_rows_are_zero(name: str, mask: str, seqlen_q: int, seqlen_kv: int) -> None:
    cls = load(MASKS[mask])
    sizes = (seqlen_q, seqlen_kv, 2) if "window" in mask else (seqlen_q, seqlen_kv)
    direction = Direction.FWD if name == "flex" else Direction.FWD_BWD
    case = Case(mask=cls(*sizes), batch=2, heads_q=6, heads_kv=2, head_dim=16, direction=direction)
    assert_right(name, case)


@pytest.mark.parametrize("name", ["naive", "sdpa"])
@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_gives_the_same_answer(name: str, layout: Layout) -> None:
    case = Case(mask=Causal(20, 20), batch=2, heads_q=4, heads_kv=2, head_dim=24, layouts=(layout,) * 4)
    assert_right(name, case)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 5), (5, 0)])
def test_naive_takes_sequences_without_queries_or_keys(seqlen_q: int, seqlen_kv: int) -> None:
    case = Case(mask=Full(seqlen_q, seqlen_kv), heads_q=2, heads_kv=1, head_dim=16)
    inputs = make_inputs(case)
    call = kernel_named("naive").bind(case, inputs)
    out, lse = call.forward()
    dq, dk, dv = call.backward(inputs.do)
    assert out.shape == inputs.do.shape and not out.any()
    assert lse is not None and (lse == float("-inf")).all()
    assert not any(grad.any() for grad in (dq, dk, dv))


@pytest.mark.parametrize("name", ["naive", "sdpa"])
def test_value_heads_may_have_their_own_width(name: str) -> None:
    case = Case(mask=Causal(20, 20), heads_q=2, heads_kv=1, head_dim=24, head_dim_v=40)
    assert_right(name, case)


def test_naive_keeps_the_gradient_of_p_exact_where_a_cast_would_round_it() -> None:
    """One row of two equal scores: dS = P (dP - <P, dP>) cancels, so a rounded dP would show."""
    case = Case(mask=Full(1, 2), head_dim=16, dtype="bf16", seed=5)
    inputs = make_inputs(case)
    call = kernel_named("naive").bind(case, inputs)
    call.forward()
    dq, _, _ = call.backward(inputs.do)
    reference = compute(case, inputs)
    assert reference.dq is not None
    torch.testing.assert_close(dq.double(), reference.dq.double(), rtol=2**-8, atol=1e-6)


def test_gradients_can_be_taken_twice_from_one_forward() -> None:
    case = Case(mask=Causal(9, 9), heads_q=2, heads_kv=1, head_dim=16)
    for name in ("naive", "sdpa"):
        inputs = make_inputs(case)
        call = kernel_named(name).bind(case, inputs)
        call.forward()
        first, second = call.backward(inputs.do), call.backward(inputs.do)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert inputs.q.grad is None


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (Full(8, 8), "no mask"),
        (Full(8, 5), "no mask"),
        (Causal(8, 8), "causal flag"),
        (Causal(8, 5), "dense bool mask"),
        (Causal(5, 8), "dense bool mask"),
        (CausalSlidingWindow(8, 8, 2), "dense bool mask"),
        (CausalSlidingWindow(8, 8, 7), "causal flag"),
    ],
    ids=str,
)
def test_sdpa_uses_its_causal_flag_on_squares_only_and_records_how_it_ran(mask: object, form: str) -> None:
    case = Case(mask=mask, head_dim=16)  # type: ignore[arg-type]  # masks of several kinds
    call = kernel_named("sdpa").bind(case, make_inputs(case))
    assert call.facts == {"backend": "FLASH_ATTENTION", "mask_form": form, SUMS_IN_DTYPE: "gradients, block by block"}


@pytest.mark.parametrize(
    ("words", "is_refusal"),
    [
        ("cuDNN Frontend error: The stride for the last dimension should be 1 for output_names::O", True),
        ("Expected mha_graph->execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got false.", False),
    ],
)
def test_sdpa_takes_what_cudnns_frontend_says_before_it_launches_anything_for_a_refusal(
    words: str, is_refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*operands: object, **options: object) -> None:
        raise RuntimeError(words)

    case = Case(mask=Full(8, 8))
    call = kernel_named("sdpa").bind(case, make_inputs(case))
    monkeypatch.setattr("pytest_longca.kernels.sdpa.scaled_dot_product_attention", refuse)
    with pytest.raises(DidNotRun if is_refusal else RuntimeError) as caught:
        call.forward()
    assert words in str(caught.value)
    assert isinstance(getattr(caught.value, "outcome", None), Unsupported) is is_refusal


def test_sdpa_pins_math_where_the_cpu_flash_does_not_go() -> None:
    case = Case(mask=Full(8, 8), head_dim=16, head_dim_v=24)
    assert kernel_named("sdpa").bind(case, make_inputs(case)).facts["backend"] == "MATH"


def test_flex_leaves_torch_as_it_found_it() -> None:
    import torch.nn.attention.flex_attention as flex_attention

    def broken(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return kv_idx <= q_idx

    before = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    case = Case(mask=PredicateMask(broken, 8, 8), head_dim=16, direction=Direction.FWD)
    call = kernel_named("flex").bind(case, make_inputs(case))
    call.forward()
    assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before
    assert call.facts["compiled_form"] == "eager"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that flex compiles for a GPU, with a compiler that runs them as they are."""
    compiled, compile_with = list[torch.fx.GraphModule](), torch.compile

    def kept(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    def compile_and_keep(function: Callable[..., object], **options: object) -> object:
        assert options == {"dynamic": False, "fullgraph": True}
        return compile_with(function, backend=kept, **options)

    monkeypatch.setattr(torch, "compile", compile_and_keep)
    monkeypatch.setattr(flex, "_flex_attention", functools.cache(flex._flex_attention.__wrapped__))
    monkeypatch.setattr(flex, "_held", set())
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


def run_compiled(case: Case) -> None:
    inputs = make_inputs(case)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    flex._compiled(case)(q, k, v, block_mask=case.mask.block_mask("cpu"), scale=case.scale)


def test_flex_compiles_once_for_cases_that_differ_in_seed_and_values_alone(graphs: list[torch.fx.GraphModule]) -> None:
    case = Case(mask=CausalDocument((9, 8)), head_dim=32)
    other = dataclasses.replace(case, head_dim=64, head_dim_v=64)
    for one, num_graphs in ((case, 1), (dataclasses.replace(case, seed=3, values=Values.PEAKED), 1), (other, 2), (case, 2)):
        run_compiled(one)
        assert len(graphs) == num_graphs


def test_flex_compiles_every_shape_for_itself_and_never_falls_to_eager(graphs: list[torch.fx.GraphModule]) -> None:
    num_cases = flex.MOST_CASES + 3
    for length in range(2, 2 + num_cases):
        run_compiled(Case(mask=Causal(length, length), head_dim=16))
    assert len(graphs) == num_cases
    for graph in graphs:  # no symbol for a size: every one is a number
        assert all(isinstance(size, int) for node in graph.graph.nodes if "example_value" in node.meta for size in sizes_of(node))


def lowering_error(inner: Exception) -> Exception:
    """An error of one operator's lowering, as Inductor wraps it."""
    return LoweringException(inner, "flex_attention", [], {})


NO_KERNEL = [
    lowering_error(NoValidChoicesError("No choices to select. Provided reason: No choices exist for backend. ")),
    RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused Required: 247808 Hardware limit:232448"),
    NoTritonConfigsError(
        "No valid triton configs. OutOfResources: out of resource: shared memory, Required: 247808, Hardware limit: 232448"
    ),
]
BROKEN = [
    lowering_error(AssertionError("Query length must be greater than 0")),
    NoTritonConfigsError("No valid triton configs. PTXASError: PTXAS error: Internal Triton PTX codegen error"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


def call_that_compiles_to(error: Exception, monkeypatch: pytest.MonkeyPatch) -> flex.FlexCall:
    """A call of flex whose compiler raises the error, as Inductor does."""

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        raise InductorError(error, None) from None

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=compiler, **options))
    monkeypatch.setattr(flex, "_flex_attention", functools.cache(flex._flex_attention.__wrapped__))
    case = Case(mask=Full(8, 8), head_dim=16)
    options: dict[str, Any] = {"block_mask": case.mask.block_mask("cpu"), "return_aux": AuxRequest(lse=True)}
    run = flex._compiled(case)
    return flex.FlexCall("flex", lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v)), **options), make_inputs(case), False, {})


@pytest.mark.parametrize("error", NO_KERNEL, ids=lambda error: str(error).partition(":")[0])
def test_a_shape_for_which_inductor_has_no_kernel_is_a_refusal(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DidNotRun) as stopped:
        call_that_compiles_to(error, monkeypatch).forward()
    assert isinstance(stopped.value.outcome, Unsupported)
    assert re.match(
        r"flex cannot compile it: (NoValidChoicesError: No choices to select|No valid triton configs)", stopped.value.outcome.reason
    )


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: str(error).partition(":")[0])
def test_every_other_error_of_inductor_stays_what_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InductorError):
        call_that_compiles_to(error, monkeypatch).forward()


def test_a_backward_that_has_no_kernel_is_a_refusal_too() -> None:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return v.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise InductorError(NO_KERNEL[1], None)

    inputs = make_inputs(Case(mask=Full(8, 8), head_dim=16))
    call = flex.FlexCall("flex", lambda q, k, v: (Attention.apply(q, k, v), None), inputs, True, {})
    call.forward()
    with pytest.raises(DidNotRun, match="flex cannot compile it: No valid triton configs"):
        call.backward(inputs.do)


def sizes_of(node: torch.fx.Node) -> Iterator[object]:
    values = node.meta["example_value"]
    return (
        size for value in (values if isinstance(values, tuple) else (values,)) if isinstance(value, torch.Tensor) for size in value.shape
    )


def test_the_compiler_of_flex_is_strict_only_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compiled(*args: object, **kwargs: object) -> None:
        seen.append((torch._dynamo.config.fail_on_recompile_limit_hit, torch._functorch.config.donated_buffer))

    monkeypatch.setattr(flex, "_flex_attention", lambda: compiled)
    usual = (torch._dynamo.config.fail_on_recompile_limit_hit, torch._functorch.config.donated_buffer)
    run = flex._compiled(Case(mask=Full(8, 8)))
    run()
    run()
    assert seen == [(True, False), usual]
