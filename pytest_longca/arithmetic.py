"""Arithmetic: the two ways in which the reference multiplies, exactly in fp64 or in halves on the matrix units.

Both take score operands (`native`) and product operands (`parts`): a tensor is the sum of its parts, the product of two tensors is
the sum of the products of their parts. Only matrix products and elementwise steps; no attention kernel.
"""

from typing import Protocol

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]


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
        """A non-negative tensor in what is good enough for limits (three digits)."""

    def product(self, a: Parts, b: Parts) -> Tensor:
        """The product of two tensors given in parts, in `work`."""

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of two rough tensors, in `work`."""


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

    def product(self, a: Parts, b: Parts) -> Tensor:
        return a[0] @ b[0]

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Split:
    """bf16 and fp16 inputs multiplied as they are with fp32 accumulation; what is computed is split into a high and a low bf16 half.

    Two halves carry 16 bits. An fp16 operand (11 bits) is split too, so that its range does not bound P and dS.
    """

    work = torch.float32

    def native(self, x: Tensor) -> Tensor:
        return x

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        return _bmm(a, b)

    def parts(self, x: Tensor) -> Parts:
        return (x,) if x.dtype is torch.bfloat16 else halves(x.float())

    def rough(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    def product(self, a: Parts, b: Parts) -> Tensor:
        pairs = [(one, other) for one in a for other in b]
        total = _bmm(*pairs[0])
        for pair in pairs[1:]:
            total += _bmm(*pair)
        return total

    def bound(self, a: Tensor, b: Tensor) -> Tensor:
        return _bmm(a, b)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the sum of two bf16 tensors, to 2^-17.

    The high half is rounded through the integer view: `x - x.to(bf16).float()` is the same, but torch.compile folds it to zero.
    """
    high = ((x.view(torch.int32) + 32768) & -65536).view(torch.float32)
    return high.to(torch.bfloat16), (x - high).to(torch.bfloat16)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """bf16 or fp16 `[batch, n, m]` products with fp32 accumulation and fp32 result."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
