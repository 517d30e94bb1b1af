"""Limits: what rounding may honestly cost a kernel in each row of a tensor. docs/limits.md derives every term.

An honest kernel keeps scores, softmax and sums in fp32 and rounds P, dS and its results to the case's dtype. Each row of a result is a
sum of terms; `u` is a quarter of the dtype's spacing at 1 (2^-9 for bf16), so that one rounding costs a term at most 2 u, 0.83 u rms.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.case import Case

ROW = 4.0
"""Allowed row error in units of u: two worst roundings of everything in `scale`, or 4.8 standard deviations of `spread`."""
GAIN = 6.0
"""Allowed error along the row in units of its standard deviation (taken as u for each rounding, 1.2 times its rms)."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A dtype's rounding: `unit` u, `ratio` fp32's share of it, `smallest` half of the dtype's smallest step, `largest` finite number.

    `flush` is where P and dS fall below what the dtype holds (None where they cannot: the exponent range of fp32).
    """

    unit: float
    ratio: float
    smallest: float
    largest: float
    flush: float | None = None


ROUNDINGS = {
    "bf16": Rounding(2.0**-9, 2.0**-15, 2.0**-126, 3.389e38),
    "fp16": Rounding(2.0**-12, 2.0**-12, 2.0**-25, 65504.0, 2.0**-25),
    "fp32": Rounding(2.0**-24, 1.0, 2.0**-126, 3.402e38),
    "fp64": Rounding(2.0**-53, 1.0, 2.0**-1022, 1.797e308),
}
SCORE_UNIT = {"bf16": 2.0**-24, "fp16": 2.0**-24, "fp32": 2.0**-24, "fp64": 2.0**-53}
"""Rounding unit of scores, softmax and lse."""


def rounding_of(case: Case) -> Rounding:
    """The rounding of a case's dtype."""
    return ROUNDINGS[case.dtype]


@dataclass(frozen=True, slots=True)
class Bound:
    """What the rows of a tensor may lose, in units of u, each `[batch, seqlen, heads]`.

    `scale` is the norm of the sum of absolute terms (for lse, `[batch, heads, seqlen]`, the size of what was rounded), `spread` the
    root of the sum of squares of everything that is rounded, `along` the part of it that lies along the row itself, `flush` an
    absolute addition (not in units of u) for what underflows.
    """

    scale: Tensor
    spread: Tensor
    along: Tensor
    flush: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.scale, self.spread, self.along, self.flush)


@dataclass(frozen=True, slots=True)
class Terms:
    """The sums over a row's terms that a bound is made of, `[..., rows]` (`absolute`, `flushed`: `[..., rows, head_dim]`, entry by entry).

    `squares` is of independent terms; `coherent` is the norm of an error that all terms share; `growth` is how much
    fp32 arithmetic adds to a rounding (1 if nothing); `evenness` in 0 to 1 says that P's roundings do not average out.
    """

    absolute: Tensor
    squares: Tensor
    growth: Tensor
    coherent: Tensor | None = None
    flushed: Tensor | None = None
    evenness: Tensor | None = None


def bound_of(value: Tensor, terms: Terms, rounding: Rounding, num_terms: int) -> Bound:
    """The bound of rows `value` `[..., rows, head_dim]`; its fields are `[..., rows]`."""
    dim = value.shape[-1]
    size2 = value.square().sum(-1)
    absolute = torch.linalg.vector_norm(terms.absolute, dim=-1)
    coherent2 = torch.zeros_like(size2) if terms.coherent is None else terms.coherent.square()
    rounded2 = terms.growth.square() * size2
    scale = absolute + coherent2.sqrt()
    spread = (terms.squares + coherent2 + rounded2).sqrt()
    # Of n terms in dim directions, 1/dim + 1/n of the squares lies along their sum. n is what absolute sum and squares say.
    aligned = 1 / dim + (terms.squares / absolute.square().clamp_min(1e-300 if value.dtype is torch.float64 else 1e-37)).clamp(max=1)
    along2 = terms.squares * aligned + coherent2 + 3 * rounded2 / dim
    if terms.evenness is not None:
        along2 += (terms.evenness / 2).square() * size2
    floor = dim**0.5 * rounding.smallest * (1 if rounding.flush else num_terms)
    flush = torch.full_like(size2, floor) if terms.flushed is None else torch.linalg.vector_norm(terms.flushed, dim=-1) + floor
    return Bound(scale, spread, along2.sqrt(), flush)


def row_limit(bound: Bound, unit: float) -> Tensor:
    """How large a row's error may be in norm."""
    return ROW * unit * torch.minimum(bound.scale, bound.spread) + bound.flush


def along_limit(bound: Bound, unit: float) -> Tensor:
    """How large the part of a row's error along the row itself may be: its gain, times its norm."""
    return GAIN * unit * bound.along + bound.flush
