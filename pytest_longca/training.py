"""P13 and P11: what breaks only inside a model (partial gradients, checkpointing, compilers, streams, graphs) or in the long run."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import shapes
from pytest_longca.judge import Result
from pytest_longca.kernel import AutogradCall
from pytest_longca.outcome import OutOfMemory
from pytest_longca.subject import Finding, Subject, kernel_errors

COMPILED = "training under torch.compile"
"""The fact that says what compiled it, or why nothing did."""
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]

INDUCTOR_EVERY = 16
"""One case of so many, by its seed, is compiled to code (seconds to half a minute); the others are traced and run by torch (0.3 s)."""
MEMORY_FACTOR = 8
"""How many times the bytes of operands, results and gradients a linear kernel may take: padded copies, fp32 accumulators, plans."""
MEMORY_FLOOR = 64 * 2**20
"""Workspaces that do not depend on the case."""


def training(subject: Subject) -> list[Finding]:
    """P13: the kernel's differentiable function as a model uses it; the truth stays the same. A kernel without one is not asked."""
    with kernel_errors(subject.kernel.name):
        call = subject.kernel.bind(subject.case, subject.inputs)
    if not isinstance(call, AutogradCall):
        subject.facts["training"] = "not asked: the kernel's call is no AutogradCall"
        return []
    findings: list[Finding] = []
    for name, result in _uses(subject, call.function):
        findings += subject.findings("training", result, name)
    return findings


def _uses(subject: Subject, attend: Attend) -> Iterator[tuple[str, Result]]:
    for needed in product((True, False), repeat=3):
        if any(needed) and not all(needed):
            names = ", ".join(f"d{name}" for name, is_needed in zip("qkv", needed, strict=True) if is_needed)
            yield f"with only {names} asked for", _complete(subject, differentiate(subject, attend, needed))
    yield "under checkpointing", differentiate(subject, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False))
    if not subject.kernel.compiles_per_shape and not subject.is_slow:  # what compiles itself, and what the compiler cannot trace
        yield from _compiled(subject, attend)
    if subject.machine.device == "cuda":
        yield "on a side stream", _on_side_stream(subject, attend)
        yield "replayed from a CUDA graph", _in_graph(subject, attend)


def differentiate(subject: Subject, attend: Attend, needed: tuple[bool, ...] = (True, True, True)) -> Result:
    """out, lse and the gradients that are needed; the others are None."""
    inputs = subject.inputs
    leaves = [x.detach().requires_grad_(need) for x, need in zip((inputs.q, inputs.k, inputs.v), needed, strict=True)]
    with kernel_errors(subject.kernel.name):
        out, lse = attend(*leaves)
        found = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], inputs.do))
        if subject.machine.device == "cuda":
            torch.cuda.synchronize()
    grads = [next(found) if need else None for need in needed]
    return _given(subject, out, lse, grads)


def _given(subject: Subject, out: Tensor, lse: Tensor | None, grads: Sequence[Tensor | None]) -> Result:
    """A result of the same kernel, which declares the same about its sums."""
    dq, dk, dv = grads
    return replace(subject.result, out=out.detach(), lse=None if lse is None else lse.detach(), dq=dq, dk=dk, dv=dv)


def _complete(subject: Subject, partial: Result) -> Result:
    """A partial result with the gradients that were not asked for taken from the clean one."""
    clean = subject.result
    missing = {name: getattr(clean, name) for name in ("dq", "dk", "dv") if getattr(partial, name) is None}
    return replace(partial, **missing)


def _compiled(subject: Subject, attend: Attend) -> Iterator[tuple[str, Result]]:
    """Inside a graph whose buffers the compiler owns. What raises there (a missing compiler, too) refuses aloud, which is a fact."""
    backend = "aot_eager" if (subject.case.seed + 1) % INDUCTOR_EVERY else "inductor"

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse = attend(*(x.neg().neg() for x in (q, k, v)))  # exact: the operands, and out, are of the compiler's own code
        return out.neg().neg(), lse

    torch.compiler.reset()  # after some graphs of the same code it would run eagerly without a word
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own modules, about torch
            result = differentiate(subject, lambda *qkv: torch.compile(layer, backend=backend, dynamic=False)(*qkv))
    except DidNotRun as refused:
        if isinstance(refused.outcome, OutOfMemory):
            raise
        subject.facts[COMPILED] = f"refused: {refused.outcome}"
        return
    finally:
        torch.compiler.reset()
    subject.facts[COMPILED] = backend
    yield f"under torch.compile ({backend})", result


def _on_side_stream(subject: Subject, attend: Attend) -> Result:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = differentiate(subject, attend)
    torch.cuda.current_stream().wait_stream(stream)
    return result


def _in_graph(subject: Subject, attend: Attend) -> Result:
    """Captured on zeros, replayed on the case's operands: a kernel that reads its operands on the host gives the zeros' answer."""
    inputs = subject.inputs
    static = [torch.zeros_like(x) for x in (inputs.q, inputs.k, inputs.v)]
    leaves = [x.requires_grad_() for x in static]
    do = inputs.do.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with kernel_errors(subject.kernel.name):
        with torch.cuda.stream(stream):
            for _ in range(2):
                torch.autograd.grad(attend(*leaves)[0], leaves, do)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, do)
        with torch.no_grad():
            for leaf, x in zip(leaves, (inputs.q, inputs.k, inputs.v), strict=True):
                leaf.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
    return _given(subject, out, lse, grads)


def resources(subject: Subject) -> list[Finding]:
    """P11: after five calls no more device memory is held than after two; the peak is linear in the lengths where that is promised."""
    subject.run(subject.case, subject.inputs)
    held = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        subject.run(subject.case, subject.inputs)
        held.append(torch.cuda.memory_allocated())
    findings = []
    if all(later > earlier for earlier, later in pairwise(held)):
        findings.append(Finding("resources", "memory", f"every call keeps memory: {held[-1] - held[0]} bytes more after three calls"))
    peak, bound = torch.cuda.max_memory_allocated() - held[0], linear_bytes(subject)
    if subject.kernel.linear_memory and peak > bound:
        promise = f"{subject.kernel.name} promises memory linear in the length: at most {bound / 2**20:.0f} MiB"
        message = f"a call takes {peak / 2**20:.0f} MiB, and {promise}"
        findings.append(Finding("resources", "memory", message, error_over_limit=peak / bound))
    return findings


def linear_bytes(subject: Subject) -> int:
    """The bound on a linear kernel's peak: a multiple of what operands, results and gradients take in fp32, and a constant."""
    elements = sum(torch.Size(shape).numel() for shape in shapes(subject.case).values())
    return MEMORY_FACTOR * 2 * 4 * elements + MEMORY_FLOOR
