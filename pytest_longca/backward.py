"""Backward: dq, dk and dv of the reference, and the sums that bound a kernel's rounding errors in them."""

import torch
from torch import Tensor

from pytest_longca.arithmetic import Weights
from pytest_longca.forward import TINY, Forward, flushed, widened
from pytest_longca.limits import DS_ROUNDINGS, UNDERFLOW, Bound, Terms, bound_of, concentrated, fp32_steps
from pytest_longca.one_sided import Alike
from pytest_longca.operands import Operands
from pytest_longca.same_heads import SameHeads
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
        self.dq_fourths, self.delta_rounding = zeros(*rows), zeros(*rows)
        self.dk, self.dv = zeros(*keys, case.head_dim), zeros(*keys, case.head_dim_v)
        self.dk_absolute, self.dv_absolute = zeros(*keys, case.head_dim), zeros(*keys, case.head_dim_v)
        self.squares = zeros(*keys, 2)  # of dv, of dk by D
        self.evenness = zeros(*keys, 3)  # sums of P times it, of P, and of P times it times |D| |q|
        self.one_delta = zeros(*keys, 1)  # sum of P times what the queries' errors in D have in common times |q|
        self.dk_squares, self.dk_fourths = zeros(*keys, 1), zeros(*keys, 1)
        self.fourths = zeros(*keys, 2)  # of dv, of dk by D
        # The squares of terms: of what is rounded, but where several heads make one term.
        self.terms = zeros(*keys, 2) if ops.same_q or ops.same_do else self.squares
        self.dk_terms = zeros(*keys, 1) if ops.same_q else self.dk_squares
        self.flushed = {}
        if ops.rounding.flush:
            widths = {"dq": (*rows, case.head_dim), "dk": (*keys, case.head_dim), "dv": (*keys, case.head_dim_v)}
            self.flushed = {name: zeros(*shape) for name, shape in widths.items()}
        self.alike = Alike(ops) if ops.may_be_alike else None

    def visit(self, tile: RowTile, scores: Tensor | None) -> None:
        """Add a row tile to all gradients; `scores` are its scores if they are in one piece and known."""
        rows = _Rows(self.ops, self.forward, tile)
        self.delta_rounding[:, :, tile.rows] = rows.delta_rounding
        for piece in tile.pieces:
            p = self.forward.weights(tile, self.ops.scores(tile, piece) if scores is None else scores)
            self._add_weights(piece, rows, p)
            self._add_scores(piece, rows, p.value)

    def _add_weights(self, piece: Piece, rows: "_Rows", weights: Weights) -> None:
        """What P gives: dv, the bound of dv, and what an error in D costs dk."""
        ops, ar = self.ops, self.ops.arithmetic
        ops.add_keys(self.dv, piece, ar.product(_transposed(weights.parts), rows.do_parts))
        size, square, fourth = self._as_rounded(weights, weights.value, ops.rounding.flush)
        absolute = ar.bound(size.mT, rows.weighted)
        dv, dk = absolute.split([ops.case.head_dim_v, ops.case.head_dim], -1)
        ops.add_keys(self.dv_absolute, piece, dv)
        ops.add_keys(self.dk_absolute, piece, dk)
        ops.add_keys(self.evenness, piece, ar.bound(weights.size.mT, rows.evenness)[..., :3])
        if ops.are_queries_alike:
            ops.add_keys(self.one_delta, piece, ar.bound(weights.size.mT, rows.one_delta)[..., :1])
        if rows.heads:
            sums = rows.heads.of_weights(size, rows.weighted_do), rows.heads.of_delta(size, rows.of_delta)
            for total, of_dv, of_dk in zip((self.squares, self.terms, self.fourths), *sums, strict=True):
                ops.add_keys(total, piece, torch.stack((of_dv, of_dk), -1))
        else:
            ops.add_keys(self.squares, piece, ar.bound(square.mT, rows.squares)[..., :2])
            ops.add_keys(self.fourths, piece, ar.bound(fourth.mT, rows.fourths)[..., :2])
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
        size, square, fourth = self._as_rounded(ds, p, ops.flush_ds)
        key_absolute = ar.rough(k.abs())
        self._to_rows(self.dq_absolute, rows, ar.bound(size, key_absolute))
        ops.add_keys(self.dk_absolute, piece, ar.bound(size.mT, rows.q_absolute))
        self._to_rows(self.dq_squares, rows, ar.bound(square, ops.keys(ops.key_squares, piece))[..., 0])
        self._to_rows(self.dq_fourths, rows, ar.bound(fourth, ops.keys(ops.key_fourths, piece))[..., 0])
        if rows.heads and ops.same_q:
            sums = rows.heads.of_scores(size * ds.value.sign(), rows.q2)
            for total, of_piece in zip((self.dk_squares, self.dk_terms, self.dk_fourths), sums, strict=True):
                ops.add_keys(total, piece, of_piece[..., None])
        else:
            ops.add_keys(self.dk_squares, piece, ar.bound(square.mT, rows.q_squares)[..., :1])
            ops.add_keys(self.dk_fourths, piece, ar.bound(fourth.mT, rows.q_fourths)[..., :1])
        if ops.rounding.flush:
            lost = flushed(ds.value.abs(), ops.flush_ds or 0.0)
            lost = ar.rough(lost + _follows(flushed(p, ops.rounding.flush), p, ds.value))
            self._to_rows(self.flushed["dq"], rows, ar.bound(lost, key_absolute))
            ops.add_keys(self.flushed["dk"], piece, ar.bound(lost.mT, rows.q_absolute))
        if self.alike:
            self.alike.add(piece, rows.q, rows.do, p, ds.value)

    def _as_rounded(self, weights: Weights, p: Tensor, flush: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Size, square and fourth power of P or dS as their rounding errors are: larger than they, where they or P underflow."""
        if not self.ops.rounding.flush or not flush:
            return weights.size, weights.square, weights.fourth
        of_p = _follows(widened(p, self.ops.rounding.flush), p, weights.value)
        size = self.ops.arithmetic.rough(torch.maximum(widened(weights.value.abs(), flush), of_p))
        square = size.square()
        return size, square, square.square()

    def _to_rows(self, total: Tensor, rows: "_Rows", of_tile: Tensor) -> None:
        total[:, :, rows.rows].add_(self.ops.grouped(of_tile, rows.rows))

    def finish(self) -> dict[str, tuple[Tensor, Bound]]:
        """The gradients with their bounds, in the reference's layout."""
        return {"dq": self._dq(), "dk": self._dk(), "dv": self._dv()}

    def _dq(self) -> tuple[Tensor, Bound]:
        ops, forward = self.ops, self.forward
        by_delta = self.delta_rounding.square() * forward.mean_key.square()
        by_dp = (ops.rounding.ratio * ops.dp).square() * forward.squares[..., 1]
        squares = self.dq_squares * ops.growth.square() * ops.scale**2
        terms = Terms(
            absolute=self.dq_absolute * ops.growth[..., None] * ops.scale,
            squares=DS_ROUNDINGS * squares,
            concentrated=DS_ROUNDINGS * concentrated(self.dq_fourths * (ops.growth * ops.scale).square().square(), squares, squares),
            roundings=DS_ROUNDINGS,
            growth=ops.growth,
            mean=ops.shared_key(ops.k),
            coherent=(by_delta + by_dp).sqrt() * ops.scale,
            flushed=self.flushed["dq"] * ops.scale if self.flushed else None,
            lost=ops.case.seqlen_kv * ops.lost_ds * ops.k_most,
            evenness=forward.evenness,
            alike=ops.alike_p * ops.of_stacks(ops.alike(1 - ops.shared_do))[..., None],
        )
        dq = self.dq * ops.case.scale
        bound = bound_of(dq, terms, ops.rounding, ops.case.seqlen_kv, ops.query_deviations)
        return ops.per_row(dq), bound.laid_out(ops.per_row, ops.visibility.small)

    def _dk(self) -> tuple[Tensor, Bound]:
        ops = self.ops
        squares, by_delta = self.dk_squares[..., 0] * ops.scale**2, self.squares[..., 1] * ops.scale**2
        fourths, of_delta = (x * ops.scale**4 for x in (self.dk_fourths[..., 0], self.fourths[..., 1]))
        squared = self.dk_terms[..., 0] * ops.scale**2
        # A term that is large itself is along the row with its error in D too: sum of (dS^2 e^2), by Cauchy and Schwarz.
        with_delta = (fourths * of_delta).sqrt()
        one_delta = self.one_delta[..., 0] * ops.scale
        terms = Terms(
            absolute=self.dk_absolute * ops.scale,
            squares=DS_ROUNDINGS * squares + by_delta,
            concentrated=DS_ROUNDINGS * concentrated(fourths, squared, squares) + concentrated(with_delta, squared, by_delta),
            roundings=DS_ROUNDINGS,
            growth=self._growth_of_keys(),
            mean=ops.shared_query(ops.q),
            coherent=one_delta,
            flushed=self.flushed["dk"] * ops.scale if self.flushed else None,
            lost=ops.num_queries * ops.of_heads(ops.lost_ds * ops.q_most)
            + 2 * ops.rounding.unit * ops.scale * self.evenness[..., 2]
            + (self.alike.of_dk() if self.alike else 0.0),
            evenness=self._evenness_of_keys(),
            common=by_delta + one_delta.square(),
            common_fourths=of_delta + one_delta.square().square(),
            parts=squares if ops.case.group > 1 else None,
            num_parts=ops.case.group,
            are_parts_alike=ops.same_q and ops.same_do,
        )
        return self._of_keys(self.dk * ops.scale, terms)  # the operand q carries the scale's sign

    def _dv(self) -> tuple[Tensor, Bound]:
        ops = self.ops
        squares = self.squares[..., 0]
        terms = Terms(
            absolute=self.dv_absolute,
            squares=squares,
            concentrated=concentrated(self.fourths[..., 0], self.terms[..., 0], squares),
            growth=self._growth_of_keys(),
            mean=ops.mean_do,
            coherent=ops.of_heads(ops.alike_p) * torch.linalg.vector_norm(self.dv, dim=-1),
            flushed=self.flushed.get("dv"),
            lost=ops.num_queries * UNDERFLOW[ops.case.dtype] * ops.of_heads(ops.do_most) + (self.alike.of_dv() if self.alike else 0.0),
            evenness=self._evenness_of_keys(),
            parts=squares if ops.case.group > 1 else None,
            num_parts=ops.case.group,
            are_parts_alike=ops.same_q and ops.same_do,
            columns=ops.columns_dv,
            alike=ops.of_heads(ops.alike_p),  # where queries are so close, their keys' scores are few numbers
        )
        return self._of_keys(self.dv, terms)

    def _of_keys(self, value: Tensor, terms: Terms) -> tuple[Tensor, Bound]:
        ops = self.ops
        bound = bound_of(value, terms, ops.rounding, ops.num_queries, ops.key_deviations)
        return ops.per_key(value), bound.laid_out(ops.per_key, ops.visibility.small)

    def _evenness_of_keys(self) -> Tensor:
        """The mean evenness of what each key's queries round, by P, `[batch * heads_kv, seqlen_kv]`."""
        return self.evenness[..., 0] / self.evenness[..., 1].clamp_min(TINY)

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

        self.q, self.do, growth = flat(ops.q), flat(ops.do), flat(ops.growth)
        self.delta = (self.do * flat(forward.out)).sum(-1, keepdim=True)
        self.q_parts, self.do_parts = ar.parts(self.q), ar.parts(self.do)
        self.delta_rounding = _delta_rounding(ops, forward, tile.rows)
        error = self.delta_rounding.flatten(1, 2)
        other = ops.rounding.ratio * flat(ops.dp)
        q_size, growth2 = self.q.abs(), growth.square()
        self.do_absolute = ar.rough(self.do.abs() * growth[..., None])
        self.q_absolute = ar.rough(q_size * growth[..., None])
        self.weighted = torch.cat([self.do_absolute, ar.rough(q_size * (error + other)[..., None])], -1)
        q2 = flat(ops.q_norm2)
        do2, self.of_delta, self.q2 = flat(ops.do_norm2) * growth2, q2 * (error.square() + other.square()), q2 * growth2
        self.squares, self.fourths = ar.columns(do2, self.of_delta), ar.columns(do2.square(), self.of_delta.square())
        self.q_squares, self.q_fourths = ar.columns(self.q2), ar.columns(self.q2.square())
        self.heads = SameHeads(ops, forward.log_sums(tile.rows)) if ops.same_q or ops.same_do else None
        self.weighted_do = self.do.to(ar.work) * growth[..., None] if self.heads else self.do
        evenness = flat(forward.evenness)
        # P that is rounded to one side in all of a row is so in out and D too, and in dS the other way.
        of_even = evenness * self.delta[..., 0].abs() * q2.sqrt()
        self.evenness = ar.columns(evenness, torch.ones_like(evenness), of_even)
        if ops.are_queries_alike:  # so is out then, and what rounding it and one do make of D
            self.one_delta = ar.columns(ops.alike_p[..., 0] * (ops.of_stacks(ops.shared_do) * q2).sqrt() * error)


def _delta_rounding(ops: Operands, forward: Forward, rows: slice) -> Tensor:
    """In units of u, what rounding out, P before it and sums costs the row-sum term D = <do, out>, `[stacks, group, rows]`."""
    do, out = ops.do[:, :, rows], forward.out[:, :, rows]
    products = do * out
    of_out = products.square().sum(-1)
    in_fp32 = ops.rounding.ratio * fp32_steps(ops.case.head_dim_v)
    of_sum = in_fp32**2 * ops.do_norm2[:, :, rows] * out.square().sum(-1)
    # <do, V>: directions of their own, and the one that the values share.
    along_do = ops.do_norm2[:, :, rows] / ops.case.head_dim_v + (do.to(out.dtype) * ops.shared_v).sum(-1).square()
    to_one_side = (forward.evenness[:, :, rows] * products.sum(-1)).square()
    of_terms = forward.squares[:, :, rows, 0] * along_do + to_one_side
    return (ops.growth[:, :, rows].square() * (of_out + of_terms) + of_sum).sqrt()


def _follows(as_rounded: Tensor, p: Tensor, value: Tensor) -> Tensor:
    """The size of P or dS where P is as large as its rounding error says."""
    return torch.where(p > 0, value.abs() * (as_rounded / p), 0.0)


def _transposed(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.mT for part in parts)
