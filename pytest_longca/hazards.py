"""P3, P4, P6, P7, P9, P12: the same question in hostile circumstances (poisoned memory, odd layouts, again, in between others)."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import OPERANDS, Case, Layout, Values, named
from pytest_longca.inputs import TORCH_DTYPES, Inputs, distinct, laid_alike, make_inputs, shapes
from pytest_longca.judge import Result
from pytest_longca.mask import Mask
from pytest_longca.subject import (
    CHANGED,
    TENSORS,
    Finding,
    Subject,
    are_equal,
    as_result,
    finish_backward,
    finish_forward,
    kernel_errors,
)

BAND_BYTES = 4096
"""Size of the poisoned band before and after each operand: more than a tile's row overrun of any head_dim here."""
PADDING_TOKENS = 5
"""Poisoned tokens after the last one of each batch element: odd, so that no tile ends on them."""
PER_DOCUMENT = ("doc_lens", "doc_lens_kv", "prefixes")
"""Fields of masks that have an entry for each document."""
OTHER_SCALE = 0.61
"""The scale of a neighbour: with a scale kept from the case before, it is wrong."""
TINY = 16
"""Tokens below which a case has no longer neighbour."""
RECYCLED_COPIES = 4
"""How often each result's size is left poisoned in the allocator's free lists."""


def poison(subject: Subject) -> list[Finding]:
    """P3: NaN, then huge finite values, after the last token, around the operands and in recycled memory: the truth stays the same."""
    subject.result  # noqa: B018  # first, in clean memory
    findings = []
    poisons = ((float("nan"), "NaN"), (huge(subject.case), "huge values"))
    for value, name in poisons[:1] if subject.is_slow else poisons:
        soil_recycled_memory(subject, value)
        views = (surround(getattr(subject.inputs, operand), value, padded=True)[1] for operand in OPERANDS)
        result = subject.run(subject.case, Inputs(*views))
        findings += subject.findings("poison", result, f"with {name} around the operands and in recycled memory")
        if findings:
            break
    return findings


def huge(case: Case) -> float:
    """A value that shows wherever it counts."""
    return float(torch.finfo(TORCH_DTYPES[case.dtype]).max) / 2


def soil_recycled_memory(subject: Subject, value: float) -> None:
    """Leave blocks of each result's size, full of `value`, to the allocator: an unwritten element then shows it."""
    sizes = shapes(subject.case)
    dtype, device = TORCH_DTYPES[subject.case.dtype], subject.machine.device
    lse = (subject.case.batch, subject.case.heads_q, subject.case.seqlen_q)
    like_operands = [torch.empty(sizes[name], dtype=dtype, device=device) for name in OPERANDS for _ in range(RECYCLED_COPIES)]
    like_lse = [torch.empty(lse, dtype=torch.float32, device=device) for _ in range(RECYCLED_COPIES)]
    for blocks in (like_operands, like_lse):  # filled all at once: a GPU takes longer to start the twenty fills than to do them
        torch._foreach_zero_(blocks)
        torch._foreach_add_(blocks, value)


def surround(operand: Tensor, value: float, padded: bool = False, in_turns_with: float | None = None) -> tuple[Tensor, Tensor]:
    """A larger buffer of a value, or of two in turns, and the part of it that holds a copy of the operand."""
    batch, seqlen, heads, width = operand.shape
    band = BAND_BYTES // operand.element_size()
    tokens = seqlen + (PADDING_TOKENS if padded else 0)
    buffer = torch.full((2 * band + batch * tokens * heads * width,), value, dtype=operand.dtype, device=operand.device)
    if in_turns_with is not None:
        buffer[1::2] = in_turns_with
    view = buffer[band : band + batch * tokens * heads * width].view(batch, tokens, heads, width)[:, :seqlen]
    view.copy_(operand)
    return buffer, view


