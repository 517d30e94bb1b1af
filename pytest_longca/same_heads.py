"""Same heads: query heads of a group that share q or do, as expanded operands make them, and what their errors in dk and dv have in common.

Heads with one q and one set of visible keys have one P, and one rounding of it: their errors add up. And of a query all heads' terms of
dk lie along the one q, those of dv along the one do: whatever their P, they are one term.
"""

import torch
from torch import Tensor

from pytest_longca.limits import DS_ROUNDINGS, have_one_p
from pytest_longca.operands import Operands

Sums = tuple[Tensor, Tensor, Tensor]
"""Of squared errors e^2, of squared terms t^2, and of e^2 t^2, over the queries of each key."""


class SameHeads:
    """The heads of a row tile's groups. Tensors are `[stacks, group * rows, ...]`."""

    def __init__(self, ops: Operands, lse: Tensor) -> None:
        """`lse` `[stacks, group, rows]` is of the tile's rows."""
        self.ops, self.group = ops, ops.group
        heads = torch.eye(self.group, device=lse.device, dtype=torch.bool)[None, :, :, None]
        if ops.same_q:
            heads = heads | have_one_p(lse[:, :, None], lse[:, None], ops.rounding)
        self.alike = heads.to(lse.dtype).expand(len(lse), -1, -1, lse.shape[-1])  # [stacks, group, group, rows]
        self.num_alike = self.alike.sum(2).flatten(1)[..., None]

    def of_weights(self, p: Tensor, do: Tensor) -> Sums:
        """What P costs dv, `[stacks, keys]`."""
        p = p.to(self.alike.dtype)
        if self.ops.same_do:
            terms = p * torch.linalg.vector_norm(do, dim=-1, keepdim=True)
            return _sums(self._over_group(terms.square() * self.num_alike), self._over_group(terms).square())
        # Heads that have one P are one term, of the sum of their do, of which each has its share.
        terms2 = (p * torch.linalg.vector_norm(self._over_alike(do), dim=-1, keepdim=True)).square()
        return _sums(terms2, terms2, 1 / self.num_alike)

    def of_delta(self, p: Tensor, of_delta: Tensor) -> Sums:
        """What the squared errors `of_delta` in D, times |q|^2, cost dk by P, `[stacks, keys]`."""
        errors2 = p.to(self.alike.dtype).square() * of_delta[..., None]
        if self.ops.same_q:
            errors2 = self._over_group(errors2 * self.num_alike if self.ops.same_do else errors2)
        return _sums(errors2, errors2)

    def of_scores(self, ds: Tensor, q2: Tensor) -> Sums:
        """What dS costs dk along the one q of all heads, of squared norm `q2`: `[stacks, keys]`.

        P's rounding is one where P is, and costs the sum of dS; dS's own roundings are each head's, unless do and so dS is one too.
        """
        terms = ds.to(self.alike.dtype) * q2.sqrt()[..., None]
        of_p = self._over_alike(terms).square() / self.num_alike
        own = of_p if self.ops.same_do else terms.square()
        errors2 = (of_p + (DS_ROUNDINGS - 1) * own) / DS_ROUNDINGS
        return _sums(self._over_group(errors2), self._over_group(terms).square())

    def _over_group(self, x: Tensor) -> Tensor:
        """A query's sum over its heads, `[stacks, rows, ...]`."""
        total: Tensor = x.unflatten(1, (self.group, -1)).sum(1)
        return total

    def _over_alike(self, x: Tensor) -> Tensor:
        """The sum over the heads that have the same P as each."""
        return torch.einsum("sghr,shr...->sgr...", self.alike, x.unflatten(1, (self.group, -1))).flatten(1, 2)


def _sums(errors2: Tensor, terms2: Tensor, shares: Tensor | float = 1.0) -> Sums:
    """Over the rows of `[stacks, rows, keys]`, of terms of which each row has its share."""
    return (errors2 * shares).sum(1), (terms2 * shares).sum(1), (errors2 * terms2 * shares).sum(1)
