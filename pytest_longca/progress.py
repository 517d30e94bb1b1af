"""How far a run in slices came: what finished, what its budget left, and the line by which a script knows whether to go on."""

from collections.abc import Sequence
from typing import Any

import pytest


class Progress:
    """Counts items from their reports, also those of xdist workers. An item that skips neither finishes nor is left to a next run."""

    def __init__(self, is_selftest: bool) -> None:
        self._is_selftest = is_selftest
        self.num_finished = 0
        self.num_left = 0

    def add(self, report: pytest.TestReport, records: Sequence[dict[str, Any]]) -> None:
        """Count what the report and the records on it tell of its item."""
        if report.when == "call" and (report.outcome != "skipped" or hasattr(report, "wasxfail")):
            self.num_finished += 1
        elif report.when == "setup" and self._is_selftest:
            self.num_left += report.outcome == "skipped"  # a fault has no record, and nothing but a budget skips it
        self.num_left += any(record["outcome"].get("is_postponed") for record in records)

    @property
    def is_stuck(self) -> bool:
        """Whether the budget was too short for every single item: the same run again would do nothing either."""
        return self.num_left > 0 and not self.num_finished

    def lines(self, is_resumed: bool) -> list[str]:
        """One line for a run that left something, or that went on with records and left nothing; else none."""
        from pytest_longca.report.verdict import counted

        if self.num_left:
            are_left = f"{counted(self.num_left, 'item')} {'is' if self.num_left == 1 else 'are'} left"
            if self.is_stuck:
                return [f"budget: nothing finished, {are_left}: give it more time"]
            return [f"budget: {counted(self.num_finished, 'item')} finished, {are_left}: to go on, the same line with --longca-resume"]
        return ["resume: nothing is left to run"] if is_resumed else []
