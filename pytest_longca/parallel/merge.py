"""Merging partial results of attention: outputs by their log-sum-exp, gradients by summation, both in fp32 (fp64 for fp64)."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """The summed gradient of one rank's rows. The first partial is kept as it came; only the last addition rounds to the final dtype."""

    like: Tensor
    _sum: Tensor | None = None
    _pending: tuple[slice, Tensor] | None = None

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add a partial gradient `[n, heads, dim]` of some rows; it becomes this object's to overwrite."""
        self._fold(accumulation_dtype(self.like.dtype))
        self._pending = rows, grad

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum of all rows, zero where nothing was added."""
        self._fold(dtype)
        return self.like.new_zeros(self.like.shape, dtype=dtype) if self._sum is None else self._sum.to(dtype)

    def _fold(self, dtype: torch.dtype) -> None:
        if self._pending is None:
            return
        rows, grad = self._pending
        self._pending = None
        is_whole, wide = len(grad) == len(self.like), accumulation_dtype(self.like.dtype)
        if self._sum is None and is_whole:
            self._sum = grad
        elif self._sum is None:
            self._sum = self.like.new_zeros(self.like.shape, dtype=dtype)
            self._sum[rows] = grad
        elif is_whole and self._sum.dtype is wide and dtype is not wide:
            self._sum = torch.add(self._sum, grad, out=torch.empty_like(self._sum, dtype=dtype))
        else:
            # Two narrow partials that are also the last ones: an addition in place rounds their exact sum once.
            self._sum = self._sum.to(torch.promote_types(self._sum.dtype, dtype))
            self._sum[rows] += grad
