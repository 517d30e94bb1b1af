"""The gate at the end of a run: the first run makes the baseline, later ones are compared with it and never touch it."""

from pathlib import Path

import pytest

from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import Passed
from pytest_longca.report.baseline import gate
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records


def run(processes: int, ms: float = 1.0, samples: int = 30) -> list[Record]:
    return [
        Record(stage="timing", kernel="k", mask="m", case="c", outcome=Passed().to_json(), process=f"p{i}", samples_ms=[ms] * samples)
        for i in range(processes)
    ]


def test_first_run_writes_the_baseline_and_says_so(tmp_path: Path) -> None:
    first = gate(tmp_path / "baseline.jsonl", run(5))
    assert (first.exit_code, first.comparison) == (0, None)
    assert first.text.endswith("yet, so these 5 records are it now")
    assert read_records(tmp_path / "baseline.jsonl") == run(5)


@pytest.mark.parametrize("weak", [run(4), run(5, samples=29)], ids=["few processes", "few samples"])
def test_first_run_says_if_its_baseline_cannot_gate_times(weak: list[Record], tmp_path: Path) -> None:
    text = gate(tmp_path / "baseline.jsonl", weak).text
    assert "1 of 1 timed cases have fewer than 5 processes of at least 30 samples, so their times cannot be gated" in text


def test_later_runs_are_compared_and_leave_the_baseline_alone(tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    gate(path, run(5))
    before = path.read_bytes()
    assert gate(path, run(2)).exit_code == 0
    slower = gate(path, run(2, ms=1.1))
    assert slower.exit_code == 1
    assert "! slower (time): k c timing: +10.0% where 5% must be caught" in slower.text
    assert path.read_bytes() == before


def test_a_broken_baseline_is_an_error_and_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="line 1: not a record"):
        gate(path, run(5))
    assert path.read_text() == "{"
