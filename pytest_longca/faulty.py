"""A correct kernel made wrong on purpose: the ways to misbehave, from which `faults` builds each fault model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.mask import MaskMod, PredicateMask

Grads = tuple[Tensor, Tensor, Tensor]
Bind = Callable[[Kernel, Case, Inputs], Call]
Changed = Callable[[Case, MaskMod], MaskMod]


@dataclass(frozen=True, slots=True)
class Fresh:
    """A fault with a memory of its own: `make` gives each planted kernel a new one."""

    make: Callable[[], Bind]


class Faulty(Kernel):
    """A kernel whose `bind` goes through a fault; it declares what the correct one inside declares."""

    def __init__(self, inner: Kernel, bind: Bind) -> None:
        self.inner = inner
        self._bind = bind

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        return self.inner.also_refuses(case, machine)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        return self._bind(self.inner, case, inputs)


def make_faulty(inner: Kernel, name: str, bind: Bind | Fresh) -> Kernel:
    """The kernel `inner` with a fault: a class of its own, because names and capabilities belong to classes."""
    declared = {
        key: getattr(inner, key)
        for key in ("source", "capabilities", "deterministic", "compiles_per_shape", "compiles_per_head_dim", "is_triton")
    }
    made: Kernel = type("Faulty", (Faulty,), {"name": f"{inner.name}_{name}", **declared})(
        inner, bind.make() if isinstance(bind, Fresh) else bind
    )
    return made


class Hooked(Call):
    """A call whose forward and backward may be other calls', and whose results pass through hooks."""

    __slots__ = ("_after_backward", "_after_forward", "_backward", "_before_backward", "_forward")

    def __init__(
        self,
        forward: Call,
        backward: Call | None = None,
        *,
        after_forward: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
        before_backward: Callable[[Tensor], Tensor] | None = None,
        after_backward: Callable[[Tensor, Tensor, Tensor], Grads] | None = None,
    ) -> None:
        super().__init__(dict(forward.facts))
        self._forward, self._backward = forward, backward
        self._after_forward, self._before_backward, self._after_backward = after_forward, before_backward, after_backward

    def forward(self) -> tuple[Tensor, Tensor | None]:
        out, lse = self._forward.forward()
        return self._after_forward(out.detach(), lse) if self._after_forward else (out, lse)

    def backward(self, do: Tensor) -> Grads:
        call = self._forward
        if self._backward is not None:
            call = self._backward
            call.forward()
        grads = call.backward(self._before_backward(do) if self._before_backward else do)
        return self._after_backward(*grads) if self._after_backward else grads


def masked_by(case: Case, change: Changed, **sizes: int) -> Case:
    """The case with its mask's predicate changed; `change(case, mask_mod)` gives the wrong one."""
    mask = case.mask

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        wrong = change(case, mask.predicate(q_idx.device))
        return wrong(b, h, q_idx, kv_idx)

    lengths = {"seqlen_q": mask.seqlen_q, "seqlen_kv": mask.seqlen_kv, **sizes}
    return replace(case, mask=PredicateMask(mod, label=mask.name, num_batches=mask.batch, num_heads=mask.heads, **lengths))


def wrong_mask(change: Changed) -> Bind:
    """Both passes under a wrong mask."""
    return lambda inner, case, inputs: inner.bind(masked_by(case, change), inputs)


def wrong_backward_mask(change: Changed) -> Bind:
    """A right forward and a backward under a wrong mask."""
    return lambda inner, case, inputs: Hooked(inner.bind(case, inputs), inner.bind(masked_by(case, change), inputs))


def other_mask(change: Callable[[Any], Any]) -> Bind:
    """Both passes under a mask of the same kind with wrong parameters; what `change` cannot make wrong stays right."""
    return lambda inner, case, inputs: inner.bind(replace(case, mask=change(case.mask)), inputs)


def wrong_inputs(change: Callable[[Case, Inputs], Inputs]) -> Bind:
    """Both passes on operands that were read wrongly."""
    return lambda inner, case, inputs: inner.bind(case, change(case, inputs))


