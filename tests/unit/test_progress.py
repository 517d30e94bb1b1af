"""How far a run in slices came, counted from the reports of its items."""

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_longca.outcome import NotVerified, Passed
from pytest_longca.progress import Progress
from pytest_longca.report.record import Record


def report(when: str, outcome: str = "passed", record: Any = None, **more: Any) -> Any:
    records = [Record(stage="timing", kernel="k", mask="m", outcome=record.to_json()).to_json()] if record else []
    return SimpleNamespace(when=when, outcome=outcome, **more), records


def progress(*reports: Any, is_selftest: bool = False) -> Progress:
    found = Progress(is_selftest)
    for one in reports:
        found.add(*one)
    return found


LEFT = report("teardown", record=NotVerified("no time", is_postponed=True))
DONE = [report("setup"), report("call"), report("teardown", record=Passed())]


@pytest.mark.parametrize(
    ("reports", "counts"),
    [
        (DONE, (1, 0)),
        ([report("call", "failed")], (1, 0)),
        ([report("call", "skipped", wasxfail="out of memory")], (1, 0)),
        ([report("call", "skipped"), report("teardown", record=NotVerified("interpreted"))], (0, 0)),
        ([report("call", "skipped"), LEFT], (0, 1)),
        ([report("setup", "skipped"), LEFT, *DONE], (1, 1)),
        ([report("setup", "skipped"), report("teardown")], (0, 0)),
    ],
    ids=["passed", "failed", "xfailed", "skipped", "ended by the budget", "postponed and another", "about no cell"],
)
def test_items_finish_or_are_left(reports: list[Any], counts: tuple[int, int]) -> None:
    found = progress(*reports)
    assert (found.num_finished, found.num_left) == counts
    assert found.is_stuck is (counts == (0, 1))


def test_all_that_a_selftest_skips_is_left() -> None:
    assert progress(report("setup", "skipped"), report("teardown"), is_selftest=True).num_left == 1


@pytest.mark.parametrize(
    ("reports", "is_resumed", "line"),
    [
        ([LEFT], False, "budget: nothing finished, 1 item is left: give it more time"),
        ([*DONE, LEFT, LEFT], True, "budget: 1 item finished, 2 items are left: to go on, the same line with --longca-resume"),
        ([*DONE], True, "resume: nothing is left to run"),
        ([*DONE], False, None),
    ],
)
def test_one_line_says_whether_there_is_more_to_do(reports: list[Any], is_resumed: bool, line: str | None) -> None:
    assert progress(*reports).lines(is_resumed) == ([line] if line else [])