class Surrounded:
    """An operand's copy that is watched: `view` is the operand inside a larger buffer, `damage` what happened to both."""

    def __init__(self, operand: Tensor, value: float, padded: bool = False, in_turns_with: float | None = None) -> None:
        self.buffer, self.view = surround(operand, value, padded, in_turns_with)
        self.before = self.buffer.clone()

    def damage(self) -> tuple[str, int] | None:
        """Where the kernel wrote, and to how many elements: "of the operand" or "outside the operand"; None if nowhere."""
        if torch.equal(self.buffer, self.before):
            return None
        changed = ~((self.buffer == self.before) | (self.buffer.isnan() & self.before.isnan()))
        if not bool(changed.any()):
            return None
        own = changed.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        number = int(own.sum())
        return ("of the operand", number) if number else ("outside the operand", int(changed.sum()))


def guard(subject: Subject) -> list[Finding]:
    """P4: the operands lie in larger buffers; after the call the buffers, operands included, are as they were.

    So are the settings that the whole process shares, since its first call, and the global random generators.
    """
    subject.result  # noqa: B018  # first: what is drawn once, to compile or to tune, is drawn there
    surrounded = {name: Surrounded(getattr(subject.inputs, name), 1.0) for name in OPERANDS}
    with generators_moved_on(subject):
        subject.run(subject.case, Inputs(**{name: operand.view for name, operand in surrounded.items()}))
    return damages(surrounded) + global_changes(subject)


@contextlib.contextmanager
def generators_moved_on(subject: Subject) -> Iterator[None]:
    """Inside, the global random generators have just been drawn from: one that somebody has just seeded would not show another seeding."""
    with torch.random.fork_rng([torch.cuda.current_device()] if subject.machine.device == "cuda" else []):
        torch.rand((), device=subject.machine.device)
        yield


def damages(surrounded: dict[str, Surrounded]) -> list[Finding]:
    """What the kernel wrote to the operands, by name, and around them."""
    findings: list[Finding] = []
    if are_equal([(operand.buffer, operand.before) for operand in surrounded.values()]):
        return findings
    for name, operand in surrounded.items():
        if (damage := operand.damage()) is not None:
            where, number = damage
            findings.append(
                Finding("guard", name, f"the call wrote to {number} elements {where} {name}: operands and their surroundings are read-only")
            )
    return findings


def global_changes(subject: Subject) -> list[Finding]:
    """What the kernel changed for everything else in the process; it was put back."""
    findings = []
    if changed := CHANGED.get(subject.kernel.name):
        message = f"the kernel leaves {', '.join(changed.values())}: it shares them with all that runs in the process"
        findings.append(Finding("guard", "settings", message))
    # A compiler may try what it made on random numbers, and these operands lie otherwise in memory than those before.
    if (moved := subject.moved_generators) and not subject.kernel.compiles_per_shape:
        message = (
            f"the call seeds the global random generator of {' and '.join(moved)}, or draws from it: "
            "without dropout there is nothing to draw, and what needs numbers takes them from a generator of its own"
        )
        findings.append(Finding("guard", "generator", message))
    return findings


_APART = (Layout.BHSD, Layout.FUSED, Layout.OFFSET, Layout.PADDED)
_SHARING = (Layout.EXPANDED, Layout.SHARED, Layout.SINGLE)


def layout(subject: Subject) -> list[Finding]:
    """P6: q, k, v and do have four different layouts, in four calls each has each (one call of a slow kernel): the truth stays the same."""
    subject.result  # noqa: B018  # first, so that a refusal of the case itself is not taken for one of a layout
    findings = []
    turns = range(len(_APART))
    for turn in [turns[subject.case.seed % len(turns)]] if subject.is_slow else turns:
        layouts = (_APART[turn], _APART[turn - 1], _APART[turn - 2], _APART[turn - 3])
        plain = subject.case.layouts
        # What shares memory shares values: it is kept where it is.
        layouts = tuple(old if old in _SHARING else new for old, new in zip(plain, layouts, strict=True))  # type: ignore[assignment]  # still four
        case = replace(subject.case, layouts=layouts)
        if subject.supports(case):
            result = subject.run(case, make_inputs(case, subject.machine.device))
            shown = ", ".join(f"{name} {form}" for name, form in zip(OPERANDS, layouts, strict=True))
            findings += [replace(found, called=named(case)) for found in subject.findings("layout", result, f"with {shown}")]
    return findings


