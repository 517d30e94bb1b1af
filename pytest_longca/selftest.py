"""The checker checked: every fault model planted into Naive-Torch on this machine, and what the default checks say about it."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings

from pytest_longca.case import Case
from pytest_longca.checknames import GROUPS
from pytest_longca.checks import Verification, verify
from pytest_longca.errors import CheckFailed
from pytest_longca.faults import FAULTS, Fault
from pytest_longca.ids import parse_case
from pytest_longca.kernel import Kernel
from pytest_longca.machine import CPU, Machine
from pytest_longca.outcome import Passed, Wrong
from pytest_longca.strategies import MaskClass, cases, mask_class, probe_cases

EXAMPLES = 50
"""Examples drawn for a fault that the probes do not see: what a run by default draws for each cell."""
SEED = 0
"""The seed of a run by default. Hypothesis mixes in constants of modules that are imported: not all examples need be the same."""


@dataclass(frozen=True, slots=True)
class Catch:
    """What became of a planted fault: the check that caught it (None: it was missed), what that said, on which case, after how long."""

    fault: Fault
    check: str | None
    message: str
    case: str
    num_cases: int
    seconds: float

    def __str__(self) -> str:
        if self.check is None:
            return f"{self.fault.name}: MISSED by {self.num_cases} cases ({self.fault.description})"
        return f"{self.fault.name}: {self.check}, case {self.num_cases}, {self.seconds:.2f} s: {self.message}"


def selftest(faults: Iterable[Fault] = (), machine: Machine = CPU) -> Iterator[Catch]:
    """Plant each fault (all of them by default) and hunt it with the default checks."""
    for fault in faults or FAULTS.values():
        yield hunt(fault, machine)


def hunt(fault: Fault, machine: Machine = CPU, examples: int = EXAMPLES, with_probes: bool = True) -> Catch:
    """Judge a planted fault as the suite judges a kernel: probes first (or not at all), then drawn examples, until something is wrong."""
    from pytest_longca.kernels.naive import Naive

    kernel = fault.plant(Naive())
    start, number = time.perf_counter(), 0
    for number, (case, verification) in enumerate(_judged(kernel, mask_class(fault.mask), machine, examples, with_probes), 1):
        if not isinstance(verification.outcome, Passed):
            case, verification = _accused(fault, machine, case, verification)
            check = verification.findings[0].check if verification.findings else verification.outcome.kind
            message = str(verification.findings[0]) if verification.findings else str(verification.outcome)
            return Catch(fault, check, message, case.id, number, time.perf_counter() - start)
    return Catch(fault, None, "", "", number, time.perf_counter() - start)


def _accused(fault: Fault, machine: Machine, case: Case, verification: Verification) -> tuple[Case, Verification]:
    """As `blame.accused`: a kernel that is planted anew has kept nothing, as a new process has not."""
    from pytest_longca.kernels.naive import Naive

    neighbour = verification.findings[0].neighbour if verification.findings else None
    if neighbour is None:
        return case, verification
    other = parse_case(neighbour, {fault.mask: mask_class(fault.mask)})
    alone = verify(fault.plant(Naive()), other, machine, ("truth",))
    return (other, alone) if isinstance(alone.outcome, Wrong) else (case, verification)


def _judged(kernel: Kernel, mask: MaskClass, machine: Machine, examples: int, with_probes: bool) -> Iterator[tuple[Case, Verification]]:
    for case in probe_cases(mask, kernel, machine) if with_probes else ():
        yield case, verify(kernel, case, machine, GROUPS["probes"])
    yield from _examples(kernel, mask, machine, examples)


def _examples(kernel: Kernel, mask: MaskClass, machine: Machine, examples: int) -> list[tuple[Case, Verification]]:
    """Drawn examples up to the first that is not right, with the checks that a run has for them. Nothing is shrunk."""
    seen: list[tuple[Case, Verification]] = []

    @seed(f"{SEED}:{mask.name}")
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases([mask], kernel, machine))
    def run(case: Case) -> None:
        if not seen or isinstance(seen[-1][1].outcome, Passed):  # what fails once may not do so in Hypothesis' own repetition
            seen.append((case, verify(kernel, case, machine, GROUPS["examples"])))
        if not isinstance(seen[-1][1].outcome, Passed):
            raise CheckFailed(case.id)

    with contextlib.suppress(CheckFailed):
        run()
    return seen
