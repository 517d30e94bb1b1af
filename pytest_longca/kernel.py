"""Kernel: what an attention implementation declares, and how it is called."""

import contextlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pytest_longca.case import Case, named
from pytest_longca.errors import InvalidArgument, asked
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.outcome import NotInstalled, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_longca.inputs import Inputs


SUMS_IN_DTYPE = "sums_in_dtype"
"""A call's fact: gradients are added up in their own dtype, block by block, which costs accuracy that the judge allows for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A distribution that a kernel needs (as `importlib.metadata` names it) and how to install it.

    `alternatives` are other names under which the same package is published; the first that is installed counts.
    """

    distribution: str
    how: str
    at_least: str | None = None
    alternatives: tuple[str, ...] = ()

    def installed(self) -> tuple[str, str] | None:
        """The distribution that is installed and its version, or None."""
        for name in (self.distribution, *self.alternatives):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return name, importlib.metadata.version(name)
        return None

    def missing(self) -> NotInstalled | None:
        found = self.installed()
        if found is None:
            return NotInstalled(f"the package {self.distribution} is not installed", self.how)
        name, version = found
        if self.at_least and _release(version) < _release(self.at_least):
            return NotInstalled(f"{name} is {version}, at least {self.at_least} is needed", self.how)
        return None


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kernel can do, as data: `refusal` turns it into a reason. What it cannot express, a kernel adds in `supports`.

    `masks` are the forms that the kernel takes: a mask fits if it has one of them. `head_dims` is a range or a tuple.
    """

    masks: frozenset[Form] = frozenset({Form.PREDICATE})
    dtypes: frozenset[str] = frozenset({"fp32", "bf16", "fp16", "fp64"})
    head_dims: range | tuple[int, ...] = range(1, 1025)
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    capability: tuple[int, int] | None = None
    backward: bool = True
    gqa: bool = True
    unequal_head_dims: bool = True
    empty_sequences: bool = False

    def refusal(self, case: Case, machine: Machine) -> str | None:
        """Why the case cannot run, or None."""
        mask = case.mask
        rules = (
            (machine.device not in self.devices, f"runs on {' or '.join(sorted(self.devices))} only"),
            (
                _older(machine.capability, self.capability),
                f"needs compute capability {_dotted(self.capability)}, this is {_dotted(machine.capability)}",
            ),
            (not self.masks & mask.forms, f"takes {' or '.join(sorted(self.masks))}, and {mask.name} has no such form"),
            (case.dtype not in self.dtypes, f"takes {', '.join(sorted(self.dtypes))}, not {case.dtype}"),
            (case.head_dim not in self.head_dims, f"head_dim {case.head_dim} is not among {_shown(self.head_dims)}"),
            (case.head_dim_v not in self.head_dims, f"head_dim_v {case.head_dim_v} is not among {_shown(self.head_dims)}"),
            (case.head_dim != case.head_dim_v and not self.unequal_head_dims, "needs head_dim_v = head_dim"),
            (case.direction.needs_backward and not self.backward, "has no backward"),
            (case.group > 1 and not self.gqa, "needs as many key/value heads as query heads"),
            (not self.empty_sequences and 0 in (case.seqlen_q, case.seqlen_kv), "takes no sequence of length 0"),
        )
        return next((reason for broken, reason in rules if broken), None)


def _older(have: tuple[int, int] | None, need: tuple[int, int] | None) -> bool:
    return need is not None and (have is None or have < need)


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability)) if capability else "a CPU"


def _shown(head_dims: range | tuple[int, ...]) -> str:
    if isinstance(head_dims, range):
        step = f" in steps of {head_dims.step}" if head_dims.step > 1 else ""
        return f"{head_dims[0]} to {head_dims[-1]}{step}"
    return ", ".join(map(str, head_dims))


@dataclass(slots=True)
class Call(ABC):
    """A kernel bound to a case and its inputs: mask form, plan and layout are ready, only the computation is left.

    `facts` is what the record should say about how it ran: backend, compiled form, determinism.
    """

    facts: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def forward(self) -> "tuple[Tensor, Tensor | None]":
        """`(out, lse)`: out `[batch, seqlen_q, heads_q, head_dim_v]`, lse fp32 `[batch, heads_q, seqlen_q]`, natural log, or None."""

    @abstractmethod
    def backward(self, do: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        """`(dq, dk, dv)` of the last forward, shaped like q, k and v, through the backend's public autograd path."""


