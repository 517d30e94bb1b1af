"""Signatures: what an error looks like, and the fault that usually looks like that."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.case import Case

CLOSE = 0.01
"""How close two ratios are taken for the same."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A wrong tensor: `value` and `truth` `[batch, rows, heads, columns]`, `bad` `[batch, rows, heads]`."""

    case: Case
    name: str
    value: Tensor
    truth: Tensor
    bad: Tensor

    @property
    def is_of_keys(self) -> bool:
        """Whether rows are keys and heads key/value heads."""
        return self.name in ("dk", "dv")


def causes(evidence: Evidence) -> list[str]:
    """Every signature that a tensor's error shows."""
    return [text for signature in SIGNATURES if (text := signature(evidence))]


def causes_across(name: str, ok: dict[str, bool]) -> list[str]:
    """What the tensors together say, `ok` by tensor; said once, with the first tensor that it is about."""
    return [text for subject, wrong, right, text in ACROSS if subject == name and _are(ok, wrong, False) and _are(ok, right, True)]


def _are(ok: dict[str, bool], names: tuple[str, ...], state: bool) -> bool:
    return all(name in ok and ok[name] is state for name in names)


ACROSS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("dq", ("dq", "dk"), ("out", "dv"), "dv is right and dq, dk are not: the row-sum term D of dS = P (dP - D), or a scale"),
    ("dv", ("dq", "dk", "dv"), ("out", "lse"), "out is right and no gradient is: the backward's P (mask, scale, lse) or its do"),
    ("dv", ("dv", "dk"), ("out", "dq"), "only the key side is wrong: sums over query heads or query tiles"),
    ("dq", ("dq",), ("out", "dk", "dv"), "only dq is wrong: the sum over key tiles, or its accumulator"),
    ("lse", ("lse",), ("out",), "out is right and lse is not: its unit, or the maximum not added back"),
)
"""(the tensor it is said with, the wrong ones, the right ones, what it means)"""


def _not_a_number(evidence: Evidence) -> str | None:
    lost = ~evidence.value.isfinite() & evidence.truth.isfinite()
    if not bool(lost.any()):
        return None
    return f"{int(lost.any(-1).sum())} rows are not finite"


def _empty_rows(evidence: Evidence) -> str | None:
    """Lse in rows that see nothing."""
    if evidence.name != "lse":
        return None
    empty = evidence.truth[..., 0] == -math.inf
    if not bool((empty & evidence.bad).any()) or bool((evidence.bad & ~empty).any()):
        return None
    given = evidence.value[..., 0][empty & evidence.bad][0]
    return f"this backend gives {float(given)} in rows that see no key, where lse is -inf"


def _ratio(evidence: Evidence) -> str | None:
    """One factor that explains most of the heads that are wrong."""
    heads = evidence.bad.any(1).any(0)
    heads = heads if bool(heads.any()) else ~heads  # only the sum over rows is wrong: it is about all of them
    value, truth = evidence.value[:, :, heads], evidence.truth[:, :, heads]
    finite = value.isfinite() & truth.isfinite()
    x, truth = (torch.where(finite, item, 0.0) for item in (value, truth))
    power, size = float(truth.square().sum()), float(x.square().sum())
    if size == 0.0 and power > 0.0:
        return "it is all zeros: never written, or not computed"
    if power == 0.0:
        return None
    ratio = float((x * truth).sum()) / power
    unexplained = max(size - ratio * ratio * power, 0.0)
    if unexplained > CLOSE * size or abs(ratio - 1) < CLOSE:
        return None
    names = [name for name, factor in _factors(evidence.case).items() if abs(ratio / factor - 1) < CLOSE]
    meaning = f", which is {' or '.join(names)}: a unit, or a factor taken twice or not at all" if names else ""
    whole = "it" if bool(heads.all()) else "what is wrong there"
    return f"all of {whole} is {ratio:.4g} times what it should be{meaning}"


def _factors(case: Case) -> dict[str, float]:
    """Ratios that have a name."""
    factors = {"ln 2": math.log(2), "1 / ln 2": 1 / math.log(2), "the scale": case.scale, "1 / scale": 1 / case.scale}
    if case.group > 1:
        factors |= {"the group": float(case.group), "1 / group": 1 / case.group}
    return factors | {"2": 2.0, "1/2": 0.5, "-1": -1.0}


