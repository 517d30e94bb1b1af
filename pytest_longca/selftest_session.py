"""--longca-selftest in a pytest session: one item for each fault, hunted in a worker, and one line at the end."""

from typing import TYPE_CHECKING

import pytest

from pytest_longca.errors import DidNotRun

if TYPE_CHECKING:
    from pytest_longca.session import Session

PROPERTY = "longca_fault_caught"


def run_fault(item: pytest.Item, session: "Session", fault: str) -> None:
    """Hunt a planted fault with the default checks; a fault that is missed fails the test."""
    try:
        catch = session.call("naive", {"op": "hunt", "fault": fault})
    except DidNotRun as stopped:
        catch = {"check": None, "text": f"{fault}: not hunted: {stopped.outcome}"}
    item.user_properties.append((PROPERTY, catch["check"] is not None))
    if catch["check"] is None:
        pytest.fail(catch["text"], pytrace=False)


class SelftestSummary:
    """Counts the faults that were caught, also by xdist workers, and says so."""

    def __init__(self) -> None:
        self._caught: list[bool] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._caught += [bool(value) for name, value in report.user_properties if name == PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        from pytest_longca.faults import FAULTS

        num_caught, num_ran = sum(self._caught), len(self._caught)
        if num_ran == len(FAULTS):
            terminalreporter.write_line(f"selftest: {num_caught} of {num_ran} faults caught")
        elif num_ran:
            caught = "all" if num_caught == num_ran else num_caught
            terminalreporter.write_line(f"selftest: {num_ran} of {len(FAULTS)} ran, {caught} caught")
