"""Circumstances together: few calls where nothing is wrong, and what is wrong is told by the check that it belongs to."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pytest_longca.case import Case, Direction
from pytest_longca.checknames import DEFAULT
from pytest_longca.checks import verify
from pytest_longca.errors import DidNotRun
from pytest_longca.faults import FAULTS
from pytest_longca.faulty import Bind, Fresh, Grads, Hooked, make_faulty
from pytest_longca.hazards import RECYCLED_COPIES, soil_recycled_memory
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.machine import CPU
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Crashed, Passed, Unsupported, Wrong
from pytest_longca.subject import Malformed, Subject
from pytest_longca.together import Together
from tests.unit.dispatched import Dispatched

CASE = Case(mask=Causal(20, 20), batch=2, heads_q=4, heads_kv=2, head_dim=16)


def counting(forward: list[Case], backward: list[Case]) -> Kernel:
    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        def after_forward(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            forward.append(case)
            return out, lse

        def after_backward(*grads: torch.Tensor) -> Grads:
            backward.append(case)
            return grads[0], grads[1], grads[2]

        return Hooked(inner.bind(case, inputs), after_forward=after_forward, after_backward=after_backward)

    return make_faulty(Naive(), "counted", bind)


def in_forward(number: int, act: Callable[[torch.Tensor], torch.Tensor]) -> Kernel:
    """A kernel of which one forward of all gives something else; `number` counts from 1."""

    def make() -> Bind:
        ran: list[int] = []

        def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
            def after_forward(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
                ran.append(1)
                return act(out) if len(ran) == number else out, lse

            return Hooked(inner.bind(case, inputs), after_forward=after_forward)

        return bind

    return make_faulty(Naive(), f"odd_{number}", Fresh(make))


def test_a_right_kernel_is_called_seven_times_with_eight_backwards() -> None:
    forward: list[Case] = []
    backward: list[Case] = []
    assert verify(counting(forward, backward), CASE, CPU).outcome == Passed()
    assert (len(forward), len(backward)) == (7, 8)
    assert [case == CASE for case in forward] == [True, True, False, True, True, True, True], "the neighbour is the third"
    assert [case == CASE for case in backward] == [True] * 4 + [False] + [True] * 3, "its backward comes after three of the case"


def test_a_slow_kernel_is_called_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "is_slow", True)
    forward: list[Case] = []
    backward: list[Case] = []
    assert verify(counting(forward, backward), CASE, CPU).outcome == Passed()
    assert (len(forward), len(backward)) == (5, 5)


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 3550), ("bf16", 3620), ("fp16", 3880)])
def test_an_example_of_a_right_kernel_takes_few_operations(dtype: str, most: int) -> None:
    """Calls, references of the case and of its neighbour, judging: what a GPU's host is busy with."""
    case = replace(CASE, dtype=dtype, seed=2024)  # whose references no other test has made
    with Dispatched() as calls:
        verify(Naive(), case, CPU, DEFAULT)
    assert calls.count.total() <= most, str(calls)
    assert calls.count["aten._local_scalar_dense.default"] <= 4, "numbers that are asked for one by one"


def test_recycled_memory_is_filled_in_few_operations() -> None:
    subject = Subject(Naive(), CASE, CPU)
    with Dispatched() as calls:
        soil_recycled_memory(subject, math.nan)
    assert calls.count["aten.empty.memory_format"] == 5 * RECYCLED_COPIES
    assert calls.count.total() == 5 * RECYCLED_COPIES + 4, str(calls)


@pytest.mark.parametrize("compiles_per_shape", [False, True])
@pytest.mark.parametrize("direction", [Direction.FWD, Direction.FWD_BWD])
def test_a_right_kernel_is_quiet(direction: Direction, compiles_per_shape: bool) -> None:
    kernel = make_faulty(Naive(), "right", lambda inner, case, inputs: inner.bind(case, inputs))
    type(kernel).compiles_per_shape = compiles_per_shape
    assert Together(Subject(kernel, replace(CASE, direction=direction), CPU)).found == []


