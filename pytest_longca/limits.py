"""Limits: what rounding may honestly cost a kernel in each row of a tensor. docs/limits.md derives every term.

An honest kernel keeps scores, softmax and sums in fp32 and rounds P, dS and its results to the case's dtype. Each row of a result is a
sum of terms; `u` is a quarter of the dtype's spacing at 1 (2^-9 for bf16), so that one rounding costs a term at most 2 u, 0.83 u rms.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from pytest_longca.case import Case

SCALE = 4.0
"""Allowed row error in units of u times the sum of absolute terms, for two roundings of everything in it at their worst."""
FALSE_ALARMS = 1e-4
"""How often an honest tensor's largest row would be beyond its limit, were a rounding's standard deviation 1.1 RMS u (it is RMS u)."""
DS_ROUNDINGS = 2
"""How often each term of dq and dk is rounded: kernels may form dS from the P that they rounded for dv, and then round dS."""
TILE = 1.3
"""Allowed root mean square of error / (u * spread) over a tile of rows: rounding gives 0.83, and 1.155 where every mantissa is near 1."""
TILE_ROWS = 128
CPU_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
"""(from so many queries, block of queries): after each block torch's CPU attention rounds dk and dv to their dtype."""
CPU_KEY_BLOCK = 512
"""The block of keys after which it rounds dq."""
MATRIX_TERMS = 16
"""Products of half precision that a matrix unit adds at a time; it cuts each sum off to fp32 instead of rounding it."""
RMS = 0.83
"""Root mean square of one rounding, in units of u."""
UNDERFLOW = {"bf16": 2.0**-126, "fp16": 2.0**-126, "fp32": 2.0**-126, "fp64": 2.0**-1022}
"""P and dS below it are lost: kernels flush what their arithmetic (fp32, or fp64) holds with fewer digits."""


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


def deviations(num_rows: int) -> float:
    """What the largest of so many honest errors stays below, in units of u times their spread: the quantile of a normal distribution.

    >>> round(deviations(1000), 2), round(deviations(10**6), 2)
    (4.86, 5.9)
    """
    return -1.1 * RMS * NormalDist().inv_cdf(FALSE_ALARMS / (2 * max(num_rows, 1)))


def isotropic(dim: int, deviations: float) -> float:
    """Allowed row error in units of u times the spread over all of `dim` directions: twice the rms, and the deviations of the norm."""
    return 2 * (1 + deviations / math.sqrt(2 * dim))


def of_chance(deviations: float) -> float:
    """What the squared modulus of a sum of random phases stays below, as a multiple of its mean: that of independent errors, k of them.

    Its distribution is exponential, and half of a normal quantile's square is the logarithm of how rare it is.
    """
    return (deviations / (1.1 * RMS)) ** 2 / 2


def fp32_steps(num_terms: float) -> float:
    """What a sum of products in fp32 loses, as a multiple of one rounding of its absolute sum.

    One worst rounding of an operand (a scale that is folded into it) and one of the result; and each of the additions rounds a partial
    sum that grows to the whole: rms RMS * (n / 3) ** 0.5 / 2 where all terms have one sign, less where they cancel.
    """
    return 2.0 + 0.3 * math.sqrt(num_terms)


def truncation(num_terms: int, rounding: Rounding) -> float:
    """The share of a sum that matrix units of half precision lose towards 0, in all rows alike.

    Each step of MATRIX_TERMS products cuts off 2^-24 of what has been added up so far on average, and at most twice that; what has been
    added up is half of the whole where it grows evenly.
    """
    return num_terms / MATRIX_TERMS * 2.0**-24 if rounding.unit > 2.0**-20 else 0.0