class AutogradCall(Call):
    """The usual Call: a differentiable function `(q, k, v) -> (out, lse | None)` in BSHD, and torch.autograd.grad."""

    __slots__ = ("_out", "function", "leaves")

    def __init__(
        self,
        function: "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]",
        inputs: "Inputs",
        needs_backward: bool = True,
        **facts: str,
    ) -> None:
        super().__init__(dict(facts))
        self.function = function
        self.leaves = tuple(x.detach().requires_grad_(needs_backward) for x in (inputs.q, inputs.k, inputs.v))
        self._out: Tensor | None = None

    def forward(self) -> "tuple[Tensor, Tensor | None]":
        answer = self.function(*self.leaves)
        if isinstance(answer, tuple) and len(answer) == 2:  # else whoever checks the answer's form says what is due
            self._out = answer[0]
        return answer

    def backward(self, do: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        import torch

        assert self._out is not None, "backward before forward"
        return torch.autograd.grad(self._out, self.leaves, do, retain_graph=True)  # type: ignore[return-value]  # one gradient a leaf


class Kernel(ABC):
    """An attention implementation. A subclass declares what it can do and binds cases; it imports its backend in `bind` only."""

    name: ClassVar[str]
    source: ClassVar[str] = ""
    requires: ClassVar[tuple[Requirement, ...]] = ()
    capabilities: ClassVar[Capabilities] = Capabilities()
    deterministic: ClassVar[bool] = False
    compiles_per_shape: ClassVar[bool] = False
    """Whether each shape is a compilation of its own. If not, the code for one length serves the others (see `warming.code_of`)."""
    compiles_per_head_dim: ClassVar[bool] = False
    """Whether each head dim, dtype or group is a compilation of seconds, whatever the lengths: on a GPU a cell's examples then have few."""
    is_triton: ClassVar[bool] = False
    """Whether it runs interpreted on a CPU, and so slowly that examples must be small there."""
    linear_memory: ClassVar[bool] = False
    """Whether it promises memory linear in the lengths: it is then held to that."""
    device_kernel_pattern: ClassVar[str] = ""
    """A regular expression that the profiler's name of at least one device kernel matches; another name is a silent fallback."""

    def compiles_to_disk(self, machine: Machine) -> bool:
        """Whether running a case compiles what other processes then find on disk: a session's cases are then run ahead, in several.

        All of them if it `compiles_per_shape`, else the cheapest of those that need the same code.
        """
        return machine.device == "cuda" and (self.compiles_per_shape or self.is_triton)

    def missing(self) -> NotInstalled | None:
        """The first requirement that is not installed, or None. Imports nothing."""
        return next((gap for need in self.requires if (gap := need.missing())), None)

    def version(self) -> str | None:
        """The version of its first requirement, of torch if it has none; None if that is not installed."""
        packages = self.requires or (Requirement(distribution="torch", how="pip install torch"),)
        found = packages[0].installed()
        return found[1] if found else None

    def supports(self, case: Case, machine: Machine) -> Unsupported | None:
        """Why this kernel cannot do the case on such a machine, or None. Pure: no GPU, no backend import."""
        reason = self.capabilities.refusal(case, machine) or self.also_refuses(case, machine)
        return Unsupported(reason) if reason else None

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        """What `capabilities` cannot express: a reason, or None."""
        return None

    @abstractmethod
    def bind(self, case: Case, inputs: "Inputs") -> Call:
        """Build mask form, plan and layout for the case; timed apart from the call. Raises DidNotRun if the backend refuses."""

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str | None:
        """Python text with `attention(q, k, v) -> (out, lse or None)`, BSHD, that makes the case's call without pytest-longca, or None.

        For `--longca-repro`. The text may use `torch`, BATCH, HEADS_Q, HEADS_KV, SEQLEN_Q, SEQLEN_KV, HEAD_DIM, HEAD_DIM_V, SCALE, DEVICE,
        DTYPE, BACKWARD, VISIBLE (the mask, bool `[batch or 1, heads or 1, seqlen_q, seqlen_kv]`) and `aligned(x)`, a copy where TMA does
        not take the strides. `facts` are those of the call that failed. Pure, as `supports` is. A class with a `bind` of its own inherits
        none.
        """
        return None


def refusal_of(kernel: Kernel, case: Case, machine: Machine) -> Unsupported | None:
    """What the kernel's `supports` says. Raises InvalidArgument, with kernel, place and case, if that raises."""
    try:
        return asked(f"kernel {kernel.name}: supports", lambda: kernel.supports(case, machine))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error} on {named(case)}") from error
