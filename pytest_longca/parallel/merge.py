"""Merging partial results of attention: outputs by their log-sum-exp, gradients by summation, both in fp32 (fp64 for fp64)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HELD = 2
"""How many partial results wait to be added in one go: each takes memory, and spares the total a way to memory and back."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge_into(target: tuple[Tensor, Tensor], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the merge of one to three `parts` to `target`, which may be one of them.

    Each is a pair of out `[rows, heads, dim]` and lse `[heads, rows]`. A row whose lse is -inf in all saw no key: out 0, lse -inf.
    Dtypes of the outs may differ.
    """
    if target[0].is_cuda and target[1].dtype is torch.float32:
        from pytest_longca.parallel.merge_triton import launch

        launch(target, parts)
        return
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weighted = [out * torch.exp(part_lse - finite).mT[..., None] for out, part_lse in parts]
    target[0].copy_(sum(weighted[1:], weighted[0]))
    target[1].copy_(lse)


Part = tuple[Tensor, ...]
"""Gradients of some rows, alone, or an output and its lse."""


@dataclass(slots=True, eq=False)
class _Total:
    """What partial results of one rank's rows come to. A first one of all rows is kept as it came; only the last step rounds.

    Each step reads the total and up to two partials, and writes the total.
    """

    like: Tensor  # [rows, heads, head_dim]: rows, heads, dtype and device of the result
    _total: Part | None = None
    _held: list[tuple[slice, Part]] = field(default_factory=list)

    def _hold(self, rows: slice, part: Part) -> None:
        if len(self._held) == HELD:
            self._take_first(accumulation_dtype(self.like.dtype))
        self._held.append((rows, part))

    def _finish(self, dtype: torch.dtype) -> None:
        """Take in all that is held, the last of it to a total of this dtype."""
        while self._held:
            is_last = all(rows == self._held[0][0] for rows, _ in self._held)
            self._take_first(dtype if is_last else accumulation_dtype(self.like.dtype))

    def _take_first(self, dtype: torch.dtype) -> None:
        """Take in the first that is held, and its neighbours of the same rows in one go."""
        if self._total is None:  # one of all rows first, if there is one: it is kept as it came, and no zeros are written for the others
            self._held.sort(key=lambda entry: len(entry[1][0]) < len(self.like))
        rows = self._held[0][0]
        parts = [part for _, part in itertools.takewhile(lambda entry: entry[0] == rows, self._held)]
        del self._held[: len(parts)]
        self._take(rows, parts, dtype)

    def _take(self, rows: slice, parts: list[Part], dtype: torch.dtype) -> None:
        before = [] if self._total is None else [self._total]
        if len(parts[0][0]) == len(self.like) and (self._total is None or self._total[0].dtype is not dtype):
            self._total = parts[0]
            if before or len(parts) > 1:
                self._total = torch.empty_like(parts[0][0], dtype=dtype, memory_format=torch.contiguous_format), *parts[0][1:]
                self._write(self._total, [*before, *parts])
            return
        # Two narrow partials that are also the last ones stay narrow: their exact sum is rounded once.
        total = self._nothing(dtype) if self._total is None else self._total
        self._total = total = total[0].to(torch.promote_types(total[0].dtype, dtype)), *total[1:]
        place = total[0][rows], *(lse[:, rows] for lse in total[1:])
        self._write(place, [*(place for _ in before), *parts])

    def _nothing(self, dtype: torch.dtype) -> Part:
        raise NotImplementedError

    def _write(self, target: Part, parts: Sequence[Part]) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class OutSum(_Total):
    """The merged output of one rank's rows, of `dim` numbers a head."""

    dim: int = 0

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a partial output of some rows: out `[n, heads, dim]`, lse `[heads, n]`. Both become this object's to overwrite."""
        self._hold(rows, (out, lse))

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of all rows; rows that saw no key have out 0 and lse -inf."""
        self._finish(self.like.dtype)
        out, lse = self._total or self._nothing(self.like.dtype)
        return out.to(self.like.dtype), lse

    def _nothing(self, dtype: torch.dtype) -> Part:
        num_rows, heads, _ = self.like.shape
        out = self.like.new_zeros(num_rows, heads, self.dim, dtype=dtype)
        return out, out.new_full((heads, num_rows), -torch.inf, dtype=accumulation_dtype(dtype))

    def _write(self, target: Part, parts: Sequence[Part]) -> None:
        merge_into((target[0], target[1]), [(part[0], part[1]) for part in parts])


@dataclass(slots=True, eq=False)
class GradSum(_Total):
    """The summed gradient of one rank's rows."""

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add a partial gradient `[n, heads, dim]` of some rows; it becomes this object's to overwrite."""
        self._hold(rows, (grad,))

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum of all rows, zero where nothing was added."""
        self._finish(dtype)
        (total,) = self._total or self._nothing(dtype)
        return total.to(dtype)

    def _nothing(self, dtype: torch.dtype) -> Part:
        return (self.like.new_zeros(self.like.shape, dtype=dtype),)

    def _write(self, target: Part, parts: Sequence[Part]) -> None:
        sum_into(target[0], [part[0] for part in parts])


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
