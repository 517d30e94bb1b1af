"""What the gate says: verdicts, limits, and the comparison as a value. How it finds them is in compare.py."""

import enum
import math
from dataclasses import dataclass, field

from pytest_longca.errors import InvalidArgument
from pytest_longca.report.series import Key


class Verdict(enum.StrEnum):
    """What the gate says of a case, the gravest first."""

    WRONG = "wrong"
    SLOWER = "slower"
    HUNGRIER = "hungrier"
    LESS_ACCURATE = "less-accurate"
    MISSING = "missing"
    NEW_SKIP = "new-skip"
    OTHER_DEVICE = "other-device"
    OTHER_DRIVER = "other-driver"
    NOT_COMPARABLE = "not-comparable"
    THROTTLED = "throttled"
    ADDED = "added"
    TOO_NOISY = "too-noisy"
    OK = "ok"


MEANING: dict[Verdict, str] = {
    Verdict.WRONG: "passed in the baseline and is wrong, crashes or hangs now",
    Verdict.SLOWER: "slower than the limit, in both looks",
    Verdict.HUNGRIER: "needs more memory than the limit",
    Verdict.LESS_ACCURATE: "its error grew by more than the limit",
    Verdict.MISSING: "is in the baseline and not in the new records",
    Verdict.NEW_SKIP: "ran in the baseline and is skipped now",
    Verdict.OTHER_DEVICE: "the two files come from different devices",
    Verdict.OTHER_DRIVER: "the two files come from different drivers",
    Verdict.NOT_COMPARABLE: "too few processes or samples to say anything",
    Verdict.THROTTLED: "the GPU held itself back while it was timed",
    Verdict.ADDED: "is not in the baseline, so nothing guards it",
    Verdict.TOO_NOISY: "its processes differ too much: a limit must be 8 times their spread, so that the cut at its half is 4 spreads away",
    Verdict.OK: "no worse than the baseline",
}

REGRESSIONS = frozenset(list(Verdict)[: list(Verdict).index(Verdict.OTHER_DEVICE)])
ALLOWED = frozenset({Verdict.OK, Verdict.TOO_NOISY})
UNTOLD = frozenset({Verdict.NOT_COMPARABLE, Verdict.THROTTLED, Verdict.TOO_NOISY})
"""Verdicts that say that a quantity could not be judged: neither worse nor as good."""

UNCOMPARED = frozenset({Verdict.MISSING, Verdict.NEW_SKIP, Verdict.NOT_COMPARABLE, Verdict.THROTTLED, Verdict.ADDED})
"""Verdicts of cases that were not compared: one side has no result, or the two do not suffice."""


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "case"), counted(0, "case")
    ('1 case', '0 cases')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def percent(limit: float) -> str:
    """A limit as it is written in options.

    >>> percent(0.05), percent(0.005)
    ('5%', '0.5%')
    """
    return f"{100 * limit:g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much worse is too much: fractions that must be caught, None leaves the quantity alone.

    A change must also exceed the absolute floors, which are what clocks and allocators resolve.
    A baseline needs `processes` medians of at least `samples` samples for each case.
    """

    slower: float | None = 0.05
    memory: float | None = 0.05
    error: float | None = 0.25
    floor_ms: float = 0.001
    floor_bytes: int = 2 * 2**20
    floor_error: float = 0.01
    processes: int = 5
    samples: int = 30

    def __post_init__(self) -> None:
        for name in ("slower", "memory", "error"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise InvalidArgument(f"the limit {name} is {limit}: give a positive fraction, such as 0.05 for 5 %")


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict on one quantity of one case, with the figures that it rests on."""

    verdict: Verdict
    quantity: str
    reason: str
    old: float | None = None
    new: float | None = None
    change: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """All findings on one case, the gravest first."""

    key: Key
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return self.findings[0].verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gate's answer: one row a case, what holds for the whole run, and what the policy allows.

    `granted` are the verdicts that the user allowed by name, beyond those that never fail alone. With an `anchor`, times are ratios.
    """

    rows: tuple[Row, ...]
    run: tuple[Finding, ...] = ()
    allowed: frozenset[Verdict] = ALLOWED
    granted: frozenset[Verdict] = frozenset()
    limits: Limits = field(default_factory=Limits)
    anchor: str | None = None

    @property
    def timings(self) -> list[Verdict]:
        """The verdict on each time that there was to compare."""
        return [finding.verdict for row in self.rows for finding in row.findings if finding.quantity == "time"]

    @property
    def gates_nothing(self) -> bool:
        """Whether no time at all could be judged, which a user must allow by name."""
        found = set(self.timings)
        return bool(found) and found <= UNTOLD and not found <= self.granted

    @property
    def verdicts(self) -> list[Verdict]:
        """Every verdict there is, of the run and of the rows."""
        return [finding.verdict for finding in (*self.run, *(finding for row in self.rows for finding in row.findings))]

    @property
    def exit_code(self) -> int:
        """0: nothing became worse. 1: something did. 2: it cannot be told."""
        failing = {verdict for verdict in self.verdicts if verdict not in self.allowed}
        if failing & REGRESSIONS:
            return 1
        return 2 if failing or self.gates_nothing else 0
