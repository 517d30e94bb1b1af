"""Whose fault a failure is: before a kernel is accused, its failing case is judged in a process in which nothing ran before."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_longca.outcome import Crashed, KnownWrong, Outcome, Passed, TimedOut, Wrong

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.checks import Verification
    from pytest_longca.conformance import Findings
    from pytest_longca.session import Session
    from pytest_longca.subject import Finding


@dataclass(frozen=True)
class Found:
    """What judging an item came to: the case that decides it (None: all is well), and what all its cases have shown."""

    decisive: "tuple[Case, Verification] | None"
    findings: "Findings"


def fair(item: pytest.Item, session: "Session", kernel: str, checks: Sequence[str], judge: Callable[[], Found]) -> Found:
    """What `judge` finds, unless that is the doing of what ran before in the same process.

    A failure that comes back in a new process is the kernel's own. One that does not, after cases of other kernels, is none: all is judged
    again in that process, and this verdict counts. After cases of this kernel alone it stays a failure, which says so.
    """
    found = judge()
    if found.decisive is None or not _is_doubtful(session, kernel, *found.decisive):
        return found
    case, verification = found.decisive
    others = ", ".join(name for name in verification.after if name != kernel)
    if session.options.isolate == "off":
        hint = f"{others} ran before in the same process (--longca-isolate=kernel tells whether this is their doing)"
        return dataclasses.replace(found, decisive=(case, _but(verification, hint))) if others else found
    again = accused(session, kernel, case, session.verify_anew(kernel, case, checks))
    if _is_failure(again[1].outcome):
        return dataclasses.replace(found, decisive=again)
    if not isinstance(again[1].outcome, Passed):  # no time was left, or no memory: nothing is known
        return found
    if not others:
        return dataclasses.replace(found, decisive=(case, of_own_cases(kernel, verification)))
    own = fair(item, session, kernel, checks, judge)
    own.findings.facts["judged again"] = f"{verification.outcome}; {others} ran before in the same process"
    if own.decisive is None or isinstance(own.decisive[1].outcome, Passed):
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # a filter that makes it an error would accuse the kernel after all
            item.warn(pytest.PytestWarning(_warning(kernel, case, verification.outcome, others)))
    return own


def accused(session: "Session", kernel: str, case: "Case", verification: "Verification") -> "tuple[Case, Verification]":
    """The case that is wrong: a neighbour that was wrong beside the judged one, if the truth is against it in a new process too."""
    from pytest_longca.ids import parse_case

    neighbour = verification.findings[0].neighbour if verification.findings else None
    if neighbour is None:
        return case, verification
    other = parse_case(neighbour, session.catalogue.masks())
    alone = session.verify_anew(kernel, other, ("truth",))
    return (other, alone) if isinstance(alone.outcome, Wrong) else (case, verification)


def excused(
    session: "Session", kernel: str, case: "Case", verification: "Verification", checks: Sequence[str]
) -> "tuple[Case, Verification] | None":
    """What is known of a failure: itself, or what it is of the kernel's own earlier cases, which a new process tells."""
    if found := as_known(session, kernel, case, verification):
        return found
    if set(verification.after) != {kernel} or not _is_failure(verification.outcome):
        return None
    own = of_own_cases(kernel, verification)
    is_described = isinstance(known(session, kernel, case, own.outcome), KnownWrong)
    return (case, own) if is_described and isinstance(session.verify_anew(kernel, case, checks).outcome, Passed) else None


def as_known(session: "Session", kernel: str, case: "Case", verification: "Verification") -> "tuple[Case, Verification] | None":
    """A failure that the file describes, with its case: the judged one, or the first of those that a check made of it, if all are known."""
    from pytest_longca.ids import parse_case

    if isinstance(known(session, kernel, case, verification.outcome), KnownWrong):
        return case, verification
    first: dict[str | None, Finding] = {}
    for finding in verification.findings:
        first.setdefault(finding.called, finding)
    described = []
    for called, finding in first.items():
        made = parse_case(called, session.catalogue.masks()) if called else case
        outcome = Wrong(str(finding))
        if not isinstance(known(session, kernel, made, outcome), KnownWrong):
            return None
        described.append((made, dataclasses.replace(verification, outcome=outcome, findings=[finding])))
    return described[0] if described else None


def outcome_after(session: "Session", kernel: str, first: "Case", case: "Case", checks: Sequence[str]) -> Outcome:
    """What becomes of a case after another one of the same kernel, which is the first of its process."""
    session.verify_anew(kernel, first, ("truth",))
    verification = session.verify(kernel, case, checks)
    if _is_failure(verification.outcome) and isinstance(session.verify_anew(kernel, case, checks).outcome, Passed):
        return of_own_cases(kernel, verification).outcome
    return verification.outcome


def of_own_cases(kernel: str, verification: "Verification") -> "Verification":
    """A failure of a case that is right in a new process, where only cases of the same kernel ran before it: it says so."""
    hint = f"right in a process of its own, but after other cases of {kernel} (--longca-isolate=case gives each a process)"
    return _but(verification, hint, reproducible=False)


def known(session: "Session", kernel: str, case: "Case", outcome: Outcome) -> Outcome:
    """The outcome, or KnownWrong where the known-failures file describes it."""
    if not isinstance(outcome, Wrong | Crashed):
        return outcome
    from pytest_longca.known_failures import find

    entry = find(session.catalogue.kernel(kernel), case, session.machine, outcome)
    return KnownWrong(outcome.reason, entry.name) if entry else outcome


def _is_failure(outcome: Outcome) -> bool:
    return isinstance(outcome, Wrong | Crashed | TimedOut)


def _is_doubtful(session: "Session", kernel: str, case: "Case", verification: "Verification") -> bool:
    """Whether a failure may be the doing of what ran before. What that left lasts: it shows whenever the case runs again in the process."""
    outcome = verification.outcome
    if not verification.after or not _is_failure(known(session, kernel, case, outcome)):
        return False
    return not (isinstance(outcome, Wrong) and outcome.reproducible is False)


def _but(verification: "Verification", hint: str, **more: bool) -> "Verification":
    """A failure with a hint before its reason."""
    outcome = verification.outcome
    assert isinstance(outcome, Wrong | Crashed | TimedOut)
    changes = more if isinstance(outcome, Wrong) else {}
    said = dataclasses.replace(outcome, reason=f"{hint}: {outcome.reason}", **changes)  # type: ignore[arg-type]  # a field of Wrong alone
    return dataclasses.replace(verification, outcome=said)


def _warning(kernel: str, case: "Case", outcome: Outcome, others: str) -> str:
    return (
        f"{kernel} is right on {case.mask.name} in a process of its own, which counts. {others} ran before in the same process when it was "
        f"{outcome} (case {case.id}): something is left behind there. --longca-isolate=kernel gives each kernel a process"
    )
