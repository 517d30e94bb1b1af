"""The checks as code, and `verify`: a kernel on a case, judged."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from pytest_longca import hazards, metamorphic, overflow, probes, training
from pytest_longca.case import Case
from pytest_longca.checknames import CHECK_INFO, DEFAULT, select_checks
from pytest_longca.errors import DidNotRun
from pytest_longca.kernel import Kernel
from pytest_longca.machine import Machine
from pytest_longca.outcome import NotVerified, Outcome, Passed, Unsupported, Wrong, outcome_from_json
from pytest_longca.reference import forget_references
from pytest_longca.subject import Finding, Malformed, Subject, declared
from pytest_longca.together import TOGETHER, Together

Look = Callable[[Subject], list[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A named judgement: `applies` says whether it has anything to say about a subject, `run` gives what is wrong."""

    run: Look
    applies: Callable[[Subject], bool]


def truth(subject: Subject) -> list[Finding]:
    """P5: out, lse and gradients against the high-precision reference."""
    return subject.wrong("truth", subject.result)


def _always(subject: Subject) -> bool:
    return True


def _has_tokens(subject: Subject) -> bool:
    return min(subject.case.seqlen_q, subject.case.seqlen_kv) > 0


CHECKS: dict[str, Check] = {
    "count": Check(probes.count, _has_tokens),
    "support": Check(probes.support, lambda subject: _has_tokens(subject) and subject.case.direction.needs_backward),
    "layout": Check(hazards.layout, _has_tokens),
    "truth": Check(truth, _always),
    "poison": Check(hazards.poison, _has_tokens),
    "guard": Check(hazards.guard, _has_tokens),
    "repeat": Check(hazards.repeat, _always),
    "state": Check(hazards.state, lambda subject: not subject.kernel.compiles_per_shape),
    "scale": Check(hazards.scale, _has_tokens),
    "stress": Check(hazards.stress, _has_tokens),
    "overflow": Check(overflow.overflow, lambda s: s.machine.device == "cuda" and min(s.case.seqlen_q, s.case.seqlen_kv) > 1),
    "metamorphic": Check(metamorphic.metamorphic, _has_tokens),
    "training": Check(training.training, lambda subject: _has_tokens(subject) and subject.case.direction.needs_backward),
    "resources": Check(training.resources, lambda subject: subject.machine.device == "cuda"),
}
assert CHECKS.keys() == CHECK_INFO.keys(), "every check has its description, and the other way round"


@dataclass(slots=True)
class Verification:
    """What became of a kernel on a case: outcome, everything found wrong, each tensor's worst error over its limit, and facts.

    `after`, the kernels that its process had run before, is known to whoever has the process, and does not travel. Not frozen: whoever
    repeats a case learns whether its failure repeats, and says so in the outcome.
    """

    outcome: Outcome
    findings: list[Finding] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; infinities stay floats (Record writes them as strings)."""
        return {
            "outcome": self.outcome.to_json(),
            "findings": [asdict(finding) for finding in self.findings],
            "worst": self.worst,
            "checks": list(self.checks),
            "facts": self.facts,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The verification that `to_json` wrote."""
        findings = [Finding(**finding) for finding in data["findings"]]
        return cls(outcome_from_json(data["outcome"]), findings, data["worst"], tuple(data["checks"]), data["facts"])


def verify(kernel: Kernel, case: Case, machine: Machine, checks: Sequence[str] = DEFAULT) -> Verification:
    """Run the kernel on the case and judge it by the named checks (names or groups). A wrong kernel is an outcome, never an exception."""
    names = select_checks(checks)
    refusal = declared(kernel, case, machine)
    if refusal is not None:
        return Verification(refusal)
    subject = Subject(kernel, case, machine)
    together = Together(subject) if set(names) >= TOGETHER else None
    findings: list[Finding] = []
    ran: list[str] = []
    stopped: Outcome | None = None
    for name in names:
        if CHECKS[name].applies(subject):
            ran.append(name)
            look = CHECKS[name].run
            stopped = _run(name, together.unless_quiet(look) if together and name in TOGETHER else look, subject, findings)
            if stopped is not None:
                break
    if together and not findings and not stopped:
        findings += together.found or []  # what no check finds in its circumstance alone
    findings.sort(key=lambda finding: finding.check != "guard")  # who writes to the operands spoils what all other checks see
    outcome = stopped or (Passed() if ran else NotVerified("none of the checks has anything to say about this case"))
    if findings:
        forget_references()  # made from operands that the kernel may have written to
        outcome = Wrong(_reason(findings), _repeats(findings[0].check, Subject(kernel, case, machine), together is not None))
        forget_references()
    worst = {} if "truth" not in ran or stopped else _worst(subject)
    return Verification(outcome, findings, worst, tuple(ran), dict(subject.facts))


def _run(name: str, look: Look, subject: Subject, findings: list[Finding]) -> Outcome | None:
    """Run one check by its name and what it does; its findings are appended. The outcome that ends the case early, if any."""
    try:
        findings += look(subject)
    except Malformed as error:
        findings.append(Finding(name, error.tensor, error.message))
        return Wrong(error.message)
    except DidNotRun as error:
        if isinstance(error.outcome, Unsupported) and "result" in subject.__dict__:
            # The case itself ran: a refusal of a stranger variant (a layout, a stream) is a declared limit, no failure.
            subject.facts[f"{name} skipped"] = error.outcome.reason
            return None
        return error.outcome
    except (torch.OutOfMemoryError, MemoryError) as error:  # ours: the kernel's own is told by a DidNotRun
        return NotVerified(f"check {name} had no memory left: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return None


def _repeats(check: str, subject: Subject, is_together: bool) -> bool:
    """Whether the check finds something again in a new start; a state that outlived the first start may spoil the clean result itself."""
    again: list[Finding] = []
    looks = [(name, CHECKS[name].run) for name in dict.fromkeys((check, "truth"))]
    if is_together:
        looks.append((check, lambda subject: Together(subject).found or []))
    return any(_run(name, look, subject, again) is not None or bool(again) for name, look in looks)


def _reason(findings: list[Finding]) -> str:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{findings[0]}{more}"


def _worst(subject: Subject) -> dict[str, float]:
    return {verdict.tensor: verdict.error_over_limit for verdict in subject.verdicts}
