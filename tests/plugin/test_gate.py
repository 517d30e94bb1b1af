"""The gate at the end of a run: the first run makes the baseline, later ones are held to it, and what cannot be told is not green."""

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_longca.outcome import Passed
from pytest_longca.report.record import Record
from pytest_longca.report.store import write_records
from tests.plugin.conftest import KERNELS, Run

CASE = "causal(seqlen_q=32,seqlen_kv=32)/b1/h2:1/d32/fp32/fwd/s0"


@pytest.fixture
def timed(run: Run) -> Run:
    """Time naive on one case against `baseline.jsonl`."""

    def timed(*args: str) -> pytest.RunResult:
        where = ("--longca-preset=smoke", "--longca-masks=causal", "--longca-seqlens=32", "--longca-passes=fwd", "-k", "timing")
        return run(*where, "--longca-kernels=naive", "--longca-baseline=baseline.jsonl", *args)

    return timed


def write_baseline(ms: float, **facts: Any) -> bytes:
    """A baseline in which the case takes `ms`."""
    about: dict[str, Any] = {"kernel": "naive", "mask": "causal", "case": CASE, "outcome": Passed().to_json(), "device": "CPU"}
    write_records("baseline.jsonl", [Record(stage="timing", process=f"p{i}", samples_ms=[ms] * 30, facts=facts, **about) for i in range(5)])
    return Path("baseline.jsonl").read_bytes()


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_first_run_times_in_five_processes_and_writes_a_baseline_that_can_gate(timed: Run) -> None:
    result = timed()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gate: first run: no baseline at baseline.jsonl yet, so its 5 records are it now*"])
    assert len({record["process"] for record in lines("baseline.jsonl")}) == 5
    assert all(len(record["samples_ms"]) >= 30 for record in lines("baseline.jsonl"))


def test_a_slower_kernel_fails_the_run_and_reports_tell_it(timed: Run) -> None:
    before = write_baseline(1e-6)
    result = timed("--longca-html=page.html", "--longca-md=summary.md")
    assert result.ret == 1
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["gate: ! slower (time): naive causal*", "gate: REGRESSED (slower): 1 case compared", "report: page.html"])
    assert "## Gate: REGRESSED" in Path("summary.md").read_text()
    assert "REGRESSED" in Path("page.html").read_text()
    assert Path("baseline.jsonl").read_bytes() == before


def test_a_broken_baseline_ends_the_run_before_it_starts_and_is_left_alone(pytester: pytest.Pytester) -> None:
    Path("old.jsonl").write_text('{"schema": 0}')
    for option in ("baseline", "resume"):
        result = pytester.runpytest_subprocess("--longca-kernels=naive", f"--longca-{option}=old.jsonl")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stdout.no_fnmatch_line("*")
        says = f"ERROR: --longca-{option}: old.jsonl, line 1: a record of schema 0; this version reads schema 1*"
        pytest.LineMatcher([line for line in result.errlines if line]).fnmatch_lines([says], consecutive=True)
        assert len([line for line in result.errlines if line]) == 1
        assert Path("old.jsonl").read_text() == '{"schema": 0}'


@pytest.mark.parametrize("option", ["html", "md", "baseline"])
def test_a_file_in_a_folder_that_does_not_exist_is_a_usage_error(run: Run, option: str) -> None:
    result = run("--longca-kernels=naive", f"--longca-{option}=/no/such/folder/file")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines).fnmatch_lines([f"*--longca-{option}: the folder of /no/such/folder/file does not exist*"])


@pytest.mark.parametrize("option", ["html", "md", "baseline", "repro"])
def test_a_place_that_takes_no_file_is_a_usage_error(run: Run, option: str) -> None:
    result = run("-q", "--longca-kernels=naive", f"--longca-{option}=/proc/x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines).fnmatch_lines([f"ERROR: --longca-{option}: /proc/x cannot be written (*"])


@pytest.mark.parametrize("option", ["json", "resume"])
def test_a_run_that_would_write_into_its_baseline_does_not_start(timed: Run, option: str) -> None:
    before = write_baseline(1e-6)
    result = timed(f"--longca-{option}=./baseline.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines).fnmatch_lines([f"ERROR: --longca-{option}: ./baseline.jsonl is the baseline*"])
    assert Path("baseline.jsonl").read_bytes() == before


def test_a_run_with_nothing_left_to_run_is_not_compared(timed: Run) -> None:
    write_baseline(1.0)
    Path("records.jsonl").write_bytes(Path("baseline.jsonl").read_bytes())
    result = timed("--longca-resume=records.jsonl")
    assert result.ret == 2
    result.stdout.fnmatch_lines(
        ["resume: nothing is left to run", "gate: this run itself judged none of the baseline's cases*"], consecutive=True
    )
    result.stdout.no_fnmatch_line("*no regression*")


def test_a_budget_without_time_for_any_case_compares_nothing(timed: Run) -> None:
    write_baseline(1.0)
    result = timed("--longca-budget=0.001s", "--longca-allow=new-skip")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["gate: this run itself judged none of the baseline's cases*"])


@pytest.mark.parametrize("exists", [True, False], ids=["later run", "first run"])
def test_an_anchor_that_is_the_only_kernel_is_a_usage_error(timed: Run, exists: bool) -> None:
    if exists:
        write_baseline(1.0)
    result = timed("--longca-anchor=naive")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    where, what = (
        ("baseline", "the anchor naive is the only kernel that was timed") if exists else ("anchor", "naive is the only kernel of this run")
    )
    pytest.LineMatcher(result.errlines).fnmatch_lines(
        [f"ERROR: --longca-{where}: {what}, so no time could be gated: name another anchor, or none"]
    )
    assert Path("baseline.jsonl").exists() is exists


def test_the_anchor_alone_may_be_replayed_and_judged_where_no_time_is_gated(run: Run, timed: Run) -> None:
    alone = ("--longca-kernels=naive", "--longca-anchor=naive")
    assert run(*alone, f"--longca-case={CASE}", "--longca-baseline=case.jsonl").ret == 0
    assert timed("--longca-anchor=naive", "--longca-fail-slower=off").ret == 0


def test_a_run_that_was_cut_short_makes_no_baseline(timed: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNELS)
    result = timed("--maxfail=1", "--longca-kernels=crashing")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["gate: the run was cut short, so nothing was compared and no baseline was written"])
    assert not Path("baseline.jsonl").exists()


def test_an_anchor_is_timed_in_turns_and_the_gate_takes_the_ratio(timed: Run) -> None:
    write_baseline(0.01, anchor="sdpa", anchor_samples_ms=[1e-5] * 30)
    result = timed("--longca-anchor=sdpa", "--longca-json=new.jsonl", "--longca-allow=too-noisy")
    assert result.ret == 0, "slower than 0.01 ms, and less than the thousand times the anchor's time that it was"
    new: list[Any] = [record["facts"] for record in lines("new.jsonl")]
    assert [fact["anchor"] for fact in new] == ["sdpa"] * 2
    assert all(len(fact["anchor_samples_ms"]) >= 30 and 0 < fact["ratio_to_anchor"] < 1e3 for fact in new)
