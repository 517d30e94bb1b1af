"""Backward: dq, dk and dv of the reference, and the sums that bound a kernel's rounding errors in them."""

import torch
from torch import Tensor

from pytest_longca.arithmetic import Weights
from pytest_longca.forward import TINY, Forward, flushed, widened
from pytest_longca.limits import Bound, Terms, bound_of
from pytest_longca.operands import Operands
from pytest_longca.sweep import Piece, RowTile


class Backward:
    """Visits row tiles after the forward did; then `finish` has the gradients.

    Totals over keys are `[batch * heads_kv, seqlen_kv, ...]`, those over queries `[stacks, group, seqlen_q, ...]`.
    """

    def __init__(self, ops: Operands, forward: Forward) -> None:
        self.ops, self.forward = ops, forward
        case, work = ops.case, ops.arithmetic.work
        rows = (ops.stacks, ops.group, case.seqlen_q)
        keys = (case.batch * case.heads_kv, case.seqlen_kv)

        def zeros(*shape: int) -> Tensor:
            return ops.q.new_zeros(shape, dtype=work)

        self.dq, self.dq_absolute, self.dq_squares = zeros(*rows, case.head_dim), zeros(*rows, case.head_dim), zeros(*rows)
        self.dk, self.dv = zeros(*keys, case.head_dim), zeros(*keys, case.head_dim_v)
        self.dk_absolute, self.dv_absolute = zeros(*keys, case.head_dim), zeros(*keys, case.head_dim_v)
        self.squares = zeros(*keys, 4)  # of dv, of dk by D, evenness, P
        self.dk_squares = zeros(*keys, 1)
        self.flushed = {}
        if ops.rounding.flush:
            widths = {"dq": (*rows, case.head_dim), "dk": (*keys, case.head_dim), "dv": (*keys, case.head_dim_v)}
            self.flushed = {name: zeros(*shape) for name, shape in widths.items()}

    def visit(self, tile: RowTile, scores: Tensor | None) -> None:
        """Add a row tile to all gradients; `scores` are its scores if they are in one piece and known."""
        rows = _Rows(self.ops, self.forward, tile)
        for piece in tile.pieces:
            p = self.forward.weights(tile, self.ops.scores(tile, piece) if scores is None else scores)
            self._add_weights(piece, rows, p)
            self._add_scores(piece, rows, p.value)

    def _add_weights(self, piece: Piece, rows: "_Rows", weights: Weights) -> None:
        """What P gives: dv, the bound of dv, and what an error in D costs dk."""
        ops, ar = self.ops, self.ops.arithmetic
        ops.add_keys(self.dv, piece, ar.product(_transposed(weights.parts), rows.do_parts))
        size, square = self._as_rounded(weights)
        absolute = ar.bound(size.mT, rows.weighted)
        dv, dk = absolute.split([ops.case.head_dim_v, ops.case.head_dim], -1)
        ops.add_keys(self.dv_absolute, piece, dv)
        ops.add_keys(self.dk_absolute, piece, dk)
        plain = ar.bound(weights.size.mT, rows.evenness)
        ops.add_keys(self.squares, piece, torch.cat([ar.bound(square.mT, rows.squares), plain], -1))
        if ops.rounding.flush:
            lost = ar.rough(flushed(weights.value, ops.rounding.flush))
            ops.add_keys(self.flushed["dv"], piece, ar.bound(lost.mT, rows.do_absolute))

    def _add_scores(self, piece: Piece, rows: "_Rows", p: Tensor) -> None:
        """What dS gives: dq and dk and their bounds."""
        ops, ar = self.ops, self.ops.arithmetic
        k, v = ops.keys(ops.k, piece), ops.keys(ops.v, piece)
        ds = ar.gradients(p, ar.scores(rows.do, v.mT), rows.delta)
        self._to_rows(self.dq, rows, ar.product(ds.parts, ar.parts(k)))
        ops.add_keys(self.dk, piece, ar.product(_transposed(ds.parts), rows.q_parts))
        size, square = self._as_rounded(ds)
        key_absolute = ar.rough(k.abs())
        self._to_rows(self.dq_absolute, rows, ar.bound(size, key_absolute))
        ops.add_keys(self.dk_absolute, piece, ar.bound(size.mT, rows.q_absolute))
        self._to_rows(self.dq_squares, rows, ar.bound(square, ar.rough(ops.keys(ops.k_norm2, piece))[..., None])[..., 0])
        ops.add_keys(self.dk_squares, piece, ar.bound(square.mT, rows.q_squares))
        if ops.rounding.flush:
            lost = ar.rough(flushed(ds.value.abs(), ops.rounding.flush))
            self._to_rows(self.flushed["dq"], rows, ar.bound(lost, key_absolute))
            ops.add_keys(self.flushed["dk"], piece, ar.bound(lost.mT, rows.q_absolute))

    def _as_rounded(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Size and square of P or dS as their rounding errors are: larger than they, where the dtype underflows."""
        flush = self.ops.rounding.flush
        if not flush:
            return weights.size, weights.square
        size = self.ops.arithmetic.rough(widened(weights.value.abs(), flush))
        return size, size.square()

    def _to_rows(self, total: Tensor, rows: "_Rows", of_tile: Tensor) -> None:
        total[:, :, rows.rows] += self.ops.grouped(of_tile, rows.rows)

    def finish(self) -> dict[str, tuple[Tensor, Bound]]:
        """The gradients with their bounds, in the reference's layout."""
        return {"dq": self._dq(), "dk": self._dk(), "dv": self._dv()}

    def _dq(self) -> tuple[Tensor, Bound]:
        ops, forward = self.ops, self.forward
        by_delta = _delta_rounding(ops, forward).square() * forward.mean_key.square()
        by_dp = (ops.rounding.ratio * ops.dp).square() * forward.squares[..., 1]
        terms = Terms(
            absolute=self.dq_absolute * ops.growth[..., None] * ops.scale,
            squares=self.dq_squares * ops.growth.square() * ops.scale**2,
            growth=ops.growth,
            mean=ops.shared_key(ops.k),
            coherent=(by_delta + by_dp).sqrt() * ops.scale,
            flushed=self.flushed["dq"] * ops.scale if self.flushed else None,
        )
        dq = self.dq * ops.case.scale
        bound = bound_of(dq, terms, ops.rounding, ops.case.seqlen_kv)
        return ops.per_row(dq), Bound(*map(ops.per_row, bound.tensors()))

    def _dk(self) -> tuple[Tensor, Bound]:
        ops = self.ops
        terms = Terms(
            absolute=self.dk_absolute * ops.scale,
            squares=(self.dk_squares[..., 0] + self.squares[..., 1]) * ops.scale**2,
            growth=self._growth_of_keys(),
            mean=ops.shared_query(ops.q),
            flushed=self.flushed["dk"] * ops.scale if self.flushed else None,
            common=self.squares[..., 1] * ops.scale**2,
            partial_sums=ops.case.group > 1,
        )
        return self._of_keys(self.dk * ops.scale, terms)  # the operand q carries the scale's sign

    def _dv(self) -> tuple[Tensor, Bound]:
        ops = self.ops
        terms = Terms(
            absolute=self.dv_absolute,
            squares=self.squares[..., 0],
            growth=self._growth_of_keys(),
            mean=ops.shared_query(ops.do),
            flushed=self.flushed.get("dv"),
            evenness=self.squares[..., 2] / self.squares[..., 3].clamp_min(TINY),
            partial_sums=ops.case.group > 1,
        )
        return self._of_keys(self.dv, terms)

    def _of_keys(self, value: Tensor, terms: Terms) -> tuple[Tensor, Bound]:
        ops = self.ops
        bound = bound_of(value, terms, ops.rounding, ops.case.seqlen_q * ops.case.group)
        return ops.per_key(value), Bound(*map(ops.per_key, bound.tensors()))

    def _growth_of_keys(self) -> Tensor:
        """The largest growth of the queries of each key/value head, `[batch * heads_kv, 1]`."""
        growth, heads = self.ops.growth, self.dk.shape[0]
        return growth.reshape(heads, -1).amax(1, keepdim=True) if growth.numel() else growth.new_ones(heads, 1)


class _Rows:
    """What a row tile brings to every piece, `[stacks, group * rows, ...]`."""

    def __init__(self, ops: Operands, forward: Forward, tile: RowTile) -> None:
        ar = ops.arithmetic
        self.rows = tile.rows

        def flat(x: Tensor) -> Tensor:
            return ops.flat(x, tile.rows)

        q, self.do, growth = flat(ops.q), flat(ops.do), flat(ops.growth)[..., None]
        self.delta = (self.do * flat(forward.out)).sum(-1, keepdim=True)
        self.q_parts, self.do_parts = ar.parts(q), ar.parts(self.do)
        error = _delta_rounding(ops, forward, tile.rows).flatten(1, 2)[..., None]
        other = ops.rounding.ratio * flat(ops.dp)[..., None]
        self.do_absolute = ar.rough(self.do.abs() * growth)
        self.q_absolute = ar.rough(q.abs() * growth)
        self.weighted = torch.cat([self.do_absolute, ar.rough(q.abs() * (error + other))], -1)
        q2, do2 = flat(ops.q_norm2)[..., None], flat(ops.do_norm2)[..., None]
        self.squares = ar.rough(torch.cat([do2 * growth.square(), q2 * (error.square() + other.square())], -1))
        self.q_squares = ar.rough(q2 * growth.square())
        evenness = flat(forward.evenness)[..., None]
        self.evenness = ar.rough(torch.cat([evenness, torch.ones_like(evenness)], -1))


def _delta_rounding(ops: Operands, forward: Forward, rows: slice = slice(None)) -> Tensor:
    """In units of u, what rounding out costs the row-sum term D = <do, out>, `[stacks, group, rows]`."""
    norm: Tensor = torch.linalg.vector_norm(ops.do[:, :, rows] * forward.out[:, :, rows], dim=-1)
    return norm


def _transposed(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.mT for part in parts)