def repeat(subject: Subject, calls: int = 4) -> list[Finding]:
    """P7: the same call again, right every time and, where the kernel promises it, equal bit by bit.

    Every other time it is not bound again: forward and backward of the call before run once more, as a loop that measures does, and
    between the two a backward with another do.
    """
    findings: list[Finding] = []
    for number in range(2, 3 if subject.is_slow else calls + 2):
        result = subject.run_twice() if number % 2 else subject.run(subject.case, subject.inputs)
        findings += unequal(subject, "repeat", result, number) if subject.kernel.deterministic else []
        findings += subject.findings("repeat", result, f"in call {number}, not in the first")
        if findings:
            break
    return findings


def unequal(subject: Subject, check: str, result: Result, number: int) -> list[Finding]:
    """Findings for each tensor whose bits differ from the first call's."""
    findings = []
    result = subject.where_judged(result)
    for name in TENSORS:
        first, again = getattr(subject.clean, name), getattr(result, name)
        if first is None or again is None:
            continue
        differs = ~((first == again) | (first.isnan() & again.isnan()))
        if bool(differs.any()):
            largest = float((first.double() - again.double())[differs].abs().max())
            message = (
                f"call {number} differs from the first in {int(differs.sum())} of {differs.numel()} elements, by at most {largest:.3g}: "
                f"{subject.kernel.name} promises the same bits every time"
            )
            findings.append(Finding(check, name, message))
    return findings


def stress(subject: Subject) -> list[Finding]:
    """P7, long: twenty calls, each right behind a busy producer on the same device."""
    side = 2048 if subject.machine.device == "cuda" else 128
    noise = torch.randn((side, side), device=subject.machine.device)
    findings: list[Finding] = []
    for number in range(2, 22):
        torch.mm(noise, noise)
        result = subject.run(subject.case, subject.inputs)
        findings += unequal(subject, "stress", result, number) if subject.kernel.deterministic else []
        findings += subject.findings("stress", result, f"in call {number} of 21, behind a busy producer")
        if findings:
            break
    return findings


def scale(subject: Subject) -> list[Finding]:
    """P9: the case with every distribution of values."""
    findings = []
    for values in Values:
        case = replace(subject.case, values=values)
        if values is not subject.case.values and subject.supports(case):
            other = subject.other(case)
            findings += [replace(found, called=named(case)) for found in other.wrong("scale", other.result, f"with {values} values")]
    return findings


def state(subject: Subject) -> list[Finding]:
    """P12: another case between this one's forward and backward, and between two calls: both get what they get alone.

    And other values in the same memory in the call before. A kernel that is wrong alone is not asked: its neighbours would be as wrong.
    """
    if not subject.is_right:  # the first call comes before any other case
        return []
    other = first_neighbour(subject)
    if other is None:
        return []
    again, foreign = run_interleaved(subject, other)
    circumstance = f"with another case ({named(other.case)}) in between"
    findings = subject.findings("state", again, circumstance)
    findings += of_neighbour(other, foreign)
    if not findings:
        findings += subject.findings("state", subject.run(subject.case, subject.inputs), f"after another case ({named(other.case)})")
    if not findings and not subject.is_slow:
        findings += subject.findings("state", refilled(subject), "with new values in memory that held others in the call before")
    return findings


def of_neighbour(other: Subject, foreign: Result) -> list[Finding]:
    """What is wrong with another case that ran right after this one, and whether it is wrong by itself: then nothing may have been kept."""
    found = other.wrong("state", foreign)
    if not found:
        return []
    alone = "which is right when it runs alone" if other.is_right else "which is wrong when it runs once more alone, too"
    circumstance = f"in another case ({named(other.case)}) right after this one, {alone}"
    # Its rows are no rows of this case, whose picture is drawn.
    about: dict[str, Any] = {"place": None, "neighbour": None if other.is_right else named(other.case)}
    return [replace(finding, message=f"{circumstance}: {finding.message}", **about) for finding in found]


