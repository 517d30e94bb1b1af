"""P3, P4, P7, P12 in few calls: a kernel that stays right in several circumstances at once is not asked about each of them alone.

Only where one of these calls gives anything but the truth do the checks of `hazards` make calls of their own, each in one circumstance, and
say which it is. What none of them finds again is told as it was found: it takes several circumstances, or chance.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from pytest_longca.case import OPERANDS, named
from pytest_longca.errors import DidNotRun
from pytest_longca.hazards import (
    Surrounded,
    damages,
    first_neighbour,
    generators_moved_on,
    global_changes,
    huge,
    of_neighbour,
    run_on_other_values,
    soil_recycled_memory,
    surround,
    unequal,
)
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result
from pytest_longca.outcome import Unsupported
from pytest_longca.spent import KERNELS, spending
from pytest_longca.subject import (
    Finding,
    Malformed,
    Subject,
    as_result,
    finish_backward,
    finish_forward,
    finish_second_backward,
    kernel_errors,
    same_bits,
)

TOGETHER = frozenset({"poison", "guard", "repeat", "state"})
"""The checks that have nothing to find where `Together.found` is nothing."""
CIRCUMSTANCES = {
    "interleaved": "in call 2, with {other} between its forward and its backward",
    "again": "in call 3, the same bound call again, after a backward with another do",
    "poisoned": "in call 4, with NaN around the operands and in recycled memory, after {other}",
    "guarded": "in the last call, with huge values around the operands and in recycled memory{refilled}",
}
"""Each call and what it runs under."""
SAME_OPERANDS = {"interleaved": 2, "again": 3}
"""The calls, by number, on what the first had, memory included: a kernel that promises determinism gives the same bits."""


class Together:
    """A subject's calls in several circumstances at once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @cached_property
    def found(self) -> list[Finding] | None:
        """What the first wrong one of the calls shows; nothing if none is wrong. None where each check is to look for itself.

        That is for a kernel that is wrong in clean memory or refuses a circumstance, and a case without tokens. Raises DidNotRun.
        """
        if min(self.subject.case.seqlen_q, self.subject.case.seqlen_kv) == 0 or not self.subject.is_right:
            return None
        try:
            return next((findings for findings in self._findings() if findings), [])
        except Malformed as error:
            return [Finding("repeat", error.tensor, f"in a call after the first: {error.message}")]
        except DidNotRun as error:
            if isinstance(error.outcome, Unsupported):
                return None
            raise

    def unless_quiet(self, check: Callable[[Subject], list[Finding]]) -> Callable[[Subject], list[Finding]]:
        """The check, which makes calls of its own only if there may be something to find."""
        return lambda subject: [] if self.found == [] else check(subject)

    @cached_property
    def _other(self) -> Subject | None:
        """The kernel on another case, unless that would be compiled for it."""
        return None if self.subject.kernel.compiles_per_shape else first_neighbour(self.subject)

    def _findings(self) -> Iterator[list[Finding]]:
        """What is wrong, call by call: each is looked at before the next one."""
        subject = self.subject
        own, foreign = run_entangled(subject, self._other)
        for result, name in zip(own, SAME_OPERANDS, strict=False):
            yield self._wrong(result, name)
        if self._other and foreign:
            yield of_neighbour(self._other, foreign)
        yield self._wrong(self._poisoned(), "poisoned")
        surrounded = {
            name: Surrounded(getattr(subject.inputs, name), huge(subject.case), padded=True, in_turns_with=1.0) for name in OPERANDS
        }
        yield self._wrong(self._guarded(surrounded), "guarded")
        yield damages(surrounded) + global_changes(subject)

    def _wrong(self, result: Result, name: str) -> list[Finding]:
        """What the first result and the truth say against a result; the circumstance is worded only then."""
        result = self.subject.where_judged(result)
        if same_bits(result, self.subject.clean):
            return []
        is_due = self.subject.kernel.deterministic and name in SAME_OPERANDS
        differing = unequal(self.subject, "repeat", result, SAME_OPERANDS[name]) if is_due else []
        other = f"another case ({named(self._other.case)})" if self._other else "other calls"
        refilled = "" if self.subject.is_slow else ", and other values in the operands' own memory in the call before"
        return differing + self.subject.wrong("repeat", result, CIRCUMSTANCES[name].format(other=other, refilled=refilled))

    def _poisoned(self) -> Result:
        """Right after the other case's backward: a new call, with NaN wherever it may not read."""
        nan = float("nan")
        soil_recycled_memory(self.subject, nan)
        views = (surround(getattr(self.subject.inputs, name), nan, padded=True)[1] for name in OPERANDS)
        return self.subject.run(self.subject.case, Inputs(*views))

    def _guarded(self, surrounded: dict[str, Surrounded]) -> Result:
        """With other values in the same memory in the call before, unless calls are slow."""
        held = Inputs(**{name: operand.view for name, operand in surrounded.items()})
        if not self.subject.is_slow:
            run_on_other_values(self.subject, held)
        soil_recycled_memory(self.subject, huge(self.subject.case))
        with generators_moved_on(self.subject):
            return self.subject.run(self.subject.case, held)


def run_entangled(subject: Subject, other: Subject | None) -> tuple[list[Result], Result | None]:
    """A call's results, and those of another case's call whose forward is before its backward and whose backward after it.

    In between, the call itself runs once more (a slow one does not), its backward after one with another do: the results are of the first
    and the second time.
    """
    others = [(other, other.inputs)] if other else []
    with spending(KERNELS), kernel_errors(subject.kernel.name):
        call = subject.kernel.bind(subject.case, subject.inputs)
        calls = [(other, other.kernel.bind(other.case, inputs)) for other, inputs in others]
        front = finish_forward(subject.case, call, subject.inputs.q)
        fronts = [finish_forward(other.case, its_call, other.inputs.q) for other, its_call in calls]
        own = [as_result(call, *front, *finish_backward(subject.case, call, subject.inputs.do))]
        if not subject.is_slow:
            front = finish_forward(subject.case, call, subject.inputs.q)
            own.append(as_result(call, *front, *finish_second_backward(subject.case, call, subject.inputs.do)))
        pairs = zip(calls, fronts, strict=True)
        foreign = [as_result(its, *front, *finish_backward(other.case, its, other.inputs.do)) for (other, its), front in pairs]
        if subject.machine.device == "cuda":
            torch.cuda.synchronize()
    return own, foreign[0] if foreign else None
