"""Forward: out and lse of the reference, and the sums that bound a kernel's rounding errors in out."""

import math

import torch
from torch import Tensor

from pytest_longca.arithmetic import Weights
from pytest_longca.limits import SCALE, UNDERFLOW, Bound, Terms, bound_of, concentrated, fp32_steps
from pytest_longca.operands import Operands
from pytest_longca.sweep import Piece, RowTile

TINY = 1e-37
"""What an empty sum is divided by."""

POWERS = (1, 1, 1, 2, 4)
"""The powers of P that `_Running` sums."""


class Forward:
    """Visits row tiles; afterwards `out`, `lse` and what the backward needs are there, `[stacks, group, seqlen_q, ...]`."""

    def __init__(self, ops: Operands) -> None:
        self.ops = ops
        case, work = ops.case, ops.arithmetic.work
        shape = (ops.stacks, ops.group, case.seqlen_q)
        new = ops.q.new_zeros
        self.out = new(*shape, case.head_dim_v, dtype=work)
        self.highest = new(shape, dtype=work)  # a row's highest score before scaling, 0 where it sees none
        self.total = new(shape, dtype=work)  # its sum of exp(score - highest)
        self.absolute = new(*shape, case.head_dim_v, dtype=work)
        self.mean_key = new(shape, dtype=work)  # |sum of P K|: where an error in the row-sum term D goes
        self.squares = new(*shape, 3, dtype=work)  # sums of P^2 times |V|^2, |K|^2 and 1
        self.fourths = new(shape, dtype=work)  # sum of P^4 |V|^4
        self.flushed = new(*shape, case.head_dim_v, dtype=work) if ops.rounding.flush else None
        self.evenness = new(shape, dtype=work)
        self._known: Weights | None = None  # P of a small case, which is one tile

    def visit(self, tile: RowTile) -> Tensor | None:
        """Compute a row tile. Gives its scores if they are in one piece, for the backward to use again."""
        ops = self.ops
        sums = _Running(ops)
        scores = None
        for piece in tile.pieces:
            scores = ops.scores(tile, piece)
            sums.add(piece, scores)
        if not tile.pieces:
            return None
        self._store(tile, sums)
        if ops.visibility.small and sums.weights is not None:
            self._known = ops.arithmetic.weights(sums.weights * self._factor(tile))
        if self.flushed is not None:
            self._add_underflow(tile, scores if len(tile.pieces) == 1 else None)
        return scores if len(tile.pieces) == 1 else None

    def _store(self, tile: RowTile, sums: "_Running") -> None:
        assert sums.highest is not None
        rows, (row_sum, first, sides, norms, fourths) = tile.rows, sums.sums
        total = row_sum.clamp_min(1.0)  # a row's highest score alone gives 1, and an empty row has nothing but zeros to divide
        absolute, key = (sides / total).split([self.ops.case.head_dim_v, self.ops.case.head_dim], -1)
        total2 = total.square()
        squares = norms[..., :3] / total2
        self.out[:, :, rows] = self.ops.grouped(first / total, rows)
        self.absolute[:, :, rows] = self.ops.grouped(absolute, rows)
        self.mean_key[:, :, rows] = self.ops.grouped(torch.linalg.vector_norm(key, dim=-1), rows)
        self.squares[:, :, rows] = self.ops.grouped(squares, rows)
        self.fourths[:, :, rows] = self.ops.grouped(fourths[..., 0] / total2.square()[..., 0], rows)
        self.highest[:, :, rows] = self.ops.grouped(_finite(sums.highest)[..., 0], rows)
        self.total[:, :, rows] = self.ops.grouped(row_sum[..., 0], rows)
        shortfall = 1 - norms[..., 2] / total[..., 0]
        ulp = 4 * self.ops.rounding.unit
        self.evenness[:, :, rows] = self.ops.grouped(torch.exp(-2 * (math.pi * shortfall / ulp).square()), rows)

    def weights(self, tile: RowTile, scores: Tensor) -> Weights:
        """P of a tile whose row sums are known: `[stacks, group * rows, keys]`."""
        if self._known is not None:
            return self._known
        highest = self.ops.flat(self.highest, tile.rows)[..., None]
        return self.ops.arithmetic.exponentials(scores, highest, self.ops.scale, self._factor(tile))

    def _factor(self, tile: RowTile) -> Tensor:
        """What makes P of a tile's exponentials."""
        return self.ops.flat(self.total, tile.rows)[..., None].clamp_min(1.0).reciprocal()

    def _add_underflow(self, tile: RowTile, scores: Tensor | None) -> None:
        """What out loses where P falls below the dtype's normal range, or out of it: only now is P known, and not just up to a factor."""
        ops, ar, rows = self.ops, self.ops.arithmetic, tile.rows
        assert self.flushed is not None and ops.rounding.flush
        for piece in tile.pieces:
            p = self.weights(tile, ops.scores(tile, piece) if scores is None else scores).value
            v = ar.rough(ops.keys(ops.v, piece).abs())
            as_rounded = widened(p, ops.rounding.flush)
            self.flushed[:, :, rows].add_(ops.grouped(ar.bound(ar.rough(flushed(p, ops.rounding.flush)), v), rows))
            self.absolute[:, :, rows].add_(ops.grouped(ar.bound(ar.rough(as_rounded - p), v), rows))
            rounded2, p2 = as_rounded.square(), p.square()  # `**` would take twenty times as long
            squares = ar.bound(ar.rough(rounded2 - p2), ops.keys(ops.key_norms, piece))
            self.squares[:, :, rows, 0].add_(ops.grouped(squares[..., 0], rows))
            fourths = ar.bound(ar.rough(rounded2.square() - p2.square()), ops.keys(ops.value_fourths, piece))
            self.fourths[:, :, rows].add_(ops.grouped(fourths[..., 0], rows))

    def finish(self) -> dict[str, tuple[Tensor, Bound]]:
        """Out and lse with their bounds, in the reference's layout."""
        ops = self.ops
        squares = self.squares[..., 0] * ops.growth.square()
        terms = Terms(
            absolute=self.absolute * ops.growth[..., None],
            squares=squares,
            concentrated=concentrated(self.fourths * ops.growth.square().square(), squares, squares),
            growth=ops.growth,
            mean=ops.shared_v,
            flushed=self.flushed,
            lost=ops.case.seqlen_kv * UNDERFLOW[ops.case.dtype] * ops.v_most,
            evenness=self.evenness,
            alike=ops.alike_p,
        )
        bound = bound_of(self.out, terms, ops.rounding, ops.case.seqlen_kv, ops.query_deviations)
        return {"out": (ops.per_row(self.out), bound.laid_out(ops.per_row, ops.visibility.small)), "lse": self._lse()}

    def log_sums(self, rows: slice) -> Tensor:
        """lse of a row tile that was visited, `[stacks, group, rows]`."""
        return self.highest[:, :, rows] * self.ops.scale + self.total[:, :, rows].log()

    def _lse(self) -> tuple[Tensor, Bound]:
        case = self.ops.case
        lse = self.log_sums(slice(None)).reshape(case.batch, case.heads_q, case.seqlen_q)
        score, others = self.ops.score.reshape(lse.shape), 2 + lse.abs().nan_to_num(posinf=0.0)
        zeros, size = torch.zeros_like(lse), score * fp32_steps(case.head_dim) + others
        # Products that are all alike round to the same side in each partial sum.
        allowed = SCALE * others + max(SCALE * fp32_steps(case.head_dim), case.head_dim / 2) * score
        return lse, Bound(size, size, size, allowed, zeros, zeros, zeros, zeros, zeros)


