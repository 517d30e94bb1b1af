"""What the suite's tests do with a cell or a case: run it, judge it, record it, and say what failed."""

import functools
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, assert_never

import pytest

from pytest_longca import __version__
from pytest_longca.blame import Found, accused, as_known, excused, fair, known, outcome_after
from pytest_longca.budget import stage_of
from pytest_longca.checknames import select_checks
from pytest_longca.collector import PROPERTY
from pytest_longca.errors import LongcaError
from pytest_longca.outcome import (
    Crashed,
    KnownWrong,
    NotInstalled,
    NotVerified,
    Outcome,
    OutOfMemory,
    Passed,
    TimedOut,
    Unsupported,
    Wrong,
)
from pytest_longca.report.record import Record, shape_of

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.checks import Verification
    from pytest_longca.kernel import Kernel
    from pytest_longca.known_failures import Entry
    from pytest_longca.session import Session


FAILURES = pytest.StashKey[dict[tuple[str, str], tuple[Outcome, str]]]()
"""Of this process: what failed first for a kernel and a mask, and the line that replays it."""


@dataclass
class Findings:
    """What a cell's cases have shown so far: how many ran, how close each tensor came to its limit, and what was refused when it ran."""

    num_cases: int = 0
    refused: "list[tuple[Case, Verification]]" = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    has_backward: bool = False

    def add(self, case: "Case", verification: "Verification") -> None:
        if isinstance(verification.outcome, Unsupported):
            self.refused.append((case, verification))
            first, why = self.refused[0]
            self.facts["refused"] = f"{len(self.refused)} cases when they ran, the first {first.id}: {why.outcome}"
            return
        self.num_cases += 1
        self.has_backward |= case.direction.needs_backward
        self.facts |= verification.facts
        for tensor, ratio in verification.worst.items():
            self.note(tensor, ratio, case)

    def note(self, tensor: str, ratio: float, case: "Case") -> None:
        """Remember the case on which a tensor came closest to its limit."""
        if ratio >= self.worst.get(tensor, (-1.0, ""))[0]:
            self.worst[tensor] = (ratio, case.id)

    def verdicts(self) -> list[dict[str, Any]]:
        return [{"tensor": tensor, "error_over_limit": ratio, "case": case} for tensor, (ratio, case) in self.worst.items()]


def run_probes(item: pytest.Item, session: "Session", kernel: str, mask: str) -> None:
    """Judge the exact probes of a cell."""
    checks = select_checks(session.options.checks, "probes")
    end_cell(item, session, "probes", kernel, mask, fair(item, session, kernel, checks, lambda: _probed(session, kernel, mask, checks)))


def _probed(session: "Session", kernel: str, mask: str, checks: Sequence[str]) -> Found:
    """The first case that is not right decides, unless its failure is known or it is refused."""
    from pytest_longca.strategies import probe_cases

    findings = Findings()
    first_known: tuple[Case, Verification] | None = None
    for case in probe_cases(session.catalogue.mask(mask), session.catalogue.kernel(kernel), session.machine):
        verification = session.verify(kernel, case, checks)
        findings.add(case, verification)
        if isinstance(verification.outcome, Passed | Unsupported):
            continue
        if (found := excused(session, kernel, case, verification, checks)) is None:
            return Found((case, verification), findings)
        first_known = first_known or found
    return Found(first_known, findings)


def run_known_failure(item: pytest.Item, session: "Session", kernel: str, entry: "Entry | None") -> None:
    """Try the smallest case of a known failure again: an entry that is no longer true fails the run."""
    from pytest_longca.ids import parse_case
    from pytest_longca.known_failures import stale

    if entry is None:
        pytest.skip("no known failure is about a kernel of this run")
    case = parse_case(entry.case, session.catalogue.masks())
    checks = select_checks(session.options.checks)
    if entry.after:
        if session.options.isolate in ("case", "off"):
            pytest.skip(f"{entry.name} takes two cases in one process and a new one: --longca-isolate={session.options.isolate} has none")
        reason = stale(entry, outcome_after(session, kernel, parse_case(entry.after, session.catalogue.masks()), case, checks))
    else:
        verification = session.verify(kernel, case, checks)
        reason = stale(entry, verification.outcome)
        if reason and verification.after:  # perhaps the doing of what ran before in the same process
            reason = stale(entry, session.verify_anew(kernel, case, checks).outcome)
    outcome = Wrong(reason) if reason else KnownWrong(entry.why, entry.name)
    keep(item, Record(stage="case", kernel=kernel, mask=case.mask.name, case=case.id, outcome=outcome.to_json(), reason=str(outcome)))
    conclude(outcome, reason or "")


