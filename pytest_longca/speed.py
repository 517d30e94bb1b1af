"""What the suite's timing test does: verify, time, verify again, record; no speed of a kernel that was not verified."""

import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca.blame import known
from pytest_longca.cells import timing_refusal
from pytest_longca.conformance import Findings, commit, conclude, failure_of, finish, judged_case, keep, replay_line, versions
from pytest_longca.errors import DidNotRun
from pytest_longca.ids import parse_case
from pytest_longca.outcome import NotVerified, Outcome, Passed, outcome_from_json
from pytest_longca.replay import decline, replay
from pytest_longca.report.figures import SHARED
from pytest_longca.report.record import Record, shape_of
from pytest_longca.report.verdict import Limits
from pytest_longca.spent import TIME
from pytest_longca.warming import compiled_alike

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.session import Session


def run_timing(item: pytest.Item, session: "Session", benchmark: Any, kernel: str, case_id: str) -> None:
    """Time a kernel on one case and hand the samples to pytest-benchmark. A case that is not right is not timed.

    Nor is a case of a mask on which the kernel failed before: no report would print its speed, and one failure is told once.
    """
    case = parse_case(case_id, session.catalogue.masks())
    if failed := failure_of(item, kernel, case.mask.name):
        failure, replay_of_failure = failed
        kind, _, _ = str(failure).partition(":")
        untimed = NotVerified(f"not timed: verification failed on the mask ({kind})")
        _leave_untimed(item, session, benchmark, kernel, case, untimed, replay_of_failure)
    began, before = time.monotonic(), dict(session.spent)
    found = judged_case(item, session, kernel, case, ("truth",))
    assert found.decisive
    (_, verification), findings = found.decisive, found.findings
    if not isinstance(verification.outcome, Passed) or _is_disabled(item.config):
        decline(benchmark)
        finish(item, session, "timing", kernel, case, verification, findings)
        return
    anchor, why_not = _anchor(session, kernel, case)
    answer = _timed(item, session, benchmark, kernel, case, anchor)
    facts = _anchor_facts(anchor, why_not or answer["no_anchor"], answer["timing"])
    spent = {what: seconds - before.get(what, 0.0) for what, seconds in session.spent.items()}
    facts |= {TIME: spent | {"all": time.monotonic() - began}}
    record = _record(session, kernel, case, findings, answer, facts)
    keep(item, record)
    assert record.samples_ms
    benchmark.group = f"{case.mask.name} {case.direction}"
    benchmark.extra_info.update(_extra(case, record))
    replay(benchmark, record.samples_ms)


def _is_disabled(config: pytest.Config) -> bool:
    """Whether pytest-benchmark was told to time nothing. (Under xdist it times nothing by itself: our samples are not its own.)"""
    return bool(config.getoption("benchmark_disable")) and not config.getoption("benchmark_enable")


def _anchor(session: "Session", kernel: str, case: "Case") -> tuple[str | None, str | None]:
    """(the kernel to take turns with, or None; why there is none although one was asked for)."""
    anchor = session.anchor
    if anchor is None or anchor == kernel:
        return None, None
    outcome = timing_refusal(session, anchor, case) or session.verified_outcome(anchor, case)
    return (anchor, None) if isinstance(outcome, Passed) else (None, f"{anchor} on this case: {outcome}")


def _timed(item: pytest.Item, session: "Session", benchmark: Any, kernel: str, case: "Case", anchor: str | None) -> dict[str, Any]:
    """The worker's timing, and one more look at the results on fresh inputs; ends the test if either fails."""
    request = {"op": "time", "kernel": kernel, "case": case.id, "anchor": anchor, "memory_limit": session.options.memory_limit}
    try:
        answer = session.call(kernel, request | _effort(session), case)
    except DidNotRun as stopped:
        answer = {"outcome": stopped.outcome.to_json()}
    outcome = known(session, kernel, case, outcome_from_json(answer["outcome"]))
    if not isinstance(outcome, Passed):
        _leave_untimed(item, session, benchmark, kernel, case, outcome)
    return answer


