"""The gate: each verdict, each way in which two files cannot be compared."""

import dataclasses
import math
from typing import Any

import pytest

from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import Crashed, KnownWrong, OutOfMemory, Passed, TimedOut, Unsupported, Wrong
from pytest_longca.report.compare import compare, relative_change, spread, two_looks
from pytest_longca.report.gate import conclusion, render_comparison
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import MEANING, Comparison, Limits, Verdict

SHAPE = {"batch": 1, "seqlen_q": 8192, "seqlen_kv": 8192, "heads_q": 64, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128, "dtype": "bf16"}
GIB = 2**30


def timing(process: int = 0, ms: float = 1.0, kernel: str = "flex", samples: int = 30, **changes: Any) -> Record:
    """One process's timing of one case."""
    values: dict[str, Any] = {
        "stage": "timing",
        "kernel": kernel,
        "mask": "causal",
        "case": "causal(seqlen_q=8192)/d128/bf16/fwd",
        "direction": "fwd",
        "shape": SHAPE,
        "outcome": Passed().to_json(),
        "samples_ms": [ms] * samples,
        "process": f"p{process}",
        "peak_bytes": 4 * GIB,
        "flop": 10**12,
        "verdicts": [{"tensor": "out", "error_over_limit": 0.2}],
        "device": "NVIDIA H200",
        "versions": {"driver": "570.1"},
    }
    return Record(**values | changes)


def run(processes: int = 5, ms: float = 1.0, **changes: Any) -> list[Record]:
    """A whole run: several processes whose medians differ a little."""
    return [timing(process, ms * (1 + 0.001 * (process % 3 - 1)), **changes) for process in range(processes)]


def only(comparison: Comparison) -> Verdict:
    (row,) = comparison.rows
    return row.verdict


def test_a_run_equal_to_its_baseline_is_fine() -> None:
    result = compare(run(), run(2))
    assert only(result) is Verdict.OK
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"ms": 1.05}, Verdict.SLOWER),
        ({"peak_bytes": int(4.4 * GIB)}, Verdict.HUNGRIER),
        ({"verdicts": [{"tensor": "out", "error_over_limit": 0.1}, {"tensor": "dk", "error_over_limit": 0.4}]}, Verdict.LESS_ACCURATE),
        ({"verdicts": [{"tensor": "out", "error_over_limit": "inf"}]}, Verdict.LESS_ACCURATE),
        ({"outcome": Wrong("dk is off").to_json()}, Verdict.WRONG),
        ({"outcome": KnownWrong("dk is off", "entry").to_json()}, Verdict.WRONG),
        ({"outcome": Crashed("signal 11").to_json()}, Verdict.WRONG),
        ({"outcome": TimedOut("after 120 s").to_json()}, Verdict.WRONG),
        ({"outcome": OutOfMemory("wanted 80 GB").to_json()}, Verdict.HUNGRIER),
        ({"outcome": Unsupported("no backward").to_json()}, Verdict.NEW_SKIP),
    ],
)
def test_a_case_that_became_worse_fails_with_its_verdict(changes: dict[str, Any], verdict: Verdict) -> None:
    result = compare(run(), run(2, **changes))
    assert only(result) is verdict
    assert result.exit_code == 1


def test_a_faster_and_leaner_kernel_is_fine() -> None:
    result = compare(run(), run(2, ms=0.5, peak_bytes=GIB))
    assert only(result) is Verdict.OK
    assert [finding.change for finding in result.rows[0].findings if finding.quantity == "time"] == [pytest.approx(-0.5, abs=0.01)]


def test_a_slowdown_below_half_the_limit_is_fine() -> None:
    assert only(compare(run(), run(2, ms=1.02))) is Verdict.OK


def test_one_slow_look_alone_is_no_regression() -> None:
    new = [timing(0, 1.2), timing(1, 1.0), timing(2, 1.2), timing(3, 1.0)]
    assert only(compare(run(), new)) is Verdict.TOO_NOISY
    assert only(compare(run(), [timing(0, 1.028), timing(1, 1.0)], Limits(slower=0.5))) is Verdict.OK


