"""The gate's promises as frequencies, on simulated runs: one alarm in 300 A/A comparisons, 98 % of planted slowdowns caught."""

import numpy as np

from pytest_longca.outcome import Passed
from pytest_longca.report.compare import compare
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import Comparison, Verdict

CASES = 40
PROCESSES = 5
LOOKS = 2
SAMPLES = 30
PASSED = Passed().to_json()


def run(rng: np.random.Generator, noise: np.ndarray, processes: int, slowdown: float = 0.0) -> list[Record]:
    """A run of CASES cases: heavy-tailed differences between processes, and samples with outliers around each process's own time.

    `noise` [CASES] is the standard deviation between processes as a fraction of the time.
    """
    between = rng.standard_t(4, (CASES, processes)) / np.sqrt(2.0) * noise[:, None]
    within = rng.normal(0, 0.01, (CASES, processes, SAMPLES)) + 0.3 * (rng.random((CASES, processes, SAMPLES)) < 0.03)
    samples = (1 + between)[..., None] * (1 + within) * (1 + slowdown)
    return [
        Record(stage="timing", kernel="k", mask="m", case=f"c{case}", outcome=PASSED, process=f"p{process}", samples_ms=values.tolist())
        for case in range(CASES)
        for process, values in enumerate(samples[case])
    ]


def pair(rng: np.random.Generator, slowdown: float = 0.0) -> Comparison:
    """A comparison of two runs on a machine where one case in twenty is far too noisy to gate."""
    noise = rng.choice([0.001, 0.003, 0.005, 0.02], CASES, p=[0.4, 0.4, 0.15, 0.05])
    return compare(run(rng, noise, PROCESSES), run(rng, noise, LOOKS, slowdown))


def count(comparison: Comparison, verdict: Verdict) -> int:
    return sum(row.verdict is verdict for row in comparison.rows)


def test_300_comparisons_of_equal_builds_raise_at_most_one_alarm() -> None:
    rng = np.random.default_rng(1)
    assert sum(count(pair(rng), Verdict.SLOWER) > 0 for _ in range(300)) <= 1


def test_98_of_100_planted_slowdowns_of_the_limit_are_caught() -> None:
    rng = np.random.default_rng(2)
    results = [pair(rng, slowdown=0.05) for _ in range(25)]
    noisy = sum(count(result, Verdict.TOO_NOISY) for result in results)
    caught = sum(count(result, Verdict.SLOWER) for result in results)
    assert caught >= 0.98 * (25 * CASES - noisy)
    assert noisy <= 0.2 * 25 * CASES
    assert all(result.exit_code == 1 for result in results)
