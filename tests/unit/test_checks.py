"""`verify`: every way a kernel can end is an outcome, and every circumstance check has something that only it can see."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from pytest_longca.case import OPERANDS, Case, Direction, Layout
from pytest_longca.checknames import CHECK_INFO, DEFAULT, PROBES, select_checks
from pytest_longca.checks import CHECKS, Verification, verify
from pytest_longca.errors import DidNotRun, InvalidArgument
from pytest_longca.faults import FAULTS
from pytest_longca.faulty import Grads, Hooked, make_faulty
from pytest_longca.hazards import neighbours
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Call, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.outcome import Crashed, NotVerified, OutOfMemory, Passed, Unsupported, Wrong
from pytest_longca.subject import Subject

CASE = Case(mask=Causal(9, 9), batch=2, heads_q=4, heads_kv=2, head_dim=16)


class Scripted(Kernel):
    """A kernel whose forward and backward are given functions over naive's results."""

    name = "scripted"

    def __init__(self, forward: Callable[..., object] | None = None, backward: Callable[..., object] | None = None) -> None:
        self.steps = (forward, backward)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        call, (forward, backward) = Naive().bind(case, inputs), self.steps

        class Script(Call):
            def forward(self):  # type: ignore[no-untyped-def]
                answer = call.forward()
                return forward(*answer) if forward else answer

            def backward(self, do):  # type: ignore[no-untyped-def]
                grads = call.backward(do)
                return backward(*grads) if backward else grads

        return Script()


def raising(error: BaseException) -> Callable[..., object]:
    def step(*_: object) -> object:
        raise error

    return step


class Forgetful(Naive):
    """Has an answer for a batch of two alone, of which checks make one of one."""

    name = "forgetful"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        return {2: None}[case.batch]


@pytest.mark.parametrize(("case", "about"), [(CASE, "b1"), (replace(CASE, batch=3), "b3")])
def test_supports_that_raises_on_the_case_or_on_one_made_of_it_is_the_outcome(case: Case, about: str) -> None:
    outcome = verify(Forgetful(), case, CPU, ("truth", "metamorphic")).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.reason.startswith(f"kernel forgetful: supports raised KeyError: {about[1]} (also_refuses, line ")
    assert f"/{about}/" in outcome.reason


def test_a_correct_kernel_passes_everything_on_the_cpu() -> None:
    verification = verify(Naive(), CASE, CPU, ["all"])
    assert verification.outcome == Passed()
    assert set(verification.checks) == set(CHECK_INFO) - {"resources", "overflow"}
    assert set(verification.worst) == {"out", "lse", "dq", "dk", "dv"}
    assert all(0 <= ratio <= 1 for ratio in verification.worst.values())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DidNotRun(Unsupported("no such tile")), Unsupported("no such tile")),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), OutOfMemory("CUDA out of memory. Tried to allocate 9 GiB")),
        (MemoryError(), OutOfMemory("MemoryError")),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
            OutOfMemory("[enforce fail] DefaultCPUAllocator: can't allocate"),
        ),
    ],
)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_what_a_kernel_raises_becomes_its_outcome(error: Exception, outcome: object, stage: str) -> None:
    assert verify(Scripted(**{stage: raising(error)}), CASE, CPU).outcome == outcome


def test_an_unexpected_exception_is_a_crash_with_its_text_and_traceback() -> None:
    outcome = verify(Scripted(forward=raising(ValueError("tile 7\nmore"))), CASE, CPU).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.reason == "scripted raised ValueError: tile 7"
    assert "Traceback" in outcome.stderr and "tile 7" in outcome.stderr