def test_a_slowdown_seen_in_one_process_only_cannot_be_told() -> None:
    result = compare(run(), [timing(0, 1.2)])
    assert only(result) is Verdict.NOT_COMPARABLE
    assert "one process only" in result.rows[0].findings[0].reason
    assert result.exit_code == 2


def noisy(**changes: Any) -> list[Record]:
    """A baseline whose processes differ by more than 5 % / 8."""
    return [timing(process, ms, **changes) for process, ms in enumerate((1.0, 1.05, 0.96, 1.02, 0.98))]


def test_a_noisy_timing_beside_one_that_was_gated_is_shown_and_does_not_fail() -> None:
    result = compare([*noisy(), *run(case="quiet/fwd")], [*run(2, ms=1.05), *run(2, case="quiet/fwd")])
    assert sorted(row.verdict for row in result.rows) == [Verdict.OK, Verdict.TOO_NOISY]
    assert result.exit_code == 0
    assert conclusion(result) == "no regression: 2 cases compared, 1 of them not in full (too-noisy)"
    assert compare(noisy(), run(2, ms=1.05), forbid=frozenset({Verdict.TOO_NOISY})).exit_code == 2


def test_a_noisy_timing_tells_its_change_its_noise_and_the_limit_that_could_be_held() -> None:
    (row,) = compare(noisy(), run(2, ms=1.138), Limits(slower=0.1)).rows
    noise = spread([[1.0, 1.05, 0.96, 1.02, 0.98], [1.136862, 1.138]])
    assert row.findings[0].reason == f"+13.7%, noise {noise:.1%}: this machine can hold {math.ceil(800 * noise)}%, not 10%"
    assert "8 times their spread" in MEANING[Verdict.TOO_NOISY]


@pytest.mark.parametrize("examples", [[], [timing(stage="examples", case=None, samples_ms=None)]])
def test_a_gate_in_which_no_timing_could_be_gated_does_not_pass(examples: list[Record]) -> None:
    old, new = [*noisy(), *noisy(kernel="fa2"), *examples], [*run(2), *run(2, kernel="fa2"), *examples]
    result = compare(old, new)
    assert result.exit_code == 2
    assert conclusion(result) == "NOTHING GATED: 0 of 2 timings (too-noisy): give a limit that can be held here, or allow them by name"
    allowed = compare(old, new, allow=frozenset({Verdict.TOO_NOISY}))
    assert allowed.exit_code == 0
    assert conclusion(allowed) == (f"no regression: {2 + len(examples)} cases compared, 2 of them not in full (too-noisy)")


def test_a_regression_of_another_quantity_is_one_even_where_no_timing_could_be_gated() -> None:
    assert compare(noisy(), run(2, peak_bytes=8 * GIB)).exit_code == 1


def test_a_change_of_eight_spreads_counts_even_where_it_is_noisy() -> None:
    wide = [timing(process, ms) for process, ms in enumerate((1.0, 1.02, 0.99, 1.01, 0.98))]
    assert only(compare(wide, run(2, ms=1.5))) is Verdict.SLOWER


@pytest.mark.parametrize(
    ("baseline", "new", "verdict"),
    [
        (run(4), run(2), Verdict.NOT_COMPARABLE),
        (run(5, samples=29), run(2), Verdict.NOT_COMPARABLE),
        ([timing(0) for _ in range(5)], run(2), Verdict.NOT_COMPARABLE),
        (run(), run(2, samples=10), Verdict.NOT_COMPARABLE),
        (run(), run(2, samples_ms=None), Verdict.NOT_COMPARABLE),
        (run(), run(2, clocks={"throttled": True}), Verdict.THROTTLED),
        (run(clocks={"throttled": True}), run(2), Verdict.THROTTLED),
    ],
    ids=["few processes", "few samples", "one process five times", "few new samples", "not timed now", "throttled", "throttled then"],
)
def test_what_rests_on_too_little_cannot_be_told(baseline: list[Record], new: list[Record], verdict: Verdict) -> None:
    result = compare(baseline, new)
    assert only(result) is verdict
    assert result.exit_code == 2


