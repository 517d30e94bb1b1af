"""Subject: a kernel on a case on a machine, its clean result and the truth, each computed once; what every check is handed."""

import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pytest_longca import truth
from pytest_longca.case import Case
from pytest_longca.errors import CheckFailed, DidNotRun, InvalidArgument, first_line, is_out_of_memory
from pytest_longca.inputs import TORCH_DTYPES, Inputs, distinct, laid_alike, make_inputs, shapes
from pytest_longca.judge import Result, Verdict
from pytest_longca.kernel import SUMS_IN_DTYPE, Call, Kernel, refusal_of
from pytest_longca.machine import Machine
from pytest_longca.outcome import Crashed, Outcome, OutOfMemory, Unsupported
from pytest_longca.processes import shortened
from pytest_longca.reference import Reference, cached_reference
from pytest_longca.settings import CHOICES, Changes, kept
from pytest_longca.spent import KERNELS, spending

TENSORS = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")
LISTED_ROWS = 256
"""Extent up to which all rows of a place are listed; beyond, only the worst."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found wrong: in which tensor, where, how much over the limit (None for an exact check), in words.

    `neighbour` is the id of the case that it is about where that is another than the judged one, and is wrong when it runs alone, too.
    In a process that ran others before, alone does not say whose fault it is: `blame.accused` asks a new one.
    `called` is the id of the case that the check made of the judged one and called; None if it called the judged one.
    """

    check: str
    tensor: str
    message: str
    place: dict[str, Any] | None = None
    error_over_limit: float | None = None
    neighbour: str | None = None
    called: str | None = None

    def __str__(self) -> str:
        return f"{self.check}: {self.tensor}: {self.message}"


def is_interpreted(kernel: Kernel, machine: Machine) -> bool:
    """Whether the kernel runs in Triton's interpreter, some milliseconds a tile."""
    return kernel.is_triton and machine.device == "cpu"


def declared(kernel: Kernel, case: Case, machine: Machine) -> Unsupported | Crashed | None:
    """What the kernel declares about a case, as its outcome: a refusal, None if it does the case, a crash if the declaration raises."""
    try:
        return refusal_of(kernel, case, machine)
    except InvalidArgument as error:
        return Crashed(str(error))


SLOW_FLOP = {"cpu": 1e11, "cuda": 1e15}
"""The work of a case whose call takes seconds on any kernel."""


class Malformed(CheckFailed):
    """A kernel returned something that is no result: the wrong shape, dtype or type."""

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(f"{tensor}: {message}")
        self.tensor = tensor
        self.message = message


