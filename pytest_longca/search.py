"""The search for a failing case: Hypothesis draws and shrinks here, workers run what it draws."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure

from pytest_longca.blame import Found, accused, excused, fair
from pytest_longca.checknames import select_checks
from pytest_longca.conformance import Findings, end_cell
from pytest_longca.errors import CheckFailed
from pytest_longca.outcome import Crashed, Passed, TimedOut, Unsupported, Wrong

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.checks import Verification
    from pytest_longca.outcome import Outcome
    from pytest_longca.session import Session

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
RESTARTS = 10
HANGS = 2


class Search:
    """One cell's examples. Outcomes are remembered, so that shrinking pays for each case once, and for few deaths of a worker."""

    def __init__(self, session: "Session", kernel: str) -> None:
        self._session = session
        self._kernel = kernel
        self._checks = select_checks(session.options.checks, "examples")
        self._seen: dict[str, tuple[Case, Verification]] = {}
        self._left: dict[type, int] = {Crashed: RESTARTS, TimedOut: HANGS}
        self.findings = Findings()
        self.failed: tuple[Case, Verification] | None = None
        self.excused: tuple[Case, Verification] | None = None

    def example(self, case: "Case") -> None:
        """Judge a drawn case; raises a class of its own for each kind of failure, so that one does not shrink into another.

        A known failure is kept and the search goes on: it must not hide another one. Nor must a case that is refused when it runs.
        """
        judged = self._judged(case)
        if judged is None or isinstance(judged[1].outcome, Passed | Unsupported):
            return
        blamed, verification = judged
        if found := excused(self._session, self._kernel, blamed, verification, self._checks):
            self.excused = self.excused or found
            return
        self.failed = judged
        raise _failure(_signature(verification))

    def _judged(self, case: "Case") -> "tuple[Case, Verification] | None":
        """A drawn case's verification, with the case that it is about: its neighbour where only that is wrong."""
        if case.id in self._seen:
            return self._seen[case.id]
        if self.failed and not self._is_worth_shrinking(self.failed[1].outcome):
            return None
        verification = self._session.verify(self._kernel, case, self._checks)
        kind = type(verification.outcome)
        if kind in self._left:
            self._left[kind] -= 1
        self.findings.add(case, verification)
        self._seen[case.id] = accused(self._session, self._kernel, case, verification)
        return self._seen[case.id]

    def _is_worth_shrinking(self, outcome: "Outcome") -> bool:
        """Not where workers have died often enough, nor what did not come back: which smaller case fails too would be luck."""
        return bool(self._left.get(type(outcome), 1)) and not (isinstance(outcome, Wrong) and not outcome.reproducible)


def drawn_cases(session: "Session", kernel: str, mask: str) -> "list[Case]":
    """The examples that `run_examples` will try, as long as none fails: the seed decides them."""
    drawn: list[Case] = []
    _test(session, kernel, mask, drawn.append)()
    return drawn


def _test(session: "Session", kernel: str, mask: str, example: "Callable[[Case], None]") -> Callable[[], None]:
    """Hypothesis' test of a cell, which hands each drawn case to `example`."""
    from pytest_longca.strategies import cases

    options = session.options
    drawn = cases(
        masks=[session.catalogue.mask(mask)],
        kernel=session.catalogue.kernel(kernel),
        machine=session.machine,
        dtypes=session.taken("dtypes", kernel),
        seed=options.seed,
    )

    @seed(f"{options.seed}:{mask}")  # else masks that take as many numbers as each other draw the same cases
    @settings(
        max_examples=session.num_examples(kernel),
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(drawn)
    def run(case: "Case") -> None:
        example(case)

    return run


def run_examples(item: pytest.Item, session: "Session", kernel: str, mask: str) -> None:
    """Search a cell for a failing case. What fails is shrunk; what does not repeat is reported as such."""
    checks = select_checks(session.options.checks, "examples")
    end_cell(item, session, "examples", kernel, mask, fair(item, session, kernel, checks, lambda: _searched(session, kernel, mask)))


def _searched(session: "Session", kernel: str, mask: str) -> Found:
    """The smallest failing case that was found decides, else one whose failure is known."""
    search = Search(session, kernel)
    try:
        _test(session, kernel, mask, search.example)()
    except FlakyFailure:
        assert search.failed
        case, verification = search.failed
        search.failed = case, dataclasses.replace(verification, outcome=Wrong(str(verification.outcome), reproducible=False))
    except CheckFailed:
        assert search.failed
    # Outside of the handlers: whoever ends the test would else chain its report to Hypothesis' own exception.
    return Found(search.failed or search.excused, search.findings)


def _signature(verification: "Verification") -> str:
    tensors = {finding.tensor for finding in verification.findings if finding.tensor}
    return "_".join([verification.outcome.kind, *sorted(tensors)])


@functools.cache
def _failure(signature: str) -> type[CheckFailed]:
    """An exception class for a kind of failure: Hypothesis tells failures apart by class and line."""
    return type(signature, (CheckFailed,), {})
