"""Metamorphic relations: two questions whose answers determine each other. The other question's answer is carried back and judged."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Direction, Layout
from pytest_longca.hazards import reversed_lengths
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result
from pytest_longca.mask import Mask
from pytest_longca.subject import TENSORS, Finding, Subject

PLAIN = (Layout.CONTIGUOUS,) * 4
MOST_PAIRS = 2**24
"""Of (query, key) pairs for which the dense mask is compared."""


def metamorphic(subject: Subject) -> list[Finding]:
    """All relations that the case allows. The related question's answer, carried back, must be the truth about this one."""
    subject.result  # noqa: B018  # first, so that what a kernel keeps of it shows in the related questions
    findings: list[Finding] = []
    for name, relation in RELATIONS.items():
        for result in relation(subject):
            findings += subject.findings("metamorphic", result, name)
    return findings


Relation = Callable[[Subject], Iterator[Result]]


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v, inputs.do


def reversed_batch(subject: Subject) -> Iterator[Result]:
    """The batch in reverse order gives the results in reverse order."""
    case = replace(subject.case, layouts=PLAIN)
    if case.batch == 1 or case.mask.batch > 1 or not subject.supports(case):
        return
    result = subject.run(case, Inputs(*(x.flip(0).contiguous() for x in _tensors(subject.inputs))))
    yield _map(result, lambda name, x: x.flip(0))


def permuted_heads(subject: Subject) -> Iterator[Result]:
    """The key/value heads, each with its group of query heads, in reverse order give the results in that order."""
    case = replace(subject.case, layouts=PLAIN)
    if case.heads_kv == 1 or case.mask.heads > 1 or not subject.supports(case):
        return

    def flip(x: Tensor, axis: int) -> Tensor:
        flipped: Tensor = x.unflatten(axis, (case.heads_kv, -1)).flip(axis).flatten(axis, axis + 1)
        return flipped

    result = subject.run(case, Inputs(*(flip(x, 2).contiguous() for x in _tensors(subject.inputs))))
    yield _map(result, lambda name, x: flip(x, 1 if name == "lse" else 2))


def one_batch_element_alone(subject: Subject) -> Iterator[Result]:
    """The last batch element alone gives what it gives in company."""
    case = replace(subject.case, batch=1, layouts=PLAIN)
    if subject.case.batch == 1 or case.mask.batch > 1 or not subject.supports(case):
        return
    alone = subject.run(case, Inputs(*(x[-1:].contiguous() for x in _tensors(subject.inputs))))
    yield _patch(subject.result, alone, lambda name, x: x[-1:])


def documents_alone(subject: Subject) -> Iterator[Result]:
    """Packed documents give what each gives alone (regular masks of several documents)."""
    regular = subject.case.mask.varlen()
    if regular is None or not regular.is_packed:
        return
    start_q = start_kv = 0
    for len_q, len_kv in zip(regular.lens_q, regular.lens_kv, strict=True):
        rows, keys = slice(start_q, start_q + len_q), slice(start_kv, start_kv + len_kv)
        start_q, start_kv = rows.stop, keys.stop
        case = replace(subject.case, mask=_regular_mask(len_q, len_kv, regular.is_causal), layouts=PLAIN)
        if min(len_q, len_kv) == 0 or regular.window is not None or not subject.supports(case):
            continue
        q, k, v, do = _tensors(subject.inputs)
        alone = subject.run(case, Inputs(*(x.contiguous() for x in (q[:, rows], k[:, keys], v[:, keys], do[:, rows]))))
        yield _patch(subject.result, alone, _document_view(rows, keys))


def _document_view(rows: slice, keys: slice) -> Callable[[str, Tensor], Tensor]:
    def view(name: str, x: Tensor) -> Tensor:
        return x[:, :, rows] if name == "lse" else x[:, rows if name in ("out", "dq") else keys]

    return view


def _regular_mask(seqlen_q: int, seqlen_kv: int, is_causal: bool) -> Mask:
    from pytest_longca.masks.regular import Causal, Full

    return Causal(seqlen_q, seqlen_kv) if is_causal else Full(seqlen_q, seqlen_kv)