def _leave_untimed(
    item: pytest.Item, session: "Session", benchmark: Any, kernel: str, case: "Case", outcome: Outcome, replay: str | None = None
) -> None:
    """Record a case whose timing came to nothing, and end the test. `replay` is the line of what failed, where it was another case."""
    decline(benchmark)
    record = Record(
        stage="timing",
        kernel=kernel,
        mask=case.mask.name,
        outcome=outcome.to_json(),
        reason=str(outcome),
        case=case.id,
        shape=shape_of(case),
        direction=str(case.direction),
        device=session.machine.name,
        versions=versions(session.catalogue.kernel(kernel)),
        commit=commit(),
        replay=replay or replay_line(kernel, case),
    )
    keep(item, record)
    conclude(outcome, f"{kernel} after being timed: {outcome}\ncase: {case.id}")


def _effort(session: "Session") -> dict[str, Any]:
    """How long to sample: what the preset says, and never too few samples for the gate where there is one."""
    preset = session.options.preset_values
    least = Limits().samples if session.options.baseline else 0
    return {"min_samples": max(preset.min_samples, least), "sampling_s": preset.sampling_s}


def _record(session: "Session", kernel: str, case: "Case", findings: Findings, answer: dict[str, Any], facts: dict[str, Any]) -> Record:
    timing = answer["timing"]
    return Record(
        stage="timing",
        kernel=kernel,
        mask=case.mask.name,
        outcome=Passed().to_json(),
        case=case.id,
        shape=shape_of(case),
        direction=str(case.direction),
        num_examples=2,
        verdicts=findings.verdicts(),
        samples_ms=timing["samples_ms"],
        process=answer["process"],
        plan_ms=timing["plan_ms"],
        compile_ms=max(timing["compile_ms"], session.compile_ms.get((kernel, compiled_alike(case)), 0.0)),
        launch_ms=timing["launch_ms"],
        peak_bytes=timing["peak_bytes"],
        area=case.area,
        flop=case.flop(),
        device=session.machine.name,
        device_kernels=answer["device_kernels"],
        compiled_form=timing["facts"].get("compiled_form"),
        facts=timing["facts"] | _circumstances(session, answer) | facts,
        clocks=timing["clocks"],
        peaks=session.peaks,
        versions=versions(session.catalogue.kernel(kernel)) | answer["versions"],
        commit=commit(),
        replay=replay_line(kernel, case),
    )


def _circumstances(session: "Session", answer: dict[str, Any]) -> dict[str, Any]:
    """How the samples were taken. `shared_machine` says that other tests ran beside them, so that they are rough."""
    facts = {"protocol": answer["protocol"], "throttled_samples": answer["timing"]["throttled"]}
    facts |= {"late_samples": late} if (late := answer["timing"]["late"]) else {}
    facts |= {"threads": answer["threads"]} if answer["threads"] else {}
    return facts | ({SHARED: True} if session.num_sharing > 1 else {})


def _anchor_facts(anchor: str | None, why_not: str | None, timing: dict[str, Any]) -> dict[str, Any]:
    """The anchor, the samples that it had in turns with the kernel's, and the ratio of the medians; or why there are none."""
    if anchor is None or why_not:
        return {"no_anchor": why_not} if why_not else {}
    ratio = statistics.median(timing["samples_ms"]) / statistics.median(timing["anchor_ms"])
    return {"anchor": anchor, "anchor_samples_ms": timing["anchor_ms"], "ratio_to_anchor": ratio}


def _extra(case: "Case", record: Record) -> dict[str, Any]:
    """What pytest-benchmark's JSON says beside the times."""
    assert record.samples_ms and record.flop is not None
    median_ms = statistics.median(record.samples_ms)
    return {
        "kernel": record.kernel,
        "case": record.case,
        "tflop_per_s": record.flop / median_ms / 1e9,
        "area": record.area,
        "flop": record.flop,
        "peak_bytes": record.peak_bytes,
        "plan_ms": record.plan_ms,
        "compile_ms": record.compile_ms,
        "launch_ms": record.launch_ms,
        "clocks": record.clocks,
        "facts": {name: value for name, value in record.facts.items() if name != "anchor_samples_ms"},
    }
