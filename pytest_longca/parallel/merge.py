"""Merging partial results of attention: outputs by their log-sum-exp, gradients by summation, both in fp32 (fp64 for fp64)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HELD = 2
"""How many partial gradients wait to be added in one go: each takes memory, and spares the sum a way to memory and back."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge_into(target: tuple[Tensor, Tensor], a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    """Write the merge of `a` and `b` to `target`, which may be `a`: pairs of out `[rows, heads, dim]` and lse `[heads, rows]`.

    A row whose lse is -inf in both saw no key: out 0, lse -inf. Dtypes of the outs may differ.
    """
    if target[0].is_cuda and target[1].dtype is torch.float32:
        from pytest_longca.parallel.merge_triton import launch

        launch(target, a, b)
        return
    lse = torch.logaddexp(a[1], b[1])
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weight_a, weight_b = (torch.exp(part[1] - finite).mT[..., None] for part in (a, b))
    target[0].copy_(a[0] * weight_a + b[0] * weight_b)
    target[1].copy_(lse)


@dataclass(slots=True, eq=False)
class OutSum:
    """The merged output of one rank's rows. The first partial is kept as it came; the last merge writes the final dtype."""

    q: Tensor  # [rows, heads, head_dim]: rows, heads, dtype and device of the result
    dim: int
    _sum: tuple[Tensor, Tensor] | None = None
    _pending: tuple[slice, Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a partial output of some rows: out `[n, heads, dim]`, lse `[heads, n]`. Both become this object's to overwrite."""
        self._fold(accumulation_dtype(self.q.dtype))
        self._pending = rows, out, lse

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of all rows; rows that saw no key have out 0 and lse -inf."""
        self._fold(self.q.dtype)
        out, lse = self._sum or self._nothing(self.q.dtype)
        return out.to(self.q.dtype), lse

    def _fold(self, dtype: torch.dtype) -> None:
        if self._pending is None:
            return
        rows, out, lse = self._pending
        self._pending = None
        is_whole = len(out) == len(self.q)
        if self._sum is None and is_whole:
            self._sum = out, lse
            return
        if self._sum is None:
            self._sum = self._nothing(dtype)
            self._sum[0][rows], self._sum[1][:, rows] = out, lse
            return
        before = self._sum
        if before[0].dtype != dtype:
            if is_whole:
                self._sum = torch.empty_like(before[0], dtype=dtype), before[1]
            elif dtype != self.q.dtype:
                self._sum = before = before[0].to(dtype), before[1]
        merge_into(_of(self._sum, rows), _of(before, rows), (out, lse))

    def _nothing(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        num_rows, heads, _ = self.q.shape
        out = self.q.new_zeros(num_rows, heads, self.dim, dtype=dtype)
        return out, out.new_full((heads, num_rows), -torch.inf, dtype=accumulation_dtype(dtype))


def _of(pair: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][:, rows]


@dataclass(slots=True, eq=False)
class GradSum:
    """The summed gradient of one rank's rows. A first partial of all rows is kept as it came; only the last addition rounds."""

    like: Tensor
    _sum: Tensor | None = None
    _held: list[tuple[slice, Tensor]] = field(default_factory=list)

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add a partial gradient `[n, heads, dim]` of some rows; it becomes this object's to overwrite."""
        if len(self._held) == HELD:
            self._fold(accumulation_dtype(self.like.dtype))
        self._held.append((rows, grad))

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum of all rows, zero where nothing was added."""
        self._fold(dtype)
        return self.like.new_zeros(self.like.shape, dtype=dtype) if self._sum is None else self._sum.to(dtype)

    def _fold(self, dtype: torch.dtype) -> None:
        """Add what is held: neighbours of the same rows in one go, the last of them to a sum of this dtype."""
        held, self._held = self._held, []
        if self._sum is None:  # one of all rows first, if there is one: it is kept as it came, and no zeros are written for the others
            held.sort(key=lambda part: len(part[1]) < len(self.like))
        groups = [(rows, [grad for _, grad in parts]) for rows, parts in itertools.groupby(held, key=lambda part: part[0])]
        for place, (rows, grads) in enumerate(groups, 1):
            self._add(rows, grads, dtype if place == len(groups) else accumulation_dtype(self.like.dtype))

    def _add(self, rows: slice, grads: list[Tensor], dtype: torch.dtype) -> None:
        before = [] if self._sum is None else [self._sum]
        if len(grads[0]) == len(self.like) and (self._sum is None or self._sum.dtype is not dtype):
            self._sum = summed([*before, *grads], dtype) if before or len(grads) > 1 else grads[0]
            return
        # Two narrow partials that are also the last ones stay narrow: their exact sum is rounded once.
        total = self.like.new_zeros(self.like.shape, dtype=dtype) if self._sum is None else self._sum
        self._sum = total = total.to(torch.promote_types(total.dtype, dtype))
        sum_into(total[rows], [*(total[rows] for _ in before), *grads])


def summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of at most three tensors `[n, heads, dim]`, in fp32 (fp64 for fp64) and rounded once; a single one of this dtype as it is."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts[0].new_empty(parts[0].shape, dtype=dtype)
    sum_into(total, parts)
    return total


def sum_into(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of `parts` to `target`, which may be one of them."""
    wide = accumulation_dtype(target.dtype)
    if target.is_cuda and wide is torch.float32:
        from pytest_longca.parallel.merge_triton import launch_sum

        launch_sum(target, parts)
        return
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    target.copy_(total)
