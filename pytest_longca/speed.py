"""What the suite's timing test does: verify, time, verify again, record; no speed of a kernel that was not verified."""

import statistics
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca.conformance import Findings, commit, conclude, finish, keep, known, versions
from pytest_longca.errors import DidNotRun
from pytest_longca.ids import parse_case
from pytest_longca.outcome import Passed
from pytest_longca.replay import replay
from pytest_longca.report.record import Record, shape_of

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.session import Session


def run_timing(item: pytest.Item, session: "Session", benchmark: Any, kernel: str, case_id: str) -> None:
    """Time a kernel on one case and hand the samples to pytest-benchmark. A case that is not right is not timed."""
    case = parse_case(case_id, session.catalogue.masks())
    verification, findings = session.verify(kernel, case, ("truth",)), Findings()
    findings.add(case, verification)
    if not isinstance(verification.outcome, Passed):
        finish(item, session, "timing", kernel, case, verification, findings)
    answer = _timed(item, session, kernel, case)
    record = _record(session, kernel, case, findings, answer)
    keep(item, record)
    assert record.samples_ms
    benchmark.group = f"{case.mask.name} {case.direction}"
    benchmark.extra_info.update(_extra(case, record))
    replay(benchmark, record.samples_ms)


def _timed(item: pytest.Item, session: "Session", kernel: str, case: "Case") -> dict[str, Any]:
    """The worker's timing, and one more look at the results on fresh inputs; ends the test if either fails."""
    preset = session.options.preset_values
    request = {"op": "time", "kernel": kernel, "case": case.id, "min_samples": preset.min_samples, "sampling_s": preset.sampling_s}
    try:
        answer = session.call(kernel, request)
    except DidNotRun as stopped:
        answer = {"outcome": stopped.outcome.to_json()}
    from pytest_longca.outcome import outcome_from_json

    outcome = known(session, kernel, case, outcome_from_json(answer["outcome"]))
    if not isinstance(outcome, Passed):
        keep(item, Record(stage="timing", kernel=kernel, mask=case.mask.name, case=case.id, outcome=outcome.to_json(), reason=str(outcome)))
        conclude(outcome, f"{kernel} after being timed: {outcome}\ncase: {case.id}")
    return answer


def _record(session: "Session", kernel: str, case: "Case", findings: Findings, answer: dict[str, Any]) -> Record:
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
        compile_ms=timing["compile_ms"],
        launch_ms=timing["launch_ms"],
        peak_bytes=timing["peak_bytes"],
        area=case.area,
        flop=case.flop(),
        device=session.machine.name,
        device_kernels=answer["device_kernels"],
        compiled_form=timing["facts"].get("compiled_form"),
        facts={**timing["facts"], "protocol": answer["protocol"], "throttled_samples": timing["throttled"]},
        clocks=timing["clocks"],
        versions=versions(session.catalogue.kernel(kernel)),
        commit=commit(),
    )


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
        "facts": record.facts,
    }