def test_cases_missing_from_either_side_have_verdicts_and_flags() -> None:
    both, gone, added = run(), run(case="old/fwd"), run(case="new/fwd")
    result = compare([*both, *gone], [*both, *added])
    assert {row.key.case: row.verdict for row in result.rows}["old/fwd"] is Verdict.MISSING
    assert {row.key.case: row.verdict for row in result.rows}["new/fwd"] is Verdict.ADDED
    assert result.exit_code == 1
    assert compare(both, [*both, *added]).exit_code == 2
    assert conclusion(result) == "REGRESSED (missing): 1 case compared; 1 missing, 1 added"
    allow = frozenset({Verdict.MISSING, Verdict.ADDED})
    assert compare([*both, *gone], [*both, *added], allow=allow).exit_code == 0


def test_cases_that_could_not_be_compared_are_not_counted_as_compared() -> None:
    gone = [record for number in range(3) for record in run(case=f"gone{number}/fwd")]
    result = compare([*run(), *run(case="short/fwd"), *gone], [*run(1), *run(2, case="short/fwd", samples=10)], Limits(memory=None))
    assert conclusion(result) == "REGRESSED (missing): 1 case compared; 3 missing, 1 not-comparable"
    nothing = compare([*run(), *gone], run(2, samples=10))
    assert conclusion(nothing) == "REGRESSED (missing): 0 cases compared; 3 missing, 1 not-comparable"
    assert render_comparison(nothing).endswith(conclusion(nothing))


@pytest.mark.parametrize(
    ("changes", "verdict"), [({"device": "NVIDIA H100"}, Verdict.OTHER_DEVICE), ({"versions": {"driver": "580.2"}}, Verdict.OTHER_DRIVER)]
)
def test_another_device_or_driver_is_named_and_can_be_allowed(changes: dict[str, Any], verdict: Verdict) -> None:
    result = compare(run(), run(2, **changes))
    assert [finding.verdict for finding in result.run] == [verdict]
    assert result.exit_code == 2
    assert compare(run(), run(2, **changes), allow=frozenset({verdict})).exit_code == 0


def test_what_was_wrong_before_is_no_regression_and_says_so() -> None:
    wrong = Wrong("dk is off").to_json()
    result = compare(run(outcome=wrong), run(2, outcome=wrong))
    assert only(result) is Verdict.OK
    assert "as before: wrong: dk is off" in result.rows[0].findings[0].reason


def test_an_anchor_carries_a_baseline_to_a_slower_machine() -> None:
    old = [*run(), *run(kernel="sdpa", ms=2.0)]
    new = [*run(2, ms=1.3), *run(2, kernel="sdpa", ms=2.6)]
    assert compare(old, new).exit_code == 1
    assert compare(old, new, anchor="sdpa").exit_code == 0
    slower = [*run(2, ms=1.3 * 1.05), *run(2, kernel="sdpa", ms=2.6)]
    verdicts = {row.key.kernel: row.verdict for row in compare(old, slower, anchor="sdpa").rows}
    assert verdicts == {"flex": Verdict.SLOWER, "sdpa": Verdict.OK}


def test_an_anchor_that_was_not_timed_on_the_case_cannot_tell() -> None:
    result = compare(run(), run(2), anchor="sdpa")
    assert only(result) is Verdict.NOT_COMPARABLE
    assert "beside the anchor sdpa" in result.rows[0].findings[0].reason


def test_an_anchor_that_is_the_only_timed_kernel_gates_nothing() -> None:
    with pytest.raises(InvalidArgument, match="the anchor flex is the only kernel that was timed, so no time could be gated"):
        compare(run(), run(2), anchor="flex")
    assert compare(run(), run(2), Limits(slower=None), anchor="flex").exit_code == 0


