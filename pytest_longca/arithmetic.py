"""Arithmetic: the two ways in which the reference multiplies, exactly in fp64 or in halves on the matrix units.

Both take score operands (`native`) and product operands (`parts`): a tensor is the sum of its parts, the product of two tensors is
the sum of the products of their parts. Only matrix products and elementwise steps; no attention kernel.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]

MATRIX_COLUMNS = 8
"""The alignment, in bf16 columns, that the matrix units' fast paths ask for."""

FEW_COLUMNS = 8
"""Products of so few columns take the CPU's fp64 a fifth of the time when they are computed transposed."""

SECTION = 2048
"""How many terms the matrix units sum at once: their sums lose up to 1e-8 of all with each term, where all have one sign (H200)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """P or dS of a tile as operands: in parts, and size, square and fourth power of it as limits need them."""

    value: Tensor
    parts: Parts
    size: Tensor
    square: Tensor
    fourth: Tensor


class Arithmetic(Protocol):
    """How the reference multiplies; `work` is the dtype of everything between two products."""

    work: torch.dtype

    def native(self, x: Tensor) -> Tensor:
        """An input tensor as an operand of `scores`."""

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of native operands `[batch, n, m]`, in `work`."""

    def parts(self, x: Tensor) -> Parts:
        """A tensor as an operand of `product`."""

    def rough(self, x: Tensor) -> Tensor:
        """A tensor in what is good enough for limits (three digits)."""

    def columns(self, *columns: Tensor) -> Tensor:
        """A few columns `[..., n]`, rough and side by side; zeros may follow, for the matrix units want whole blocks of them."""

    def product(self, a: Parts, b: Parts) -> Tensor:
        """The product of two tensors given in parts, in `work`."""

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of two rough tensors, in `work`."""

    def exponentials(self, scores: Tensor, highest: Tensor, scale: float, factor: Tensor | None = None) -> Weights:
        """exp(scale * (scores - highest)) * factor."""

    def weights(self, p: Tensor) -> Weights:
        """P that is known."""

    def gradients(self, p: Tensor, dp: Tensor, delta: Tensor) -> Weights:
        """p * (dp - delta)."""


def exponentials(scores: Tensor, highest: Tensor, scale: float, factor: Tensor | None) -> Tensor:
    """exp(scale * (scores - highest)) * factor, and not exp(scale * scores - lse): large products and lse would be rounded too coarsely."""
    p = torch.exp((scores - highest) * scale)
    return p if factor is None else p * factor


class Exact:
    """Plain fp64 products."""

    work = torch.float64

    def native(self, x: Tensor) -> Tensor:
        return x.double()

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def parts(self, x: Tensor) -> Parts:
        return (x.double(),)

    def rough(self, x: Tensor) -> Tensor:
        return x

    def columns(self, *columns: Tensor) -> Tensor:
        return torch.stack(columns, -1)

    def product(self, a: Parts, b: Parts) -> Tensor:
        return a[0] @ b[0]

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if b.shape[-1] > FEW_COLUMNS else (b.mT @ a.mT).mT

    def exponentials(self, scores: Tensor, highest: Tensor, scale: float, factor: Tensor | None = None) -> Weights:
        return self.weights(exponentials(scores, highest, scale, factor))

    def weights(self, p: Tensor) -> Weights:
        return Weights(p, (p,), p, square := p.square(), square.square())

    def gradients(self, p: Tensor, dp: Tensor, delta: Tensor) -> Weights:
        ds = p * (dp - delta)
        return Weights(ds, (ds,), ds.abs(), square := ds.square(), square.square())


class Split:
    """bf16 and fp16 inputs multiplied as they are with fp32 accumulation; what is computed is split into a high and a low bf16 half.

    Two halves carry 16 bits. An fp16 operand (11 bits) is split too, so that its range does not bound P and dS.
    `compiled` fuses the elementwise steps between two products (they are most of the time), at the price of compiling them.
    """

    work = torch.float32

    def __init__(self, compiled: bool = False) -> None:
        self._exponentials: Callable[..., tuple[Tensor, ...]]
        self._gradients: Callable[..., tuple[Tensor, ...]]
        self._exponentials, self._gradients = _compiled() if compiled else (_split_exponentials, _split_gradients)

    def native(self, x: Tensor) -> Tensor:
        return x

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        return _bmm(a, b)

    def parts(self, x: Tensor) -> Parts:
        return (x,) if x.dtype is torch.bfloat16 else halves(x.float())

    def rough(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    def columns(self, *columns: Tensor) -> Tensor:
        nothing = torch.zeros_like(columns[0])
        return torch.stack((*columns, *(-len(columns) % MATRIX_COLUMNS * (nothing,))), -1).to(torch.bfloat16)

    def product(self, a: Parts, b: Parts) -> Tensor:
        pairs = [(one, other) for one in a for other in b]
        total = _in_sections(*pairs[0])
        for pair in pairs[1:]:
            total += _in_sections(*pair)
        return total

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        return _bmm(a, b)

    def exponentials(self, scores: Tensor, highest: Tensor, scale: float, factor: Tensor | None = None) -> Weights:
        p, high, low, square, fourth = self._exponentials(scores, highest, scale, factor)
        return Weights(p, (high, low), high, square, fourth)

    def weights(self, p: Tensor) -> Weights:
        high, low = halves(p)
        return Weights(p, (high, low), high, square := high.square(), square.square())

    def gradients(self, p: Tensor, dp: Tensor, delta: Tensor) -> Weights:
        ds, high, low, size, square, fourth = self._gradients(p, dp, delta)
        return Weights(ds, (high, low), size, square, fourth)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the sum of two bf16 tensors, to 2^-17."""
    if torch.compiler.is_compiling():
        # Rounded through the integer view: x - x.to(bf16).float() would be folded to zero.
        rounded = ((x.view(torch.int32) + 32768) & -65536).view(torch.float32)
        return rounded.to(torch.bfloat16), (x - rounded).to(torch.bfloat16)
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


def _split_exponentials(scores: Tensor, highest: Tensor, scale: float, factor: Tensor | None) -> tuple[Tensor, ...]:
    p = exponentials(scores, highest, scale, factor)
    high, low = halves(p)
    square = high.square()
    return p, high, low, square, square.square()


def _split_gradients(p: Tensor, dp: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    ds = p * (dp - delta)
    high, low = halves(ds)
    square = high.square()
    return ds, high, low, high.abs(), square, square.square()


@functools.cache
def _compiled() -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]:
    """The two elementwise steps, compiled once for all shapes."""
    return torch.compile(_split_exponentials, dynamic=True), torch.compile(_split_gradients, dynamic=True)


def _in_sections(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of `[batch, n, m]` operands, the sum over m taken in sections, wherever these are views."""
    length = a.shape[2]
    count = length // SECTION
    if count < 2:
        return _bmm(a, b)
    whole = count * SECTION
    cut_a = a[..., :whole].unflatten(2, (count, SECTION)).movedim(2, 1)  # [batch, sections, n, SECTION]
    cut_b = b[:, :whole].unflatten(1, (count, SECTION))
    if a.shape[0] > 1 and any(cut.stride(0) != count * cut.stride(1) for cut in (cut_a, cut_b)):
        return _bmm(a, b)
    total: Tensor = _bmm(cut_a.flatten(0, 1), cut_b.flatten(0, 1)).unflatten(0, (-1, count)).sum(1)
    return total if whole == length else total + _bmm(a[..., whole:], b[:, whole:])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """bf16 or fp16 `[batch, n, m]` products with fp32 accumulation and fp32 result."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
