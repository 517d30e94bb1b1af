"""--longca-selftest: what it runs and what it says. That each fault is caught is shown in tests/faults."""

from dataclasses import replace

import pytest

from pytest_longca.faults import FAULTS
from tests.plugin.conftest import Run


def test_it_runs_one_item_for_each_fault_and_nothing_else(run: Run) -> None:
    result = run("--longca-selftest", "--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [f"longca/test_selftest.py::test_fault[{name}]" for name in FAULTS]


def test_without_the_option_no_fault_is_planted(run: Run) -> None:
    result = run("--longca-kernels=naive", "--longca-masks=causal", "--collect-only", "-q")
    result.stdout.no_fnmatch_line("*selftest*")


def test_it_counts_what_is_caught(run: Run) -> None:
    result = run("--longca-selftest", "-k", "causal_strict or empty_nan")
    result.assert_outcomes(passed=2)
    header = f"longca: selftest: {len(FAULTS)} known faults, each planted into naive and hunted, *"
    result.stdout.fnmatch_lines([header, f"selftest: 2 of {len(FAULTS)} ran, all caught"])


def test_a_fault_that_is_missed_fails_and_says_what_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(FAULTS["causal_strict"], bind=lambda inner, case, inputs: inner.bind(case, inputs))
    monkeypatch.setitem(FAULTS, "causal_strict", harmless)
    monkeypatch.setattr("pytest_longca.selftest._examples", lambda kernel, mask, machine, examples: [])
    result = run("--longca-selftest", "--longca-isolate=off", "-k", "causal_strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["causal_strict: MISSED by * cases*", f"selftest: 1 of {len(FAULTS)} ran, 0 caught"])


def test_a_selftest_that_ran_all_its_items_counts_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in FAULTS if name != "causal_strict"]:
        monkeypatch.delitem(FAULTS, name)
    run("--longca-selftest", "--longca-isolate=off").stdout.fnmatch_lines(["selftest: 1 of 1 faults caught"])