def test_a_limit_of_less_than_a_percent_is_told_as_it_is() -> None:
    assert "where 0.5% must be caught" in compare(run(), run(2, ms=1.5), Limits(slower=0.005)).rows[0].findings[0].reason


def test_floors_keep_tiny_differences_of_tiny_kernels_out() -> None:
    assert only(compare(run(ms=0.01), run(2, ms=0.0106))) is Verdict.OK
    assert only(compare(run(peak_bytes=2**20), run(2, peak_bytes=2**21))) is Verdict.OK
    tiny = [{"tensor": "out", "error_over_limit": 0.001}]
    assert only(compare(run(verdicts=tiny), run(2, verdicts=[{"tensor": "out", "error_over_limit": 0.005}]))) is Verdict.OK


def test_a_cell_whose_drawn_case_fails_is_wrong_and_not_a_missing_and_a_new_one() -> None:
    passed = timing(stage="examples", case=None, direction=None, samples_ms=None)
    failed = timing(stage="examples", case="causal(seqlen_q=3)/fwd", samples_ms=None, outcome=Wrong("off").to_json())
    assert only(compare([passed], [failed])) is Verdict.WRONG


def test_a_case_that_failed_before_it_was_timed_is_still_that_case() -> None:
    assert only(compare(run(), run(2, direction=None, samples_ms=None, outcome=Wrong("off").to_json()))) is Verdict.WRONG


def test_drawn_examples_are_compared_by_outcome_only() -> None:
    drawn: dict[str, Any] = {"stage": "examples", "case": None, "samples_ms": None, "peak_bytes": None}
    worse = [{"tensor": "out", "error_over_limit": 0.9}]
    assert only(compare(run(1, **drawn), run(1, **drawn, verdicts=worse))) is Verdict.OK


@pytest.mark.parametrize(
    ("baseline", "new", "message"),
    [
        ([*run(), timing(9, device="NVIDIA H100")], run(), "the baseline mixes records of several devices"),
        (run(), [*run(), timing(9, versions={"driver": "1"})], "the new file mixes records of several drivers"),
        (run(), run(case="another/fwd"), "no case in common"),
    ],
)
def test_files_that_are_no_pair_are_refused(baseline: list[Record], new: list[Record], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        compare(baseline, new)


@pytest.mark.parametrize("limit", [0.0, -0.1, float("inf"), float("nan")])
def test_a_limit_that_cannot_be_is_refused(limit: float) -> None:
    with pytest.raises(InvalidArgument, match="the limit slower"):
        Limits(slower=limit)


def test_a_quantity_without_a_limit_is_left_alone() -> None:
    off = Limits(slower=None, memory=None, error=None)
    assert only(compare(run(), run(2, ms=3.0, peak_bytes=64 * GIB), off)) is Verdict.OK


def test_looks_share_no_process_and_lose_none() -> None:
    assert two_looks([1, 2, 3, 4, 5]) == [[1, 3, 5], [2, 4]]
    assert two_looks([1]) == [[1]]


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [(2.0, 3.0, 0.5), (0.0, 0.0, 0.0), (0.0, 1.0, float("inf")), (float("inf"), float("inf"), 0.0), (float("inf"), 1.0, -1.0)],
)
def test_change_is_a_number_even_from_nothing_and_infinity(before: float, now: float, change: float) -> None:
    assert relative_change(before, now) == change


def test_spread_is_that_of_each_side_about_its_own_mean() -> None:
    assert spread([[1.0, 1.0], [2.0, 2.0]]) == 0.0
    assert spread([[0.9, 1.1]]) == pytest.approx(0.02**0.5)
    assert spread([[1.0]]) == 0.0


def test_gravest_finding_names_the_row() -> None:
    (row,) = compare(run(), run(2, ms=1.2, peak_bytes=8 * GIB)).rows
    assert [finding.verdict for finding in row.findings[:2]] == [Verdict.SLOWER, Verdict.HUNGRIER]
    assert dataclasses.replace(row).verdict is Verdict.SLOWER