class _Running:
    """Sums over a row tile's pieces, relative to the highest score so far: `[stacks, group * rows, ...]`."""

    def __init__(self, ops: Operands) -> None:
        self.ops = ops
        self.highest: Tensor | None = None
        self.sums: tuple[Tensor, ...] = ()
        self.weights: Tensor | None = None  # the last piece's exponentials

    def add(self, piece: Piece, scores: Tensor) -> None:
        ops, highest = self.ops, scores.amax(-1, keepdim=True)
        if self.highest is not None:
            highest = torch.maximum(self.highest, highest)
        shift = _finite(highest)
        weights = ops.arithmetic.exponentials(scores, shift, ops.scale)
        self.weights = weights.value if ops.visibility.small else None
        found = self._of_piece(piece, weights)
        if self.highest is not None:
            before = ((self.highest - shift) * ops.scale).exp()
            found = tuple(old * before**power + new for old, new, power in zip(self.sums, found, POWERS, strict=True))
        self.highest, self.sums = highest, found

    def _of_piece(self, piece: Piece, weights: Weights) -> tuple[Tensor, ...]:
        """The sums of a piece: of P, of P V, of P |V| and P K side by side, of P^2 with the norms, of P^4."""
        ops, ar = self.ops, self.ops.arithmetic
        k, v = ops.keys(ops.k, piece), ops.keys(ops.v, piece)
        sides = torch.cat([ar.rough(v.abs()), ar.rough(k)], -1)
        return (
            weights.value.sum(-1, keepdim=True),
            ar.product(weights.parts, ar.parts(v)),
            ar.bound(weights.size, sides),
            ar.bound(weights.square, ops.keys(ops.key_norms, piece)),
            ar.bound(weights.fourth, ops.keys(ops.value_fourths, piece)),
        )


def _finite(highest: Tensor) -> Tensor:
    """A row's highest score, 0 where it saw no key."""
    return highest.masked_fill(highest == -math.inf, 0.0)


def flushed(x: Tensor, threshold: float) -> Tensor:
    """What may be lost of non-negative values when those below the dtype's range become 0: all of it, where it is that small."""
    return torch.where(x < 4 * threshold, x.clamp(max=threshold), 0.0)


def widened(x: Tensor, threshold: float) -> Tensor:
    """Non-negative values as large as their rounding error says: below the dtype's normal range the error does not shrink any more."""
    return torch.where(x < 4 * threshold, x, x.clamp_min(threshold * 2**11.5))