def blocks_in_dtype(case: Case, tensor: str) -> int:
    """In how many blocks torch's CPU attention adds up a gradient in the gradient's own dtype."""
    if tensor == "dq":
        return -(-case.seqlen_kv // CPU_KEY_BLOCK)
    if tensor not in ("dk", "dv"):
        return 1
    block = next(block for shortest, block in CPU_QUERY_BLOCKS if case.seqlen_q >= shortest)
    return case.group * -(-case.seqlen_q // block)


@dataclass(frozen=True, slots=True)
class Bound:
    """What the rows of a tensor may lose, each `[batch, seqlen, heads]` (of lse `[batch, heads, seqlen]`).

    In units of u: `scale` is the norm of the sum of absolute terms (for lse, the size of what was rounded), `spread` the root of
    the sum of squares of everything that is rounded, `tile` the same with what the rows of a tile may have in common, `allowed` what the
    spread allows as an error's norm, `along` the part of the spread that lies along the row itself, `squares` the part that is of the
    terms, `joint` the part of `along` that is one error in all rows of a head. Absolute: `flush` is what underflow may cost, `shared` what
    all rows may lose along themselves at once.
    """

    scale: Tensor
    spread: Tensor
    tile: Tensor
    allowed: Tensor
    along: Tensor
    squares: Tensor
    flush: Tensor
    shared: Tensor
    joint: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.scale, self.spread, self.tile, self.allowed, self.along, self.squares, self.flush, self.shared, self.joint)

    def laid_out(self, layout: Callable[[Tensor], Tensor], at_once: bool) -> "Bound":
        """The bound in another layout of rows; all fields `at_once` in few operations, at the price of a copy."""
        if not at_once:
            return Bound(*map(layout, self.tensors()))
        return Bound(*layout(torch.stack(tuple(self.tensors()), -1)).unbind(-1))

    def with_sums_in_dtype(self, blocks: int, dim: int, deviations: float, lost: float, size: Tensor) -> "Bound":
        """The bound of a kernel that rounds its sums to the dtype after each of `blocks` blocks.

        After t of T blocks the sum has t / T of the squares: (T - 1) / 2 of them are rounded on the way; where terms add up to a larger
        `size` (a row's norm), they have those of that. `lost` is the norm of a row of the smallest steps' halves: what each rounding costs
        at most where sums are that small, and independent ones together.
        """
        steps = lost * math.sqrt(max(blocks - 1, 0))
        times = max(blocks - 1, 0) / 2
        more2 = times * torch.maximum(self.squares, size.square())
        return Bound(
            scale=self.scale * (1 + times / 2),
            spread=(self.spread.square() + more2).sqrt(),
            tile=(self.tile.square() + more2).sqrt(),
            allowed=(self.allowed.square() + isotropic(dim, deviations) ** 2 * more2).sqrt(),
            along=(self.along.square() + more2 * min(3 / dim, 1)).sqrt(),
            squares=self.squares,
            flush=self.flush + steps,
            shared=self.shared * (1 + times) + steps,  # what is rounded to the same side once is so each time
            joint=self.joint,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """The sums over a row's terms that a bound is made of, `[..., rows]` (`absolute`, `flushed`: `[..., rows, head_dim]`, entry by entry).

    `squares` is of the independent errors, in units of u; `concentrated` is what of it lies along the row because single terms are a
    large part of it; `mean` `[..., 1, head_dim]` is the direction that the terms share, as a part of their rms norm; `roundings` is how
    often each term is rounded. `coherent` is the norm of an error that all terms share; `growth` is how much fp32 arithmetic adds to a
    rounding (1 if nothing); `common` are those of `squares` that belong to errors which other rows share, and `common_fourths` the sum
    of their squares; `evenness` in 0 to 1 says that P's roundings do not average out; `lost` is what underflow in fp32 costs at most;
    `parts` are the squares of what is rounded before the last sum, `num_parts` of them, each query head's share of a group, which may all
    be alike; `columns` of a row are copies of each other, and round alike. `alike`, 0 to 1, is how far roundings of terms are the same in
    all rows.
    """

    absolute: Tensor
    squares: Tensor
    concentrated: Tensor
    growth: Tensor
    mean: Tensor
    lost: Tensor
    evenness: Tensor
    coherent: Tensor | float = 0.0
    flushed: Tensor | None = None
    common: Tensor | None = None
    common_fourths: Tensor | None = None
    parts: Tensor | None = None
    roundings: int = 1
    columns: int = 1
    num_parts: int = 0
    are_parts_alike: bool = False
    alike: Tensor | float = 0.0


def concentrated(products: Tensor, squares: Tensor, errors: Tensor) -> Tensor:
    """The part of the squared errors that lies along a sum of independent terms, on top of 1/dim of all.

    The sum r of terms t_j has |t_j|^2 / |r| along t_j because of t_j itself, and |r|^2 is close to the sum of their `squares`; so of errors
    e_j along t_j, e_j^2 |t_j|^2 / |r|^2 is along r: `products` are the sums of e_j^2 |t_j|^2. All of it where such products underflow.
    """
    smallest = 1e-140 if squares.dtype is torch.float64 else 1e-14
    return torch.where(squares > smallest, products / squares, errors).minimum(errors)


def bound_of(value: Tensor, terms: Terms, rounding: Rounding, num_terms: int, deviations: float) -> Bound:
    """The bound of rows `value` `[..., rows, head_dim]`; its fields are `[..., rows]`."""
    dim, unit = value.shape[-1] // terms.columns, rounding.unit
    squares = value.square()
    fourths = squares.square()
    size2, sum_of_fourths = squares.sum(-1), fourths.sum(-1)
    tiny = 1e-290 if value.dtype is torch.float64 else 1e-37
    size, divisor = size2.sqrt(), size2.clamp_min(tiny)
    absolute = torch.linalg.vector_norm(terms.absolute, dim=-1)
    coherent2 = terms.coherent * terms.coherent
    growth2 = terms.growth.square()
    rounded2, rounded_along2 = growth2 * size2, growth2 * sum_of_fourths * terms.columns / divisor
    sameness = spacing_over_spread(value.abs(), -1, unit, value.shape[-1])[..., 0]
    if terms.parts is not None:  # independent parts are as large as their terms' squares say, parts in one direction as the row
        # Sums of rounded parts lie on a lattice: entries that fall on few of its points round alike, with the inverse of their number.
        of_lattice = size2 * (sameness / (2 * math.sqrt(math.pi))).clamp(max=1.0)
        rounded2, rounded_along2 = 2 * rounded2 + terms.parts, 2 * rounded_along2 + terms.parts / dim + of_lattice
    # Each term, each part and the result rounded at their worst: 2 u each.
    roundings = terms.roundings + 1 + (terms.parts is not None)
    at_worst = absolute * (SCALE / 2 * roundings) + SCALE * terms.coherent
    spread2 = terms.squares + coherent2 + rounded2
    directed2 = (terms.concentrated + terms.squares * terms.mean.square().sum(-1)).minimum(terms.squares) + coherent2
    likely2 = deviations**2 * directed2 + isotropic(dim, deviations) ** 2 * (spread2 - directed2)
    # Of terms in dim directions 1/dim lies along their sum, and what large ones add to it; all where they share that direction.
    shared2 = (value * terms.mean).sum(-1).square() / divisor
    aligned2 = (terms.concentrated + terms.squares * (1 / dim + shared2)).minimum(terms.squares)
    # A row whose entries are all one number, as far as the dtype can tell, is rounded to one side each time.
    one_side = evenness(sameness) * size * (2 + 2 * (terms.parts is not None))
    along = (aligned2 + coherent2 + rounded_along2).sqrt() + one_side / deviations
    # Below the smallest step: half of it for the result, and for each part, whose roundings are independent but in one direction if all
    # columns are one (a uniform error's rms is 0.58 of its largest).
    of_parts: float = terms.num_parts
    if not terms.are_parts_alike:
        of_parts = min(of_parts, 0.29 * isotropic(dim, deviations) * terms.num_parts**0.5)
    floor = value.shape[-1] ** 0.5 * rounding.smallest * (1 + of_parts if rounding.flush else num_terms)
    flush = (terms.lost + floor).expand_as(size2)
    if terms.flushed is not None:
        flush = flush + torch.linalg.vector_norm(terms.flushed, dim=-1)
    # fp32's errors of scores that are alike are alike, and only along what all terms share does an error add up over the rows.
    alike_along = SCALE * unit * (terms.growth - 1) + (2 * unit * terms.evenness + truncation(num_terms, rounding))
    shared = flush + alike_along * size
    if terms.common is not None:
        shared = shared + deviations * unit * (terms.common * shared2).sqrt()
    # Where all rows have one error a tile is as far off as a row may be.
    alike2 = terms.alike * terms.alike
    tile2 = spread2 + (one_side.square() + _fluctuation(terms, deviations) + alike2 * likely2) / TILE**2
    rounded_alike = _rounded_alike(value, fourths, unit) / sum_of_fourths.clamp_min(tiny)
    joint = (alike2 * along.square() + (1 - alike2) * rounded_alike * rounded_along2).sqrt()
    allowed = torch.minimum(at_worst, likely2.sqrt())
    return Bound(absolute + terms.coherent, spread2.sqrt(), tile2.sqrt(), allowed, along, terms.squares, flush, shared, joint)


def _rounded_alike(value: Tensor, fourths: Tensor, unit: float) -> Tensor:
    """What of the fourth powers of rows `[..., rows, head_dim]` is of entries that hardly differ: their roundings are one error."""
    if value.shape[-2] < 2:
        return torch.zeros_like(fourths[..., 0])
    alike = evenness(spacing_over_spread(value, -2, unit, value.shape[-2] - 1))
    return (fourths * alike.square()).sum(-1)


def spacing_over_spread(x: Tensor, axis: int, unit: float, freedom: int) -> Tensor:
    """The dtype's spacing at numbers' mean over their standard deviation, with the mean's sign; `axis` is kept."""
    mean = x.mean(axis, keepdim=True)
    spread = (x - mean).square().sum(axis, keepdim=True).sqrt()
    return mean / spread.clamp_min(1e-30) * (4 * unit * math.sqrt(freedom))


def evenness(sameness: Tensor) -> Tensor:
    """The mean rounding error of numbers, in half spacings, 0 to 1, from the spacing over their spread.

    Rounding errors are periodic; of numbers spread by s normally, the mean of the first harmonic is exp(-2 (pi s / spacing)^2).
    """
    return torch.exp(-2 * math.pi**2 / sameness.square())


def have_one_p(lse: Tensor, others: Tensor, rounding: Rounding) -> Tensor:
    """Whether rows of the same scores have the same P, as far as its rounding can tell: P that differs by u / 2 of its size.

    Errors of numbers a part x of a spacing apart have the correlation 1 - 6 x (1 - x), and u / 2 is an eighth to a quarter of a spacing.
    """
    return (lse - others).abs() <= rounding.unit / 2


def _fluctuation(terms: Terms, deviations: float) -> Tensor | float:
    """How far the sum of squared errors that all rows of a tile share may be above its mean: a weighted chi-square of few degrees.

    Of weights w it stays below sqrt(2) k (sum of w^2)^(1/2) + k^2 max(w) (Laurent and Massart); the largest is about sum of w^2 / sum of w.
    """
    if terms.common is None or terms.common_fourths is None:
        return 0.0
    heaviest = terms.common_fourths / terms.common.clamp_min(1e-300 if terms.common.dtype is torch.float64 else 1e-30)
    return RMS * math.sqrt(2) * deviations * terms.common_fourths.sqrt() + deviations**2 * heaviest


def shared_direction(x: Tensor) -> Tensor:
    """The mean of vectors `[..., n, head_dim]` as a part of their rms norm, `[..., 1, head_dim]`."""
    if not x.shape[-2]:
        return x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    rms = x.square().sum(-1, keepdim=True).mean(-2, keepdim=True).sqrt()
    return x.mean(-2, keepdim=True) / rms.clamp_min(1e-30)


def row_limit(bound: Bound, unit: float) -> Tensor:
    """How large a row's error may be in norm."""
    return unit * bound.allowed + bound.flush