def run_case(item: pytest.Item, session: "Session", kernel: str, case: "Case") -> None:
    """Replay one case with every check that was asked for."""
    found = judged_case(item, session, kernel, case, select_checks(session.options.checks))
    assert found.decisive
    finish(item, session, "case", kernel, *found.decisive, found.findings)


def judged_case(item: pytest.Item, session: "Session", kernel: str, case: "Case", checks: Sequence[str]) -> Found:
    """What becomes of one case, which decides whatever its outcome."""

    def judge() -> Found:
        findings, verification = Findings(), session.verify(kernel, case, checks)
        findings.add(case, verification)
        blamed = accused(session, kernel, case, verification)
        return Found(as_known(session, kernel, *blamed) or blamed, findings)

    return fair(item, session, kernel, checks, judge)


def end_cell(item: pytest.Item, session: "Session", stage: str, kernel: str, mask: str, found: Found) -> None:
    """Record a cell, and end its test."""
    if found.decisive:
        finish(item, session, stage, kernel, *found.decisive, found.findings)
    finish_cell(item, session, stage, kernel, mask, found.findings)


def finish_cell(item: pytest.Item, session: "Session", stage: str, kernel: str, mask: str, findings: Findings) -> None:
    """Record a cell whose cases all passed or were refused; a cell without a case that ran is not a pass."""
    if findings.refused and not findings.num_cases:
        finish(item, session, stage, kernel, *findings.refused[0], findings)
    outcome: Outcome = Passed() if findings.num_cases else NotVerified("no case of this cell could run here")
    direction = "fwd_bwd" if findings.has_backward else "fwd"
    keep(item, record(session, stage, kernel, mask, outcome, findings, direction=direction))
    conclude(outcome, "")


def finish(
    item: pytest.Item, session: "Session", stage: str, kernel: str, case: "Case", verification: "Verification", findings: Findings
) -> None:
    """Record a case that ended a cell, and pass, skip or fail the test with everything that is needed to redo it."""
    replay = replay_line(kernel, case)
    outcome = known(session, kernel, case, verification.outcome)
    about = {"case": case.id, "shape": shape_of(case), "direction": str(case.direction), "replay": replay}
    lines = [f"replay: {replay}"]
    if isinstance(outcome, Wrong | Crashed | TimedOut):
        item.config.stash.setdefault(FAILURES, {}).setdefault((kernel, case.mask.name), (outcome, replay))
        lines += [_standalone(session, kernel, case, verification)] if session.options.repro else []
    findings.facts |= _drawing(case, verification) if isinstance(outcome, Wrong) else {}
    keep(item, record(session, stage, kernel, case.mask.name, outcome, findings, **about))
    if stage == "case":
        must_run(outcome, session, kernel)
    conclude(outcome, "\n".join([failure_text(kernel, case, verification), *lines]))


def failure_of(item: pytest.Item, kernel: str, mask: str) -> tuple[Outcome, str] | None:
    """What failed first for a kernel and a mask in this process, if anything did, and the line that replays it."""
    return item.config.stash.get(FAILURES, {}).get((kernel, mask))


def replay_line(kernel: str, case: "Case") -> str:
    """The command that judges the case again, alone."""
    return f"pytest --longca-kernels={kernel} --longca-case='{case.id}'"


def _standalone(session: "Session", kernel: str, case: "Case", verification: "Verification") -> str:
    """Write the standalone file of a failure; a line that says where it is, or why there is none."""
    from pytest_longca.repro import is_without_call, write_repro

    used = session.catalogue.kernel(kernel)
    try:
        path = write_repro(session.options.repro, used, case, verification, session.machine, versions(used))
    except LongcaError as error:
        return f"standalone: {error}"
    return f"standalone: {path}" + (f" (lacks the call of {kernel}, which its `snippet` would give)" if is_without_call(path) else "")


def conclude(outcome: Outcome, message: str) -> None:
    """End the running test as the outcome asks: pass, skip, xfail or fail."""
    __tracebackhide__ = True
    match outcome:
        case Passed():
            return
        case Unsupported() | NotInstalled() | NotVerified():
            pytest.skip(str(outcome))
        case KnownWrong() | OutOfMemory():
            pytest.xfail(str(outcome))
        case Wrong() | Crashed() | TimedOut():
            pytest.fail(message or str(outcome), pytrace=False)
        case _:
            assert_never(outcome)


