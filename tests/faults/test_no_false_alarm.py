"""What a correct kernel must not be blamed for: each negative control, and many drawn cases."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.checks import verify
from pytest_longca.errors import DidNotRun
from pytest_longca.faulty import Grads, head_map, make_faulty, right_heads, wrong_grad, wrong_results
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.machine import CPU, Machine
from pytest_longca.masks.regular import Causal, CausalSlidingWindow
from pytest_longca.outcome import Passed, Unsupported
from pytest_longca.strategies import cases

MANY = settings(derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
CASE = Case(mask=Causal(65, 65), batch=2, heads_q=6, heads_kv=2, head_dim=32)


def declared_random(kernel: Kernel) -> Kernel:
    """The kernel without its promise of determinism."""
    type(kernel).deterministic = False
    return kernel


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_order_noise_of_atomics_in_dq_is_no_fault_where_determinism_was_not_promised(dtype: str) -> None:
    noise = torch.Generator().manual_seed(0)

    def jitter(case: Case, dq: torch.Tensor) -> torch.Tensor:
        """Another order of an fp32 sum: some units in the last place of fp32, then rounded to the dtype."""
        spread = 1 + torch.randn(dq.shape, generator=noise) * 2.0**-23
        return (dq.float() * spread).to(dq.dtype)

    kernel = declared_random(make_faulty(Naive(), "atomics", wrong_grad("dq", jitter)))
    assert verify(kernel, replace(CASE, dtype=dtype), CPU, ["default", "stress"]).outcome == Passed()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_window_as_wide_as_the_sequence_may_differ_from_causal_in_the_last_bit(dtype: str) -> None:
    narrow = replace(CASE, mask=CausalSlidingWindow(65, 65, window=64), dtype=dtype)

    def last_bit(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A tenth of all elements one unit in the last place larger."""
        chosen = torch.rand(out.shape, generator=torch.Generator().manual_seed(1)) < 0.1
        return torch.where(chosen, out * (1 + 2.0**-23), out), lse

    kernel = make_faulty(Naive(), "other_path", wrong_results(last_bit)) if dtype == "fp32" else Naive()
    assert verify(kernel, narrow, CPU, ["default"]).outcome == Passed()


@pytest.mark.parametrize("values", [Values.BIASED, Values.PEAKED, Values.LARGE])
def test_what_rounding_to_bf16_costs_every_honest_kernel_is_no_fault(values: Values) -> None:
    assert verify(Naive(), replace(CASE, dtype="bf16", values=values), CPU, ["default"]).outcome == Passed()
    assert verify(Sdpa(), replace(CASE, dtype="bf16", values=values), CPU, ["default"]).outcome == Passed()


def test_a_documented_top_left_alignment_is_unsupported_and_not_wrong() -> None:
    class TopLeft(Naive):
        def also_refuses(self, case: Case, machine: Machine) -> str | None:
            return "aligns the diagonal top-left" if case.seqlen_q != case.seqlen_kv else None

    assert verify(TopLeft(), replace(CASE, mask=Causal(9, 12)), CPU).outcome == Unsupported("aligns the diagonal top-left")
    assert verify(TopLeft(), CASE, CPU).outcome == Passed()


def test_an_alignment_found_out_in_bind_is_unsupported_as_well() -> None:
    class Late(Naive):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            raise DidNotRun(Unsupported("aligns the diagonal top-left"))

    assert verify(Late(), CASE, CPU, ["default"]).outcome == Unsupported("aligns the diagonal top-left")


def test_zeros_in_rows_that_see_nothing_are_right() -> None:
    for mask in (Causal(20, 12), Causal(7, 1)):
        assert verify(Naive(), replace(CASE, mask=mask), CPU, ["default"]).outcome == Passed()


def test_a_kernel_without_lse_is_not_blamed_for_it() -> None:
    assert "lse" not in verify(Sdpa(), CASE, CPU, ["default"]).worst


def test_results_in_any_strides_are_right() -> None:
    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def backward(case: Case, inputs: Inputs, grads: Grads) -> Grads:
        return strided(grads[0]), strided(grads[1]), strided(grads[2])

    kernel = make_faulty(Naive(), "bhsd", wrong_results(lambda case, inputs, out, lse: (strided(out), lse), backward))
    assert verify(kernel, CASE, CPU, ["default"]).outcome == Passed()


def test_the_wrappers_of_the_faults_are_themselves_right() -> None:
    for name, bind in {"heads": head_map(right_heads), "results": wrong_results(lambda case, inputs, out, lse: (out, lse))}.items():
        assert verify(make_faulty(Naive(), name, bind), CASE, CPU, ["default"]).outcome == Passed()


def test_one_token_and_no_token_are_right() -> None:
    for mask in (Causal(1, 1), Causal(0, 0), Causal(1, 0), Causal(0, 3)):
        assert verify(Naive(), replace(CASE, mask=mask, layouts=(Layout.BHSD,) * 4), CPU, ["default"]).outcome == Passed(), mask
    assert verify(Naive(), replace(CASE, direction=Direction.FWD), CPU, ["default"]).outcome == Passed()


@pytest.mark.parametrize("kernel", [Naive(), Sdpa()], ids=lambda kernel: kernel.name)
def test_no_drawn_case_accuses_a_correct_kernel(kernel: Kernel) -> None:
    @settings(
        max_examples=30, derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(cases(kernel=kernel))
    def run(case: Case) -> None:
        verification = verify(kernel, case, CPU, ["default"])
        assert verification.outcome == Passed(), f"{case.id}: {verification.outcome}"

    run()
