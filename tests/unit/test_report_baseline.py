"""The gate at the end of a run: the first run makes the baseline, later ones are compared with it and never touch it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import NotVerified, Passed
from pytest_longca.report.baseline import gate, read_baseline
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records, write_records
from pytest_longca.report.verdict import Limits


def run(processes: int, ms: float = 1.0, samples: int = 30) -> list[Record]:
    return [
        Record(stage="timing", kernel="k", mask="m", case="c", outcome=Passed().to_json(), process=f"p{i}", samples_ms=[ms] * samples)
        for i in range(processes)
    ]


def test_first_run_writes_the_baseline_and_says_so(tmp_path: Path) -> None:
    first = gate(tmp_path / "baseline.jsonl", run(5))
    assert (first.exit_code, first.comparison) == (0, None)
    assert first.text.endswith("yet, so its 5 records are it now")
    assert read_records(tmp_path / "baseline.jsonl") == run(5)


@pytest.mark.parametrize("weak", [run(4), run(5, samples=29)], ids=["few processes", "few samples"])
def test_first_run_says_if_its_baseline_cannot_gate_times(weak: list[Record], tmp_path: Path) -> None:
    text = gate(tmp_path / "baseline.jsonl", weak).text
    assert "1 of 1 timed cases have fewer than 5 processes of at least 30 samples, so their times cannot be gated" in text


def test_first_run_says_at_once_if_its_processes_differ_too_much_to_gate(tmp_path: Path) -> None:
    records = [
        record
        for ms, process in zip((1.0, 1.1, 0.9, 1.05, 0.95), run(5), strict=True)
        for record in [replace(process, samples_ms=[ms] * 30)]
    ]
    text = gate(tmp_path / "noisy.jsonl", records, Limits(slower=0.1)).text
    assert "at 10% this baseline cannot gate 1 of 1 cases: their processes differ by up to 7.9%" in text
    assert "cannot gate" not in gate(tmp_path / "wide.jsonl", records, Limits(slower=0.8)).text
    assert "cannot gate" not in gate(tmp_path / "off.jsonl", records, Limits(slower=None)).text


def test_first_run_looks_at_the_ratios_where_there_is_an_anchor(tmp_path: Path) -> None:
    times = (1.0, 1.1, 0.9, 1.05, 0.95)
    records = [
        replace(one, samples_ms=[ms] * 30, facts={"anchor": "a", "anchor_samples_ms": [ms] * 30})
        for ms, one in zip(times, run(5), strict=True)
    ]
    text = gate(tmp_path / "ratio.jsonl", records, anchor="a").text
    assert "times are gated as ratios to a in the same run" in text
    assert "cannot gate" not in text
    assert "cannot gate" in gate(tmp_path / "absolute.jsonl", records).text


def test_first_run_with_nothing_but_the_anchor_timed_makes_no_baseline(tmp_path: Path) -> None:
    reason = "the anchor k is the only kernel that was timed, so no time could be gated: name another anchor, or none"
    with pytest.raises(InvalidArgument, match=reason):
        gate(tmp_path / "baseline.jsonl", run(5), anchor="k")
    assert not (tmp_path / "baseline.jsonl").exists()
    beside = [*run(5), *(replace(record, kernel="other") for record in run(5))]
    assert gate(tmp_path / "beside.jsonl", beside, anchor="k").exit_code == 0
    assert gate(tmp_path / "off.jsonl", run(5), Limits(slower=None), anchor="k").exit_code == 0


def test_later_runs_are_compared_and_leave_the_baseline_alone(tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    gate(path, run(5))
    before = path.read_bytes()
    assert gate(path, run(2)).exit_code == 0
    slower = gate(path, run(2, ms=1.1))
    assert slower.exit_code == 1
    assert "! slower (time): k c timing: +10.0% where 5% must be caught" in slower.text
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "own",
    [[], [replace(run(1)[0], outcome=NotVerified("no time", is_postponed=True).to_json())], [replace(run(1)[0], case="added")]],
    ids=["all resumed", "postponed", "another case"],
)
def test_a_run_that_judged_no_case_of_the_baseline_itself_is_not_compared(own: list[Record], tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    gate(path, run(5))
    with pytest.raises(InvalidArgument, match="this run itself judged none of the baseline's cases"):
        gate(path, [*run(2), *own], own=own)
    assert gate(path, run(2), own=run(2)[1:]).exit_code == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([*run(5), replace(run(1)[0], device="NVIDIA H100")], "the baseline mixes records of several devices"),
        ([replace(record, kernel="a") for record in run(5)], "the anchor a is the only kernel that was timed"),
    ],
)
def test_a_baseline_that_cannot_gate_whatever_the_run_finds_is_told_when_it_is_read(
    records: list[Record], message: str, tmp_path: Path
) -> None:
    write_records(tmp_path / "baseline.jsonl", records)
    with pytest.raises(InvalidArgument, match=message):
        read_baseline(tmp_path / "baseline.jsonl", Limits(), "a")


def test_a_broken_baseline_is_an_error_and_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="line 1: not a record"):
        gate(path, run(5))
    assert path.read_text() == "{"
