"""Timings of a session: what a record holds, what is not timed and why, a run in slices, and pytest-benchmark's own options."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from pytest_longca.outcome import Passed, Wrong
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records, write_records
from tests.plugin.conftest import KERNELS, Run

WHERE = ("--longca-preset=smoke", "--longca-masks=causal", "--longca-seqlens=32", "-k", "timing", "--longca-json=records.jsonl")


@pytest.fixture
def timed(run: Run) -> Run:
    """Time kernels on one case of 32 tokens, forward only."""

    def timed(*args: str) -> pytest.RunResult:
        return run(*WHERE, "--longca-passes=fwd", *args)

    return timed


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()]


def test_a_record_holds_samples_figures_and_the_commands_and_benchmark_gets_the_same_times(timed: Run) -> None:
    result = timed("--longca-kernels=naive", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["longca: time: * s; kernels * %, reference * %, the harness itself * %"])
    (record,) = records()
    took = record["facts"]["time_s"]
    assert took.keys() == {"kernels", "reference", "all"} and 0 < took["kernels"] + took["reference"] < took["all"]
    assert len(record["samples_ms"]) >= 10
    assert (record["area"], record["flop"]) == (2 * 32 * 33 // 2, 2 * 2 * 32 * 33 // 2 * 64)
    assert record["command"].startswith("pytest ") and "--longca-kernels=naive" in record["command"]
    assert record["replay"] == f"pytest --longca-kernels=naive --longca-case='{record['case']}'"
    assert record["facts"]["threads"] >= 1 and "shared_machine" not in record["facts"]
    (bench,) = json.loads(Path("bench.json").read_text())["benchmarks"]
    assert bench["stats"]["median"] == pytest.approx(statistics.median(record["samples_ms"]) / 1e3)
    assert bench["extra_info"]["tflop_per_s"] == pytest.approx(record["flop"] / statistics.median(record["samples_ms"]) / 1e9)


def test_benchmark_disable_verifies_and_times_nothing(timed: Run) -> None:
    timed("--longca-kernels=naive", "--benchmark-disable").assert_outcomes(passed=1)
    (record,) = records()
    assert (record["outcome"], record["samples_ms"]) == ({"kind": "passed"}, None)


def test_a_kernel_that_is_wrong_is_not_timed_and_leaves_no_benchmark(timed: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNELS)
    result = timed("--longca-kernels=wrong_dk", "--longca-passes=fwd_bwd")
    result.assert_outcomes(failed=1)
    (record,) = records()
    assert (record["outcome"]["kind"], record["samples_ms"]) == ("wrong", None)
    result.stdout.no_fnmatch_line("*benchmark:*tests*")


@pytest.mark.parametrize("items", ["probes or timing", "timing"])
def test_a_kernel_fails_once_on_a_mask_and_its_timings_say_that_they_were_not_made(run: Run, pytester: pytest.Pytester, items: str) -> None:
    pytester.makeconftest(KERNELS)
    named = [arg if arg != "timing" else items for arg in WHERE]
    result = run(*named, "--longca-kernels=wrong_dk,naive", "--longca-passes=bwd,fwd_bwd", "--longca-processes=2")
    has_probes = "probes" in items
    result.assert_outcomes(failed=1, skipped=4 if has_probes else 3, passed=5 if has_probes else 4)
    untimed = [record for record in records() if record["stage"] == "timing" and record["kernel"] == "wrong_dk"]
    reasons = [record["reason"] for record in untimed]
    assert reasons[-3:] == ["not verified: not timed: verification failed on the mask (wrong)"] * 3
    assert not any(record["samples_ms"] for record in untimed)
    (failed,) = (record for record in records() if record["outcome"]["kind"] == "wrong")
    assert {record["replay"] for record in untimed} == {failed["replay"]}, "the case that fails, not one that may pass"
    result.stdout.fnmatch_lines(["wrong_dk: not verified: not timed: verification failed on the mask (wrong)*"])


def test_an_interpreted_kernel_is_not_timed_and_says_why(timed: Run) -> None:
    timed("--longca-kernels=flashmask").assert_outcomes(skipped=1)
    (record,) = records()
    assert record["reason"] == "not verified: interpreted on a CPU: its time means nothing; not verified on hardware"


def test_operands_above_the_memory_limit_are_out_of_memory_before_anything_runs(timed: Run) -> None:
    operands = 4 * 32 * 32 * 2 * (2 + 1)  # q and out have 2 heads, k and v one
    timed("--longca-kernels=naive", f"--longca-memory-limit={operands - 1}B").assert_outcomes(skipped=1)
    (record,) = records()
    assert (record["outcome"]["kind"], record["outcome"]["wanted_bytes"]) == ("out_of_memory", operands)


def test_a_run_in_slices_loses_nothing_and_ends_green(timed: Run) -> None:
    args = ("--longca-kernels=naive,sdpa", "--longca-resume=records.jsonl")
    first = timed(*args, "--longca-budget=0.001s")
    first.assert_outcomes(skipped=2)
    assert first.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    first.stdout.fnmatch_lines(["budget: nothing finished, 2 items are left: give it more time"])
    assert [record["outcome"]["is_postponed"] for record in records()] == [True, True]
    second = timed(*args, "--longca-budget=5m")
    second.assert_outcomes(passed=2)
    assert second.ret == 0
    second.stdout.no_fnmatch_line("*outside --longca-budget*")
    second.stdout.fnmatch_lines(["resume: nothing is left to run"])
    third = timed(*args, "--longca-md=summary.md")
    assert third.ret == 0
    third.stdout.fnmatch_lines(["fastest verified kernel:", "resume: nothing is left to run", "*deselected*"])
    assert "Fastest verified kernel" in Path("summary.md").read_text()
    assert len(records()) == 4


@pytest.mark.parametrize("what", [("--longca-kernels=naive", "--longca-masks=causal"), ("--longca-selftest",)], ids=["suite", "selftest"])
def test_a_budget_that_is_over_skips_what_is_about_no_cell_too(run: Run, what: tuple[str, ...]) -> None:
    result = run(*what, "--longca-budget=0.001s", "--longca-json=records.jsonl")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED and set(result.parseoutcomes()) <= {"skipped", "warnings"}
    result.stdout.fnmatch_lines(["budget: nothing finished, * items are left: give it more time"])
    kept = records() if Path("records.jsonl").exists() else []
    assert all(record["kernel"] and record["mask"] for record in kept)


@pytest.mark.parametrize(("is_new", "more"), [(True, ()), (False, ()), (False, ("-n1",))])
def test_a_resumed_run_that_selects_nothing_is_a_mistake_and_no_run_that_is_done(run: Run, is_new: bool, more: tuple[str, ...]) -> None:
    case = "causal(seqlen_q=32,seqlen_kv=32)/b1/h2:1/d32/fp32/fwd/s0"
    before = [] if is_new else [Record(stage="timing", kernel="naive", mask="causal", case=case, outcome=Passed().to_json())]
    if before:
        write_records("records.jsonl", before)
    result = run("--longca-kernels=naive", *WHERE[:3], "--longca-resume=records.jsonl", "--longca-md=page.md", "-k", "timnig", *more)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --longca-resume: -k 'timnig' selects no test: nothing is resumed"])
    result.stdout.no_fnmatch_line("*nothing is left to run*")
    assert not Path("page.md").exists() and (read_records("records.jsonl") if Path("records.jsonl").exists() else []) == before


def test_what_failed_before_keeps_a_resumed_run_red(timed: Run) -> None:
    case = "causal(seqlen_q=32,seqlen_kv=32)/b1/h2:1/d32/fp32/fwd/s0"
    write_records("old.jsonl", [Record(stage="timing", kernel="naive", mask="causal", case=case, outcome=Wrong("dk").to_json())])
    result = timed("--longca-kernels=naive", "--longca-resume=old.jsonl")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["naive: wrong: dk*"])


def test_a_slice_in_which_nothing_fitted_tells_that_first_even_where_something_failed_before(timed: Run) -> None:
    write_records("old.jsonl", [Record(stage="timing", kernel="naive", mask="causal", case="c", outcome=Wrong("dk").to_json())])
    result = timed("--longca-kernels=naive", "--longca-resume=old.jsonl", "--longca-budget=0.001s")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["budget: nothing finished, 1 item is left: give it more time"])


def test_what_is_about_no_cell_leaves_nothing_for_a_next_slice(run: Run) -> None:
    whole = ("--longca-preset=smoke", "--longca-masks=causal", "--longca-kernels=naive", "--longca-seqlens=32", "--longca-passes=fwd")
    assert run(*whole, "--longca-resume=records.jsonl").ret == 0
    result = run(*whole, "--longca-resume=records.jsonl", "--longca-budget=0.001s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["resume: nothing is left to run"])


def test_beside_other_xdist_workers_examples_pass_and_times_are_told_to_be_rough(run: Run) -> None:
    where = [arg if arg != "timing" else "timing or examples" for arg in WHERE]
    result = run("-n2", "--longca-kernels=naive", "--longca-passes=fwd", "--longca-examples=3", *where)
    result.assert_outcomes(passed=2)
    record = next(record for record in records() if record["stage"] == "timing")
    assert record["facts"]["shared_machine"] is True
    assert len(record["samples_ms"]) >= 10
    result.stdout.fnmatch_lines(["*= longca =*", "fastest verified kernel (rough: other tests ran beside the timings):"])


def test_a_budget_orders_items_and_processes_name_theirs(run: Run) -> None:
    result = run(*WHERE, "--longca-kernels=naive,sdpa", "--longca-processes=2", "--longca-budget=9m", "--collect-only", "-q")
    shown = [line.split("[")[1].rstrip("]") for line in result.outlines if "test_timing" in line]
    case = "causal(seqlen_q=32,seqlen_kv=32)/b1/h2:1/d32/fp32/{}/s0"
    one = [f"{kernel}-{case.format(direction)}" for direction in ("bwd", "fwd") for kernel in ("naive", "sdpa")]
    assert shown == [*one, *(f"{name}-p2" for name in one)]