class Subject:
    """A kernel on one case. `run` calls the kernel on any inputs of any case; the properties are this case's own."""

    def __init__(self, kernel: Kernel, case: Case, machine: Machine) -> None:
        self.kernel = kernel
        self.case = case
        self.machine = machine
        self.facts: dict[str, str] = {}
        self.moved_generators: list[str] = []
        """The global random generators that the latest `run` moved."""

    @cached_property
    def inputs(self) -> Inputs:
        """The case's own operands."""
        return make_inputs(self.case, self.machine.device)

    @cached_property
    def reference(self) -> Reference:
        """The truth about the case."""
        return cached_reference(self.case, self.inputs, self.machine.device)

    @cached_property
    def result(self) -> Result:
        """What the kernel gave the first time, in ordinary memory; copies, which no later call can change."""
        given = self.run(self.case, self.inputs)
        copies: dict[str, Any] = {name: None if (x := getattr(given, name)) is None else x.clone() for name in TENSORS}
        return dataclasses.replace(given, **copies)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the clean result."""
        return self.judge(self.clean)

    @cached_property
    def clean(self) -> Result:
        """The clean result where results are judged."""
        return self.where_judged(self.result)

    @property
    def is_right(self) -> bool:
        """Whether the clean result is the truth."""
        return all(verdict.ok for verdict in self.verdicts)

    def other(self, case: Case) -> "Subject":
        """The same kernel on another case."""
        return Subject(self.kernel, case, self.machine)

    @property
    def is_slow(self) -> bool:
        """Whether a call takes seconds: then checks make do with fewer of them."""
        return is_interpreted(self.kernel, self.machine) or self.case.flop() > SLOW_FLOP[self.machine.device]

    def supports(self, case: Case) -> bool:
        """Whether the kernel declares that it can do the case on this machine. Raises DidNotRun if its declaration raises."""
        answer = declared(self.kernel, case, self.machine)
        if isinstance(answer, Crashed):
            raise DidNotRun(answer)
        return answer is None

    def run(self, case: Case, inputs: Inputs) -> Result:
        """Bind, forward and, where the case has one, backward. Raises DidNotRun or Malformed, nothing else."""
        with spending(KERNELS), kernel_errors(self.kernel.name) as changes:
            call = self.kernel.bind(case, inputs)
            out, lse = finish_forward(case, call, inputs.q)
            grads = finish_backward(case, call, inputs.do)
            if self.machine.device == "cuda":
                torch.cuda.synchronize()
            self.facts.update({str(name): str(told) for name, told in call.facts.items()})
        self.moved_generators = changes.generators
        return as_result(call, out, lse, *grads)

    def run_twice(self) -> Result:
        """What the case's own call gives when all of it ran before, and its backward with another do. Raises as `run` does."""
        case, inputs = self.case, self.inputs
        with spending(KERNELS), kernel_errors(self.kernel.name):
            call = self.kernel.bind(case, inputs)
            finish_forward(case, call, inputs.q)
            finish_backward(case, call, inputs.do)
            out, lse = finish_forward(case, call, inputs.q)
            grads = finish_second_backward(case, call, inputs.do)
            if self.machine.device == "cuda":
                torch.cuda.synchronize()
        return as_result(call, out, lse, *grads)

    def judge(self, result: Result) -> list[Verdict]:
        """The verdicts on a result of this case's own values."""
        self.facts[truth.VERIFIED] = truth.verified_by(self.case, self.inputs.q.device)
        return truth.verdicts(self.case, self._judged_inputs, result)

    def where_judged(self, result: Result) -> Result:
        """A result where results are judged: a small case's on the host, so that no comparison has to wait for the device."""
        return truth.where_judged(self.case, result)

    @cached_property
    def _judged_inputs(self) -> Inputs:
        return truth.where_judged(self.case, self.inputs)

    def findings(self, check: str, result: Result, circumstance: str) -> list[Finding]:
        """What the truth says against a result that was had under a circumstance; none if it equals the clean one bit by bit."""
        result = self.where_judged(result)
        if same_bits(result, self.clean):
            return []
        return self.wrong(check, result, circumstance)

    def wrong(self, check: str, result: Result, circumstance: str = "") -> list[Finding]:
        """What the truth says against a result, as findings of a check."""
        prefix = f"{circumstance}: " if circumstance else ""
        verdicts = self.verdicts if result is self.__dict__.get("result") else self.judge(result)  # a clean run only where it is asked for
        return [
            Finding(check, verdict.tensor, prefix + verdict.message, _place(verdict, self.case.group), verdict.error_over_limit)
            for verdict in verdicts
            if not verdict.ok
        ]


def _place(verdict: Verdict, group: int) -> dict[str, Any] | None:
    """Where a verdict's bad rows are: batch, query head, and rows (queries) or keys."""
    place = verdict.place
    if place is None:
        return None
    first, last = place.rows
    among = list(range(first, last + 1)) if last - first < LISTED_ROWS else [place.row]
    if verdict.tensor in ("dk", "dv"):
        return {"batch": place.batch, "head": place.head * group, "keys": among}
    return {"batch": place.batch, "head": place.head, "rows": among}