def _missing_part(evidence: Evidence) -> str | None:
    """A sum of independent parts without some of them is at a right angle to what is missing."""
    x, truth = evidence.value[evidence.bad], evidence.truth[evidence.bad]
    missing = truth - x
    size, rest = float(x.square().sum()), float(missing.square().sum())
    if not math.isfinite(size) or size == 0.0 or rest < 0.05 * size or evidence.name == "lse" or evidence.bad.float().mean() < 0.5:
        return None
    if abs(float((x * missing).sum())) > 0.1 * math.sqrt(size * rest):
        return None
    over_group = evidence.is_of_keys and evidence.case.group > 1
    return f"what is there fits, and a part of the sum is missing{': it is not summed over the query group' if over_group else ''}"


def _head_map(evidence: Evidence) -> str | None:
    heads = evidence.bad.any(1).any(0)
    group = evidence.case.group
    numbers = heads.nonzero()[:, 0]
    if not evidence.is_of_keys and group > 1 and bool((numbers % group != 0).all()):
        return f"only heads {_listed(numbers)}, never the first of a group of {group}: the head map"
    if 0 < len(numbers) < heads.numel():
        return f"only {_named_heads(numbers)} of {heads.numel()}"
    return None


def _named_heads(numbers: Tensor) -> str:
    return f"head{'s' * (len(numbers) > 1)} {_listed(numbers)}"


def _swapped_heads(evidence: Evidence) -> str | None:
    """Heads whose values are another head's."""
    heads = evidence.truth.shape[2]
    if not 1 < heads <= 64 or evidence.name == "lse":
        return None
    x, truth = (item.transpose(0, 2).flatten(1).float() for item in (evidence.value, evidence.truth))
    likeness = torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(truth, dim=1).T
    best = likeness.argmax(1)
    moved = (best != torch.arange(heads, device=best.device)) & (likeness.amax(1) > 0.99)
    if not bool(moved.any()):
        return None
    head = int(moved.nonzero()[0])
    return f"head {head} holds what belongs to head {int(best[head])} ({int(moved.sum())} heads are exchanged)"


def _batches(evidence: Evidence) -> str | None:
    batches = evidence.bad.any(2).any(1)
    if batches.numel() > 1 and not bool(batches[0]) and bool(batches[1:].any()):
        return f"only batch {_listed(batches.nonzero()[:, 0])}, never the first: a batch stride or offset"
    return None


def _tail(evidence: Evidence) -> str | None:
    """Only rows past the last whole tile."""
    bad = evidence.bad.any(2).any(0).nonzero()[:, 0]
    length = evidence.bad.shape[1]
    for tile in (128, 64, 32, 16):
        tail = length - length % tile
        if tail < length and tail > 0 and len(bad) and int(bad[0]) >= tail:
            return f"only rows past {tail}, the last whole tile of {tile}: the tail"
    return None


def _one_tile(evidence: Evidence) -> str | None:
    bad = evidence.bad.any(2).any(0).nonzero()[:, 0]
    for tile in (16, 64, 128):
        if len(bad) > 1 and evidence.bad.shape[1] > 2 * tile and int(bad[0]) // tile == int(bad[-1]) // tile:
            return f"all in {tile}-row tile {int(bad[0]) // tile}"
    return None


def _alignment(evidence: Evidence) -> str | None:
    case = evidence.case
    if case.seqlen_q == case.seqlen_kv or "causal" not in case.mask.name or evidence.bad.float().mean() < 0.2:
        return None
    return f"seqlen_q {case.seqlen_q} differs from seqlen_kv {case.seqlen_kv}: the diagonal may be aligned top-left and not bottom-right"


SIGNATURES: tuple[Callable[[Evidence], str | None], ...] = (
    _not_a_number,
    _empty_rows,
    _head_map,
    _ratio,
    _missing_part,
    _swapped_heads,
    _batches,
    _tail,
    _one_tile,
    _alignment,
)


def _listed(numbers: Tensor) -> str:
    shown = ", ".join(map(str, numbers[:8].tolist()))
    return shown + (", ..." if len(numbers) > 8 else "")