def reversed_documents(subject: Subject) -> Iterator[Result]:
    """The documents in reverse order give the results in that order, where the mask knows no first or last document."""
    case = subject.case
    mask = reversed_lengths(case.mask)
    if mask is None or case.seqlen_q * case.seqlen_kv > MOST_PAIRS:
        return
    rows, keys = (_reversed_tokens(case.mask, side) for side in ("doc_lens", "doc_lens_kv"))
    case = replace(case, mask=mask, layouts=PLAIN)
    if not torch.equal(mask.dense(), subject.case.mask.dense()[:, :, rows][..., keys]) or not subject.supports(case):
        return
    q, k, v, do = _tensors(subject.inputs)
    there = [x[:, order.to(x.device)].contiguous() for x, order in ((q, rows), (k, keys), (v, keys), (do, rows))]
    back = {"lse": (2, rows), "out": (1, rows), "dq": (1, rows), "dk": (1, keys), "dv": (1, keys)}

    def restore(name: str, x: Tensor) -> Tensor:
        axis, order = back[name]
        return x.index_select(axis, order.argsort().to(x.device))

    yield _map(subject.run(case, Inputs(*there)), restore)


def _reversed_tokens(mask: Mask, field: str) -> Tensor:
    """The tokens' numbers with the documents in reverse order and each in its own, int64 `[seqlen]`."""
    lengths: tuple[int, ...] = getattr(mask, field, None) or getattr(mask, "doc_lens")  # noqa: B009  # fields of these mask kinds alone
    parts = torch.arange(sum(lengths)).split(lengths)
    return torch.cat(parts[::-1])


def wide_window(subject: Subject) -> Iterator[Result]:
    """A window as wide as both sequences is no window."""
    from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full, FullSlidingWindow

    with_window: dict[type[Mask], type[FullSlidingWindow | CausalSlidingWindow]] = {Full: FullSlidingWindow, Causal: CausalSlidingWindow}
    windowed = with_window.get(type(subject.case.mask))
    if windowed is None:
        return
    lengths = subject.case.seqlen_q, subject.case.seqlen_kv
    case = replace(subject.case, mask=windowed(*lengths, window=sum(lengths)))
    if subject.supports(case):
        yield subject.run(case, subject.inputs)


def doubled_do(subject: Subject) -> Iterator[Result]:
    """Gradients are linear in do: twice the do gives exactly twice the gradients (a power of two rounds nothing)."""
    if not subject.case.direction.needs_backward or subject.case.dtype == "fp16":  # fp16 gradients underflow
        return
    q, k, v, do = _tensors(subject.inputs)
    result = subject.run(subject.case, Inputs(q, k, v, do * 2))
    yield _map(result, lambda name, x: x / 2 if name in ("dq", "dk", "dv") else x)


def halves_merged(subject: Subject) -> Iterator[Result]:
    """Attention over each half of the keys, merged by lse, is attention over all of them (the full mask).

    Half precision is left out: there each half's out is rounded once more than the whole's.
    """
    from pytest_longca.masks.regular import Full

    case = subject.case
    if not isinstance(case.mask, Full) or case.seqlen_kv < 2 or case.dtype not in ("fp32", "fp64"):
        return
    half = case.seqlen_kv // 2
    outs, lses = [], []
    for keys in (slice(0, half), slice(half, None)):
        q, k, v, do = _tensors(subject.inputs)
        k, v = k[:, keys].contiguous(), v[:, keys].contiguous()
        part = replace(case, mask=Full(case.seqlen_q, k.shape[1]), layouts=PLAIN, direction=Direction.FWD)
        if not subject.supports(part):
            return
        result = subject.run(part, Inputs(q, k, v, do))
        if result.out is None or result.lse is None:
            return
        outs.append(result.out)
        lses.append(result.lse)
    yield replace(subject.result, out=_merge(outs, lses), lse=torch.logaddexp(*lses))


def _merge(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """The outs weighted by what their keys weigh together."""
    weights = torch.stack(lses).double().softmax(0).transpose(2, 3)[..., None]  # [parts, batch, seqlen_q, heads_q, 1]
    return (weights * torch.stack(outs)).sum(0).to(outs[0].dtype)


RELATIONS: dict[str, Relation] = {
    "with the batch reversed": reversed_batch,
    "with the heads reversed": permuted_heads,
    "with one batch element alone": one_batch_element_alone,
    "with each document alone": documents_alone,
    "with the documents reversed": reversed_documents,
    "with a window as wide as both sequences": wide_window,
    "with do doubled": doubled_do,
    "merged from two halves of the keys": halves_merged,
}


def _map(result: Result, change: Callable[[str, Tensor], Tensor]) -> Result:
    """A result with each present tensor changed."""
    changed: dict[str, Any] = {name: change(name, x) for name in TENSORS if (x := getattr(result, name)) is not None}
    return replace(result, **changed)


def _patch(whole: Result, part: Result, view: Callable[[str, Tensor], Tensor]) -> Result:
    """The whole result with `view` of it replaced by the part."""

    def put(name: str, x: Tensor) -> Tensor:
        x = x.clone()
        view(name, x).copy_(getattr(part, name))
        return x

    return _map(whole, put)