def must_run(outcome: Outcome, session: "Session", kernel: str) -> None:
    """Fail where a case that was asked for by its id did not run on a kernel that was asked for by its name: nobody would see a skip."""
    if session.options.kernels is not None and isinstance(outcome, Unsupported | NotInstalled):
        pytest.fail(f"{kernel} does not run this case: {outcome}", pytrace=False)


def record_refusal(item: pytest.Item, outcome: Outcome) -> NoReturn:
    """Record a cell that is refused before anything runs, and skip its test, or fail it where it must run."""
    kernel, mask, case = _about(item.callspec.params)  # type: ignore[attr-defined]  # the suite's items and refused ones are parametrized
    if kernel and mask:  # an item of the selftest, and the one that says that no known failure is due, are about no cell
        stage = stage_of(item) or "case"
        keep(item, Record(stage=stage, kernel=kernel, mask=mask, case=case, outcome=outcome.to_json(), reason=str(outcome)))
    if "longca_replayed" in item.callspec.params:  # type: ignore[attr-defined]  # as above
        from pytest_longca.plugin import session_of

        must_run(outcome, session_of(item.config), kernel)
    pytest.skip(str(outcome))


def _about(params: dict[str, Any]) -> tuple[str, str, str | None]:
    """(kernel, mask, case id) that a test with these parameters is about; empty where it is about none."""
    kernel = params.get("longca_kernel_name") or getattr(params.get("longca_kernel"), "name", None) or ""
    case = params.get("longca_case_id") or params.get("longca_replayed")
    for holder, attribute in (("longca_known_failure", "case"), ("longca_case", "id")):
        case = case or getattr(params.get(holder), attribute, None)
    mask = params.get("longca_mask_name") or getattr(params.get("longca_mask"), "name", None) or (case or "").partition("(")[0]
    return kernel, mask, case


def keep(item: pytest.Item, record: Record) -> None:
    """Put the record on the test's report, which carries it to the reporting process."""
    item.user_properties.append((PROPERTY, record.to_json()))


def record(session: "Session", stage: str, kernel: str, mask: str, outcome: Outcome, findings: Findings, **more: Any) -> Record:
    return Record(
        stage=stage,
        kernel=kernel,
        mask=mask,
        outcome=outcome.to_json(),
        reason="" if isinstance(outcome, Passed) else str(outcome),
        num_examples=findings.num_cases,
        verdicts=findings.verdicts(),
        facts=findings.facts,
        device=session.machine.name,
        versions=versions(session.catalogue.kernel(kernel)),
        commit=commit(),
        **more,
    )


def failure_text(kernel: str, case: "Case", verification: "Verification") -> str:
    """What a failure says before the way to redo it: what is wrong and where, the case, and the mask as a picture."""
    lines = [f"{kernel} is {verification.outcome}" if isinstance(verification.outcome, Wrong) else f"{kernel} {verification.outcome}"]
    lines += [f"  also {finding}" for finding in verification.findings[1:]]  # the outcome's reason is the first one
    lines += [f"case: {case.id}"]
    lines += [_picture(case, verification)]
    if isinstance(verification.outcome, Crashed) and verification.outcome.stderr:
        lines += ["the worker's last words:", verification.outcome.stderr]
    return "\n".join(lines)


def _picture(case: "Case", verification: "Verification") -> str:
    from pytest_longca.picture import draw

    try:
        return draw(case, verification.findings)
    except Exception as error:  # a user's mask_mod may raise anything, which must not hide what failed
        return f"no picture of the mask: {type(error).__name__}: {error}"


def _drawing(case: "Case", verification: "Verification") -> dict[str, Any]:
    """The fact of which the page makes its image: the mask in tiles, and what is wrong in it."""
    from pytest_longca.picture import drawing_of

    try:
        return {"drawing": asdict(drawing_of(case, verification.findings))}
    except Exception:  # as for the text: what failed is told without it
        return {}


def versions(kernel: "Kernel") -> dict[str, str]:
    """Versions of what decides a result: Python, this package, torch, Triton, and the kernel's own packages."""
    from pytest_longca.kernel import Requirement

    found = {"python": platform.python_version(), "pytest-longca": __version__}
    needs = (Requirement(distribution="torch", how=""), Requirement(distribution="triton", how=""), *kernel.requires)
    return found | dict(installed for need in needs if (installed := need.installed()))


@functools.cache
def commit() -> str | None:
    """The commit of the directory that pytest runs in, with a `+` if it has changes; None outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            cwd=Path.cwd(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