def as_result(call: Call, out: Tensor, lse: Tensor | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> Result:
    """What a call gave, with what it declares about its sums."""
    return Result(out, lse, dq, dk, dv, sums_in_dtype=SUMS_IN_DTYPE in call.facts)


def same_bits(one: Result, two: Result) -> bool:
    """Whether two results are equal in every bit that counts (NaN equals NaN: the same failure is no news)."""
    pairs = [(getattr(one, name), getattr(two, name)) for name in TENSORS]
    present = [pair for pair in pairs if None not in pair]
    if any(x is not y for x, y in pairs if x is None or y is None):
        return False
    return are_equal(present) or all(bool(((x == y) | (x.isnan() & y.isnan())).all()) for x, y in present)


def are_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the tensors of each pair, of one shape, are equal; NaN equals nothing. A device is waited for once."""
    if any(x.is_cuda for pair in pairs for x in pair):
        return not bool(torch.stack([(x != y).any() for x, y in pairs]).any())
    return all(torch.equal(x, y) for x, y in pairs)


def finish_forward(case: Case, call: Call, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """The call's forward, checked for form, and to be where q is."""
    answer = call.forward()
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Malformed("out", f"forward returned {_what(answer)}: it must return (out, lse or None)")
    out, lse = answer
    _check_form("out", out, shapes(case)["do"], (TORCH_DTYPES[case.dtype],), q.device)
    if lse is not None:
        _check_form("lse", lse, (case.batch, case.heads_q, case.seqlen_q), (torch.float32, torch.float64), q.device)
    return out.detach(), None if lse is None else lse.detach()


def finish_backward(case: Case, call: Call, do: Tensor) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """The call's backward, checked for form; nothing where the case has none."""
    if not case.direction.needs_backward:
        return None, None, None
    grads = call.backward(do)
    if not isinstance(grads, tuple | list) or len(grads) != 3:
        raise Malformed("dq", f"backward returned {_what(grads)}: it must return (dq, dk, dv)")
    expected = shapes(case)
    for name, grad in zip(GRADIENTS, grads, strict=True):
        _check_form(name, grad, expected[name[1:]], (TORCH_DTYPES[case.dtype],), do.device)
    return grads[0], grads[1], grads[2]


def finish_second_backward(case: Case, call: Call, do: Tensor) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """The call's backward right after one with another do, of which nothing may be left."""
    other = laid_alike(do)  # where strides are compiled, this is no other code
    torch.mul(do[distinct(do)], -0.5, out=other[distinct(do)])
    finish_backward(case, call, other)
    return finish_backward(case, call, do)


def _check_form(name: str, value: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise Malformed(name, f"the kernel returned {_what(value)} where a tensor of shape {list(shape)} is due")
    if tuple(value.shape) != shape:
        raise Malformed(name, f"has shape {list(value.shape)}, due is {list(shape)} ({_AXES[name]})")
    if value.dtype not in dtypes:
        raise Malformed(name, f"has dtype {value.dtype}, due is {' or '.join(map(str, dtypes))}")
    if value.layout is not torch.strided:
        raise Malformed(name, f"has layout {value.layout}, due is torch.strided")
    if value.device != device:
        raise Malformed(name, f"is on the device {value.device}, due is {device}, as q is")


_AXES = {
    "out": "batch, seqlen_q, heads_q, head_dim_v",
    "lse": "batch, heads_q, seqlen_q",
    "dq": "batch, seqlen_q, heads_q, head_dim",
    "dk": "batch, seqlen_kv, heads_kv, head_dim",
    "dv": "batch, seqlen_kv, heads_kv, head_dim_v",
}


def _what(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


CHANGED: dict[str, dict[str, str]] = {}
"""What each kernel changed in this process, however early: an import changes it once. By kernel, then setting; in words."""


@contextmanager
def kernel_errors(kernel: str) -> Iterator[Changes]:
    """Where a kernel's code runs. The process's settings are put back after it, and kept in mind: yields them.

    Turns whatever the kernel raises into DidNotRun with its outcome; what already is one, and Malformed, pass.
    """
    with kept() as changes:
        try:
            yield changes
        except (DidNotRun, Malformed):
            raise
        except KeyboardInterrupt:  # the user's, who wants the run to end
            raise
        except BaseException as error:  # a kernel that exits or skips a test has not run either
            raise DidNotRun(_outcome_of(kernel, error)) from error
    is_first = kernel not in CHANGED
    CHANGED.setdefault(kernel, {}).update({name: told for name, told in changes.settings.items() if not (is_first and name in CHOICES)})


def _outcome_of(kernel: str, error: BaseException) -> Outcome:
    said = shortened(first_line(error))
    if is_out_of_memory(error):
        return OutOfMemory(said or type(error).__name__)
    frames = shortened("".join(traceback.format_exception(error, limit=-4)))
    return Crashed(f"{kernel} raised {type(error).__name__}: {said}", frames)