def refilled(subject: Subject) -> Result:
    """The case in memory in which the call before found other values: what is kept by address, or an output that is, is stale.

    The memory is laid out as the operands are: with other strides this would be another question, which P6 asks.
    """
    held = Inputs(*(laid_alike(getattr(subject.inputs, name)) for name in OPERANDS))
    run_on_other_values(subject, held)
    return subject.run(subject.case, held)


def run_on_other_values(subject: Subject, held: Inputs) -> None:
    """A call in memory that holds other values than the subject's operands, which it holds afterwards."""
    pairs = []
    for name in OPERANDS:
        own = distinct(getattr(held, name))
        pairs.append((getattr(held, name)[own], getattr(subject.inputs, name)[own]))
    for memory, values in pairs:
        torch.mul(values, -0.5, out=memory)
    subject.run(subject.case, held)
    for memory, values in pairs:
        memory.copy_(values)


def first_neighbour(subject: Subject) -> Subject | None:
    """The kernel on the first of the case's neighbours that it can do."""
    return next((subject.other(case) for case in neighbours(subject.case) if subject.supports(case)), None)


def neighbours(case: Case) -> Iterator[Case]:
    """Cases that a cache could take for this one: other values, another scale, another mask of the same kind, of the same or other lengths.

    Of documents, every second time the same ones in reverse order: as many, as long, and elsewhere.
    A tiny case has no longer neighbour: a kernel that is wrong by itself would be found there, and be blamed for its state.
    """
    rng = Random(case.seed)
    masks: list[Mask | None] = [reversed_lengths(case.mask)] if case.seed % 4 < 2 else []
    own = (case.seqlen_q, case.seqlen_kv)
    for step in (0, 7, -3) if case.seed % 2 else (7, -3, 0):
        lengths = (max(1, own[0] + step), max(1, own[1] + step))
        if min(own) >= TINY or (lengths[0] <= own[0] and lengths[1] <= own[1]):
            masks.append(_resampled(case.mask, rng, *lengths))
    masks.append(case.mask)
    scale = OTHER_SCALE if case.scale != OTHER_SCALE else 2 * OTHER_SCALE
    for mask in masks:
        if mask is not None and mask.heads in (1, case.heads_q) and mask.batch in (1, case.batch):
            other = replace(case, mask=mask, seed=case.seed + 1)
            yield from (replace(other, scale=scale), other)


def reversed_lengths(mask: Mask) -> Mask | None:
    """The mask with its documents in reverse order, or None if it has none or this changes nothing."""
    lengths = {name: value[::-1] for name in PER_DOCUMENT if isinstance(value := getattr(mask, name, None), tuple)}
    changed: Any = mask
    other: Mask | None = replace(changed, **lengths) if lengths else None
    return None if other == mask else other


def _resampled(mask: Mask, rng: Random, seqlen_q: int, seqlen_kv: int) -> Mask | None:
    """Another mask of the same kind, or None where the kind draws no parameters."""
    try:
        return type(mask).sample(rng, seqlen_q, seqlen_kv if mask.unequal_lengths else None)
    except NotImplementedError:
        return None


def run_interleaved(one: Subject, two: Subject) -> tuple[Result, Result]:
    """Bind both, then both forwards, then both backwards: what a model does that holds two layers."""
    with kernel_errors(one.kernel.name):
        calls = [(subject, one.kernel.bind(subject.case, subject.inputs)) for subject in (one, two)]
        fronts = [finish_forward(subject.case, call, subject.inputs.q) for subject, call in calls]
        results = []
        for (subject, call), (out, lse) in zip(calls, fronts, strict=True):
            results.append(as_result(call, out, lse, *finish_backward(subject.case, call, subject.inputs.do)))
    return results[0], results[1]