def wrong_results(
    forward: Callable[[Case, Inputs, Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
    backward: Callable[[Case, Inputs, Grads], Grads] | None = None,
) -> Bind:
    """Right passes whose results are then spoilt."""

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        return Hooked(
            inner.bind(case, inputs),
            after_forward=(lambda out, lse: forward(case, inputs, out, lse)) if forward else None,
            after_backward=(lambda *grads: backward(case, inputs, grads)) if backward else None,
        )

    return bind


def wrong_grad(name: str, change: Callable[[Case, Tensor], Tensor]) -> Bind:
    """One gradient spoilt."""
    number = ("dq", "dk", "dv").index(name)

    def backward(case: Case, inputs: Inputs, grads: Grads) -> Grads:
        spoilt = list(grads)
        spoilt[number] = change(case, grads[number].clone())
        return spoilt[0], spoilt[1], spoilt[2]

    return wrong_results(backward=backward)


def head_map(of: Callable[[Case, Tensor], Tensor], summed: Callable[[Case, Tensor], Tensor] | None = None) -> Bind:
    """Query heads that read the key/value heads of `of(case, heads)`, int `[heads_q]`; their gradients go back by the same map.

    `summed(case, x)` may replace that sum: it gets the query heads' gradients `[batch, seqlen_kv, heads_q, head_dim]`.
    """

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        index = of(case, torch.arange(case.heads_q, device=inputs.q.device))
        spread = Inputs(inputs.q, inputs.k[:, :, index], inputs.v[:, :, index], inputs.do)

        def collect(x: Tensor) -> Tensor:
            if summed is not None:
                return summed(case, x)
            exact = torch.zeros((*x.shape[:2], case.heads_kv, x.shape[3]), dtype=torch.float64, device=x.device)
            return exact.index_add_(2, index, x.double()).to(x.dtype)

        call = inner.bind(replace(case, heads_kv=case.heads_q), spread)
        return Hooked(call, after_backward=lambda dq, dk, dv: (dq, collect(dk), collect(dv)))

    return bind


def right_heads(case: Case, heads: Tensor) -> Tensor:
    """The key/value head of each query head."""
    return heads // case.group


class Explicit(Call):
    """Attention and its backward written out in fp32, with a hook on each intermediate: for faults inside the mathematics.

    Hooks by name: `scores` (masked, scaled), `p`, `delta` (the row-sum term), `ds`. Each gets the case and the tensor
    `[batch, heads_q, seqlen_q, seqlen_kv]` (delta: last axis 1) and gives the wrong one.
    """

    __slots__ = ("_case", "_hooks", "_inputs")

    def __init__(self, case: Case, inputs: Inputs, hooks: dict[str, Callable[[Case, Tensor], Tensor]]) -> None:
        super().__init__({"backend": "written out"})
        self._case, self._inputs, self._hooks = case, inputs, hooks

    def _hooked(self, name: str, x: Tensor) -> Tensor:
        return self._hooks[name](self._case, x) if name in self._hooks else x

    def _operands(self) -> list[Tensor]:
        """q, k, v as fp32 `[batch, heads_q, seqlen, head_dim]`."""
        group = self._case.group
        q, k, v = (x.float().transpose(1, 2) for x in (self._inputs.q, self._inputs.k, self._inputs.v))
        return [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]

    def _p(self) -> tuple[Tensor, Tensor]:
        q, k, _ = self._operands()
        hidden = ~self._case.mask.dense(q.device)
        scores = self._hooked("scores", (q @ k.mT * self._case.scale).masked_fill(hidden, -torch.inf))
        empty = hidden.all(-1, keepdim=True)
        p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return self._hooked("p", p), scores.logsumexp(-1)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        p, lse = self._p()
        return (p.to(self._inputs.v.dtype).float() @ self._operands()[2]).transpose(1, 2).to(self._inputs.q.dtype), lse

    def backward(self, do: Tensor) -> Grads:
        case = self._case
        q, k, v = self._operands()
        p, _ = self._p()
        gout = do.float().transpose(1, 2)
        dp = gout @ v.mT
        delta = self._hooked("delta", (p * dp).sum(-1, keepdim=True))
        ds = self._hooked("ds", p * (dp - delta)) * case.scale
        grads = (ds @ k, (ds.mT @ q).unflatten(1, (case.heads_kv, -1)).sum(2), (p.mT @ gout).unflatten(1, (case.heads_kv, -1)).sum(2))
        dq, dk, dv = (x.transpose(1, 2).to(self._inputs.q.dtype) for x in grads)
        return dq, dk, dv


def inside(**hooks: Callable[[Case, Tensor], Tensor]) -> Bind:
    """Faults inside the mathematics, by the hooks of Explicit."""
    return lambda inner, case, inputs: Explicit(case, inputs, hooks)