class Unspeakable(Exception):
    """An exception that raises where it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Unspeakable(), "scripted raised Unspeakable: its text raises RuntimeError"),
        (SystemExit(3), "scripted raised SystemExit: 3"),
        (pytest.skip.Exception("not today"), "scripted raised Skipped: not today"),
    ],
)
def test_whatever_a_kernel_raises_is_a_crash_that_names_it(error: BaseException, told: str) -> None:
    outcome = verify(Scripted(forward=raising(error)), CASE, CPU).outcome
    assert isinstance(outcome, Crashed) and outcome.reason == told


@pytest.mark.parametrize(("facts", "told"), [({"tile": 64, "by": torch.float32}, {"tile": "64", "by": "torch.float32"}), (None, None)])
def test_facts_of_other_types_are_told_as_text_and_none_is_a_crash(facts: object, told: dict[str, str] | None) -> None:
    class Told(Scripted):
        def bind(self, case: Case, inputs: Inputs) -> Call:
            call = super().bind(case, inputs)
            call.facts = facts  # type: ignore[assignment]  # as a conftest.py without types may
            return call

    verification = verify(Told(), CASE, CPU)
    if told is None:
        assert isinstance(verification.outcome, Crashed)
    else:
        assert verification.outcome == Passed() and verification.facts.items() >= told.items()


def test_an_interrupt_is_the_user_s_and_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        verify(Scripted(forward=raising(KeyboardInterrupt())), CASE, CPU)


def test_an_exception_of_megabytes_is_told_in_kilobytes() -> None:
    outcome = verify(Scripted(forward=raising(ValueError("y" * 5_000_000))), CASE, CPU).outcome
    assert isinstance(outcome, Crashed)
    assert len(outcome.reason) < 10_000 and len(outcome.stderr) < 10_000


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda out, lse: out, "forward returned a Tensor: it must return (out, lse or None)"),
        (lambda out, lse: (None, lse), "the kernel returned None where a tensor of shape [2, 9, 4, 16] is due"),
        (
            lambda out, lse: (out.transpose(1, 2), lse),
            "has shape [2, 4, 9, 16], due is [2, 9, 4, 16] (batch, seqlen_q, heads_q, head_dim_v)",
        ),
        (lambda out, lse: (out.double(), lse), "has dtype torch.float64, due is torch.float32"),
        (lambda out, lse: (out.to_sparse(), lse), "has layout torch.sparse_coo, due is torch.strided"),
        (lambda out, lse: (out.to("meta"), lse), "out: is on the device meta, due is cpu, as q is"),
        (lambda out, lse: (out, lse.to("meta")), "lse: is on the device meta, due is cpu, as q is"),
        (lambda out, lse: (out, lse.half()), "has dtype torch.float16, due is torch.float32 or torch.float64"),
        (lambda out, lse: (out, lse.mT), "has shape [2, 9, 4], due is [2, 4, 9] (batch, heads_q, seqlen_q)"),
    ],
)
def test_a_malformed_forward_is_wrong_and_says_what_is_due(forward: Callable[..., object], message: str) -> None:
    outcome = verify(Scripted(forward=forward), CASE, CPU).outcome
    assert isinstance(outcome, Wrong) and message in outcome.reason


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda dq, dk, dv: (dq, dk), "backward returned a tuple of 2: it must return (dq, dk, dv)"),
        (lambda dq, dk, dv: (dq, None, dv), "dk: the kernel returned None where a tensor of shape [2, 9, 2, 16] is due"),
        (lambda dq, dk, dv: (dq.to_sparse(), dk, dv), "dq: has layout torch.sparse_coo, due is torch.strided"),
        (lambda dq, dk, dv: (dq, dk.to("meta"), dv), "dk: is on the device meta, due is cpu, as q is"),
        (lambda dq, dk, dv: (dq, dk, dv.repeat(1, 1, 2, 1)), "dv: has shape [2, 9, 4, 16], due is [2, 9, 2, 16]"),
    ],
)
def test_a_malformed_backward_is_wrong_and_says_what_is_due(backward: Callable[..., object], message: str) -> None:
    outcome = verify(Scripted(backward=backward), CASE, CPU).outcome
    assert isinstance(outcome, Wrong) and message in outcome.reason


def test_what_a_kernel_declares_that_it_cannot_do_is_not_run() -> None:
    class Picky(Scripted):
        def also_refuses(self, case: Case, machine: object) -> str:
            return "never"

    assert verify(Picky(raising(AssertionError("ran"))), CASE, CPU).outcome == Unsupported("never")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), MemoryError("9 GiB")])
def test_a_reference_that_has_no_memory_is_no_verdict_on_the_kernel(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise error

    monkeypatch.setattr("pytest_longca.truth.cached_reference", no_memory)
    outcome = verify(Naive(), CASE, CPU, ["truth"]).outcome
    assert outcome == NotVerified(f"check truth had no memory left: {error}")


def test_a_refusal_of_a_stranger_layout_is_a_fact_and_no_failure() -> None:
    class Dense(Naive):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            if not inputs.q.is_contiguous():
                raise DidNotRun(Unsupported("takes contiguous operands only"))
            return super().bind(case, inputs)

    verification = verify(Dense(), CASE, CPU, ["truth", "layout", "repeat"])
    assert verification.outcome == Passed()
    assert verification.facts["layout skipped"] == "takes contiguous operands only"


def test_nothing_to_check_is_not_a_pass() -> None:
    assert isinstance(verify(Naive(), CASE, CPU, ["resources"]).outcome, NotVerified)


def test_a_verification_survives_json() -> None:
    verification = verify(FAULTS["dk_unscaled"].plant(Naive()), CASE, CPU, ["default"])
    assert isinstance(verification.outcome, Wrong) and verification.outcome.reproducible
    assert Verification.from_json(json.loads(json.dumps(verification.to_json()))) == verification


def test_any_seed_runs_without_what_ran_before() -> None:
    alone = verify(Naive(), replace(CASE, seed=5), CPU).worst
    verify(Naive(), replace(CASE, seed=6), CPU)
    assert verify(Naive(), replace(CASE, seed=5), CPU).worst == alone


def test_a_failure_that_does_not_come_back_is_marked_as_such() -> None:
    calls = iter([True])
    once = Scripted(forward=lambda out, lse: (out + 1 if next(calls, False) else out, lse))
    outcome = verify(once, replace(CASE, direction=Direction.FWD), CPU, ["truth"]).outcome
    assert isinstance(outcome, Wrong) and outcome.reproducible is False


@pytest.mark.parametrize(
    ("fault", "check", "case"),
    [
        ("dq_tail_unwritten", "poison", CASE),
        ("reads_beyond_values", "poison", CASE),
        ("writes_beyond_keys", "guard", CASE),
        ("q_changed_in_place", "guard", CASE),
        ("race_out", "repeat", replace(CASE, direction=Direction.FWD)),
        ("q_strides_ignored", "layout", CASE),
        ("do_strides_ignored", "layout", CASE),
        ("mask_cached_by_shape", "state", replace(CASE, mask=CausalDocument((4, 5)), seed=1)),
        ("out_buffer_reused", "state", replace(CASE, seed=1)),
        ("backward_of_latest", "state", CASE),
        ("no_maximum", "scale", replace(CASE, mask=Full(9, 9))),
    ],
)
def test_each_circumstance_check_sees_by_itself_what_it_is_for(fault: str, check: str, case: Case) -> None:
    verification = verify(FAULTS[fault].plant(Naive()), case, CPU, [check])
    assert isinstance(verification.outcome, Wrong), fault
    assert {finding.check for finding in verification.findings} == {check}


def test_a_plainly_wrong_kernel_is_not_blamed_for_its_state_too() -> None:
    plain = Scripted(forward=lambda out, lse: (out * 2, lse))
    for seed in range(4):  # neighbours of each kind
        findings = verify(plain, replace(CASE, mask=Causal(20, 20), seed=seed), CPU, ["truth", "state"]).findings
        assert {finding.check for finding in findings} == {"truth"}


def test_a_state_that_spoils_every_later_call_is_reproducible() -> None:
    scales: list[float] = []

    class Lagging(Naive):
        """Takes the scale of the call before: right as long as there is one scale."""

        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            scales.append(case.scale)
            return super().bind(replace(case, scale=scales[-2:][0]), inputs)

    verification = verify(Lagging(), replace(CASE, mask=Full(9, 9)), CPU, ["truth", "state"])
    assert {finding.check for finding in verification.findings} == {"state"}
    assert "right after this one, which is right when it runs alone: " in verification.findings[0].message
    assert isinstance(verification.outcome, Wrong) and verification.outcome.reproducible


def test_every_call_of_a_state_finds_the_operands_laid_out_as_the_case_says() -> None:
    laid = replace(CASE, layouts=(Layout.FUSED, Layout.EXPANDED, Layout.PADDED, Layout.SHARED))
    seen = []

    class Looking(Naive):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            seen.extend([tuple(getattr(inputs, name).stride() for name in OPERANDS)] * (case == laid))
            return super().bind(case, inputs)

    assert verify(Looking(), laid, CPU, ["state"]).outcome == Passed()
    assert len(seen) == 5 and len(set(seen)) == 1, "the first, in between, after, with other values, and with its own in their place"


def test_a_neighbour_that_is_wrong_by_itself_is_said_to_be() -> None:
    class UsualScaleOnly(Naive):
        """Ignores the scale: this case has the usual one, its neighbours have not."""

        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            return super().bind(replace(case, scale=0.0), inputs)

    findings = verify(UsualScaleOnly(), replace(CASE, mask=Full(9, 9)), CPU, ["truth", "state"]).findings
    assert {finding.check for finding in findings} == {"state"}
    assert all("right after this one, which is wrong when it runs once more alone, too: " in finding.message for finding in findings)


def test_a_case_without_tokens_has_no_neighbour_with_tokens() -> None:
    for seed, lengths in product(range(4), [(0, 0), (0, 50), (1, 1), (3, 2)]):
        found = [case.mask for case in neighbours(replace(CASE, mask=Causal(*lengths), seed=seed))]
        assert all(mask.seqlen_q <= lengths[0] and mask.seqlen_kv <= lengths[1] for mask in found)


def test_what_is_written_to_an_operand_is_said_first() -> None:
    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        call = inner.bind(case, inputs)

        def after_backward(*grads: torch.Tensor) -> Grads:
            inputs.q[-1, -1] += 1
            return grads[0], grads[1], grads[2]

        return Hooked(call, after_backward=after_backward)

    kernel = make_faulty(Naive(), "q_written_last", bind)
    findings = verify(kernel, CASE, CPU, ["examples"]).findings
    assert str(findings[0]).startswith("guard: q: the call wrote to") and len(findings) > 1
    assert [str(finding) for finding in verify(kernel, CASE, CPU, ["support"]).findings] == [
        "support: q: the call wrote to the operand q: operands are read-only"
    ]


def test_a_kernel_that_promises_determinism_is_held_to_every_bit() -> None:
    calls = iter(range(100))

    class Jittery(Scripted):
        deterministic = True

    jittery = Jittery(forward=lambda out, lse: (out * (1 + 2.0**-23 * (next(calls) % 2)), lse))
    findings = verify(jittery, replace(CASE, direction=Direction.FWD), CPU, ["repeat"]).findings
    assert "promises the same bits every time" in findings[0].message
    Jittery.deterministic = False
    assert verify(jittery, replace(CASE, direction=Direction.FWD), CPU, ["repeat"]).outcome == Passed()


@pytest.mark.parametrize("needed", ["dk, dv", "dq"])
def test_training_sees_a_backward_that_fails_for_partial_gradients(needed: str) -> None:
    class Partial(Naive):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            right = super().bind(case, inputs).function
            wanted = [name in needed for name in ("dq", "dk", "dv")]

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
                out, lse = right(q, k, v)
                is_partial = [x.requires_grad for x in (q, k, v)] == wanted
                return (out + (q.sum() if q.requires_grad else k.sum()) if is_partial else out), lse

            return AutogradCall(attend, inputs)

    findings = verify(Partial(), CASE, CPU, ["training"]).findings
    assert findings and all(finding.message.startswith(f"with only {needed} asked for") for finding in findings)


def test_names_and_code_of_the_checks_agree() -> None:
    assert CHECKS.keys() == CHECK_INFO.keys()
    assert set(PROBES) | set(DEFAULT) == {name for name, info in CHECK_INFO.items() if info.tier == "default"}


def test_an_unknown_check_lists_the_closest() -> None:
    with pytest.raises(InvalidArgument, match="unknown check 'turth': did you mean 'truth'"):
        select_checks(["turth"])


def test_call_that_takes_seconds_is_slow_on_any_kernel() -> None:
    long = Case(mask=Causal(256 * 1024, 256 * 1024), heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
    assert Subject(Naive(), long, H200).is_slow
    assert not Subject(Naive(), replace(long, mask=Causal(8192, 8192)), H200).is_slow
    assert not Subject(Naive(), CASE, CPU).is_slow


def test_a_changed_setting_is_told_and_put_back_wherever_the_kernel_runs() -> None:
    def leave(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        return out, lse

    kernel = Scripted(forward=leave)
    type(kernel).name = "changes_dtype_and_seeds"
    before = torch.get_rng_state()
    try:
        assert verify(kernel, CASE, CPU, ["probes", "truth"]).outcome == Passed()
        findings = verify(kernel, CASE, CPU, ["guard"]).findings
        kernel.steps = (None, None)
        later = verify(kernel, CASE, CPU, ["guard"]).findings
    finally:
        type(kernel).name = "scripted"
        assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), before)
    assert [finding.tensor for finding in findings] == ["settings", "generator"]
    assert [finding.tensor for finding in later] == ["settings"], "what changed once, as by an import, stays told"


def test_an_exception_leaves_no_changed_setting() -> None:
    def leave(*_: object) -> object:
        torch.set_grad_enabled(False)
        raise ValueError

    outcome = verify(Scripted(forward=leave), CASE, CPU).outcome
    assert isinstance(outcome, Crashed) and torch.is_grad_enabled()