@pytest.mark.parametrize(
    ("fault", "check", "case"),
    [
        ("reads_beyond_values", "poison", CASE),
        ("writes_beyond_keys", "guard", CASE),
        ("q_changed_in_place", "guard", CASE),
        ("default_dtype_left", "guard", CASE),
        ("draws", "guard", CASE),
        ("seeded", "guard", CASE),
        ("backward_twice", "repeat", CASE),
        ("do_of_first", "repeat", CASE),
        ("forward_twice", "repeat", CASE),
        ("mask_cached_by_shape", "state", replace(CASE, mask=CausalDocument((9, 11)), seed=1)),
        ("mask_kept_by_longest", "state", replace(CASE, mask=CausalDocument((9, 11)))),
        ("scale_kept_by_shape", "state", replace(CASE, seed=1)),
        ("out_kept_by_address", "state", CASE),
        ("out_buffer_reused", "state", replace(CASE, seed=1)),
        ("backward_of_latest", "state", CASE),
    ],
)
def test_what_is_found_together_is_told_by_the_check_whose_circumstance_it_is(fault: str, check: str, case: Case) -> None:
    assert Subject(Naive(), case, CPU).is_right  # so that its truth is known before a fault writes to the operands
    found = Together(Subject(FAULTS[fault].plant(Naive()), case, CPU)).found
    verification = verify(FAULTS[fault].plant(Naive()), case, CPU)
    assert found, "no check would have made calls of its own"
    assert isinstance(verification.outcome, Wrong) and verification.outcome.reproducible
    assert verification.findings[0].check == check


@pytest.mark.parametrize("forward", [2, 4, 5, 7])
def test_a_call_that_is_wrong_once_is_told_and_said_not_to_come_back(forward: int) -> None:
    verification = verify(in_forward(forward, lambda out: out + 1), CASE, CPU)
    assert verification.outcome == Wrong(verification.outcome.reason, reproducible=False)  # type: ignore[union-attr]  # Wrong, as is asserted
    assert str(verification.findings[0]).startswith("repeat: out: ")


def test_of_a_deterministic_kernel_the_last_bit_counts() -> None:
    findings = verify(in_forward(4, lambda out: out * (1 + 2.0**-23)), CASE, CPU).findings
    assert findings[0].message.startswith("call 3 differs from the first")


def test_what_is_added_to_memory_around_an_operand_is_seen_between_huge_values() -> None:
    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        def after_forward(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            beyond = inputs.v.storage_offset() + inputs.v.numel() + 800
            if beyond + 2 < inputs.v.untyped_storage().nbytes() // inputs.v.element_size():
                inputs.v.as_strided((2,), (1,), beyond).add_(0.5)
            return out, lse

        return Hooked(inner.bind(case, inputs), after_forward=after_forward)

    findings = verify(make_faulty(Naive(), "adds_beyond", bind), CASE, CPU).findings
    assert str(findings[0]).startswith("guard: v: the call wrote to 2 elements outside the operand v")


def raising(error: Exception) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(out: torch.Tensor) -> torch.Tensor:
        raise error

    return act


def test_a_kernel_that_writes_to_its_operands_leaves_no_wrong_truth_to_the_next_one() -> None:
    case = replace(CASE, seed=2025)  # whose reference is made after the faulty kernel's call
    assert isinstance(verify(FAULTS["q_changed_in_place"].plant(Naive()), case, CPU, DEFAULT).outcome, Wrong)
    assert verify(Naive(), case, CPU, DEFAULT).outcome == Passed()


def test_a_later_call_that_crashes_ends_the_case() -> None:
    assert isinstance(verify(in_forward(5, raising(ValueError("tile 7"))), CASE, CPU).outcome, Crashed)


def test_a_later_call_that_is_malformed_once_is_told() -> None:
    findings = verify(in_forward(5, raising(Malformed("out", "has shape [1]"))), CASE, CPU).findings
    assert [str(finding) for finding in findings] == ["repeat: out: in a call after the first: has shape [1]"]


def test_a_refused_circumstance_leaves_the_others_to_their_checks() -> None:
    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        if not inputs.q.is_contiguous():
            raise DidNotRun(Unsupported("takes contiguous operands only"))
        return FAULTS["backward_twice"].bind(inner, case, inputs)  # type: ignore[operator]  # it has no memory of its own

    verification = verify(make_faulty(Naive(), "dense", bind), CASE, CPU)
    assert verification.facts["poison skipped"] == "takes contiguous operands only"
    assert {finding.check for finding in verification.findings} == {"repeat"} and verification.checks == DEFAULT


def test_a_kernel_that_is_wrong_alone_is_asked_nothing_together() -> None:
    subject = Subject(FAULTS["dk_unscaled"].plant(Naive()), CASE, CPU)
    assert Together(subject).found is None


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (1, 0)])
def test_a_case_without_tokens_is_asked_nothing_together(lengths: tuple[int, int]) -> None:
    assert Together(Subject(Naive(), replace(CASE, mask=Causal(*lengths)), CPU)).found is None
