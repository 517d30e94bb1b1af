"""Operands: a case's inputs as stacks, and each row's share in the rounding errors of a kernel."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_longca.arithmetic import Arithmetic
from pytest_longca.case import Case
from pytest_longca.inputs import COLUMNS, HEADS, Inputs, shares_memory
from pytest_longca.limits import SCALE, UNDERFLOW, Rounding, deviations, evenness, fp32_steps, shared_direction
from pytest_longca.sweep import Piece, RowTile, Visibility, sweep

FLAT = 1 / 8
"""Up to which relative deviation a vector's entries count as of one size."""

ALIKE = 1 / 4
"""From which share in their squares on a direction that all do have may make P and dS alike: less spreads dS by more than its size."""

SOME = 4096
"""So many queries and keys tell how far they are apart."""

FAR = 1e30
"""The variance of a query or key that has no others: nothing can be alike."""

NEARLY_NONE = 1e-6
"""A part of an error that need not be counted."""


class Operands:
    """q and do `[stacks, group, seqlen_q, ...]`, k and v `[batch * heads_kv, seqlen_kv, ...]`, and how to take tiles of them.

    A stack is a key/value head with its group of query heads, or one query head where heads have masks of their own and share neither q
    nor do.
    """

    def __init__(self, case: Case, inputs: Inputs, arithmetic: Arithmetic, rounding: Rounding) -> None:
        self.case = case
        self.arithmetic = arithmetic
        self.rounding = rounding
        self.device = inputs.q.device
        # Query heads of a group that ask the same, and those with the same do.
        self.same_q, self.same_do = (case.group > 1 and shares_memory(x, HEADS) for x in (inputs.q, inputs.do))
        self.group = case.group if case.mask.heads == 1 or self.same_q or self.same_do else 1
        self.stacks = case.batch * case.heads_q // self.group
        self.columns_dv = case.head_dim_v if shares_memory(inputs.do, COLUMNS) else 1
        self.scale = abs(case.scale)
        q = inputs.q if case.scale > 0 else -inputs.q
        self.q, self.do = (self._queries(arithmetic.native(x)) for x in (q, inputs.do))
        self.k, self.v = (self._keys(arithmetic.native(x)) for x in (inputs.k, inputs.v))
        self.k_norm2, self.v_norm2 = (_norm2(x, arithmetic.work) for x in (self.k, self.v))
        self.q_norm2, self.do_norm2 = (_norm2(x, arithmetic.work) for x in (self.q, self.do))
        self.shared_v = self.shared_key(self.v)
        ar, ones = arithmetic, torch.ones_like(self.k_norm2)
        self.key_norms = ar.columns(self.v_norm2, self.k_norm2, ones)
        self.key_squares, self.key_fourths = ar.columns(self.k_norm2), ar.columns(self.k_norm2.square())
        self.value_fourths = ar.columns(self.v_norm2.square())
        self.query_deviations = deviations(case.batch * case.heads_q * case.seqlen_q)
        self.key_deviations = deviations(case.batch * case.heads_kv * case.seqlen_kv)
        self.visibility = Visibility(case, self.device, self.group)
        self.num_queries = case.seqlen_q * case.group  # of a key
        self.k_most, self.v_most = self._largest(self.k_norm2), self._largest(self.v_norm2)
        self.q_most, self.do_most = (self._largest(x.flatten(1)) for x in (self.q_norm2, self.do_norm2))
        # A kernel may fold the scale into dS before it rounds it.
        self.flush_ds = rounding.flush and rounding.flush / min(self.scale, 1.0)
        self.mean_do = self.shared_query(self.do)
        self.shared_do = self.mean_do.square().sum(-1)  # [batch * heads_kv, 1]
        # Only where the queries' do have much in common can a key's dS be alike, or its errors in P add up in dv.
        self.may_be_alike = rounding.ratio < 1 and bool((self.shared_do > ALIKE).any())
        # What a term of dq or dk may lose at most, over the key's or query's norm: P times dP - D, and dS.
        self.lost_ds = self.scale * UNDERFLOW[case.dtype] * (2 * self.do_most * self.v_most + 1)
        # Bounds on a row's scores and on its dP, times the steps of their sums: what fp32 arithmetic has to carry.
        self.score = self.q_norm2.sqrt() * self.k_most * self.scale
        one_sided = max(fp32_steps(case.head_dim), case.head_dim / 2 / SCALE)  # half a rounding for each of d partial sums, at most
        steps = torch.where(self._one_sided(), one_sided, fp32_steps(case.head_dim))
        self.dp = self.do_norm2.sqrt() * self.v_most * fp32_steps(case.head_dim_v)
        self.alike_p = self._alike_p()
        self.are_queries_alike = bool((self.alike_p > NEARLY_NONE).any())
        terms = fp32_steps(max(case.seqlen_kv, case.seqlen_q * case.group))
        self.growth = 1 + rounding.ratio * (self.score * steps + terms)  # [stacks, group, seqlen_q]

    def _queries(self, x: Tensor) -> Tensor:
        """BSHD to `[stacks, group, seqlen_q, ...]`."""
        return x.transpose(1, 2).reshape(self.stacks, self.group, self.case.seqlen_q, x.shape[-1])

    def _keys(self, x: Tensor) -> Tensor:
        """BSHD to `[batch * heads_kv, seqlen_kv, ...]`."""
        return x.transpose(1, 2).reshape(self.case.batch * self.case.heads_kv, self.case.seqlen_kv, x.shape[-1])

    def _one_sided(self) -> Tensor:
        """`[stacks, group, seqlen_q]`: whether a score may be a sum of products of few values, whose partial sums round to one side."""
        if not self.k.shape[1]:
            return torch.zeros_like(self.q_norm2, dtype=torch.bool)
        return _is_flat(self.q) & self.of_stacks(_is_flat(self.k).any(1))[:, None, None]

    def _alike_p(self) -> Tensor:
        """How far P's roundings are the same in all queries, `[stacks, 1, 1]`: 0 unless the scale is far below the usual one.

        Of a score, what is the query's alone cancels in P, and what is the key's is there in all queries: P is spread over the queries by
        the product of both one's distances from their means.
        """
        queries = self.q[:, : 1 if self.same_q else self.group].flatten(1, 2)  # heads that ask the same are judged as one elsewhere
        of_queries, of_keys = _covariance(queries), self.of_stacks(_covariance(self.k))
        return self.alike(self.scale**2 * (of_queries * of_keys).sum((-1, -2), keepdim=True))

    def alike(self, variance: Tensor) -> Tensor:
        """How far numbers of such a relative variance round alike, 0 to 1."""
        return evenness(4 * self.rounding.unit / variance.clamp_min(1e-30).sqrt())

    def _largest(self, norm2: Tensor) -> Tensor:
        """The largest norm in each stack, of its keys or of its queries, `[stacks, 1, 1]`."""
        if not norm2.shape[1]:
            return norm2.new_zeros(self.stacks, 1, 1)
        return self.of_stacks(norm2.amax(1))[:, None, None].sqrt()

    def of_heads(self, of_stacks: Tensor) -> Tensor:
        """The largest of something `[stacks, 1, 1]` among the stacks of each key/value head, `[batch * heads_kv, 1]`."""
        return of_stacks.reshape(self.k.shape[0], -1).amax(1, keepdim=True)

    def of_stacks(self, of_heads_kv: Tensor) -> Tensor:
        """Something given for each `batch * heads_kv`, for each stack."""
        repeats = self.stacks // of_heads_kv.shape[0] if of_heads_kv.shape[0] else 1
        return of_heads_kv if repeats == 1 else of_heads_kv.repeat_interleave(repeats, 0)

    def tiles(self) -> Iterator[RowTile]:
        """The row tiles of the mask; none where there is no query or no key."""
        return sweep(self.case, self.device, self.group > 1) if self.case.seqlen_q and self.case.seqlen_kv else iter(())

    def flat(self, of_rows: Tensor, rows: slice) -> Tensor:
        """Rows of something `[stacks, group, seqlen_q, ...]` as `[stacks, group * rows, ...]`."""
        return of_rows[:, :, rows].flatten(1, 2)

    def grouped(self, of_tile: Tensor, rows: slice) -> Tensor:
        """The inverse of `flat` for one tile: `[stacks, group * rows, ...]` as `[stacks, group, rows, ...]`."""
        grouped: Tensor = of_tile.unflatten(1, (self.group, rows.stop - rows.start))
        return grouped

    def keys(self, x: Tensor, piece: Piece) -> Tensor:
        """A piece of something `[batch * heads_kv, seqlen_kv, ...]` for each stack, `[stacks, keys, ...]`."""
        if isinstance(piece.keys, slice):
            return self.of_stacks(x[:, piece.keys])
        return x.flatten(0, 1)[self._flat_index(piece)]

    def add_keys(self, total: Tensor, piece: Piece, of_stacks: Tensor) -> None:
        """Add what was found for a piece of each stack, `[stacks, keys, ...]`, to `total` `[batch * heads_kv, seqlen_kv, ...]`."""
        if isinstance(piece.keys, slice):
            # Not `+=`, which would write the sum into its place once more.
            total[:, piece.keys].add_(of_stacks.unflatten(0, (total.shape[0], -1)).sum(1) if self.stacks != total.shape[0] else of_stacks)
        else:  # padding is invisible, so what it adds to key 0 is 0
            total.flatten(0, 1).index_add_(0, self._flat_index(piece).flatten(), of_stacks.flatten(0, 1))

    def _flat_index(self, piece: Piece) -> Tensor:
        """Row numbers in `[batch * heads_kv * seqlen_kv]` of a piece's keys, `[stacks, keys]`."""
        assert isinstance(piece.keys, Tensor)
        heads = self.of_stacks(torch.arange(self.case.batch * self.case.heads_kv, device=self.device))
        return self.visibility.per_stack(piece.keys).clamp_min(0) + heads[:, None] * self.case.seqlen_kv

    def scores(self, tile: RowTile, piece: Piece) -> Tensor:
        """Scores of a tile before scaling, -inf where hidden: `[stacks, group * rows, keys]`."""
        scores = self.arithmetic.scores(self.flat(self.q, tile.rows), self.keys(self.k, piece).mT)
        visible = self.visibility.of(tile.rows, piece)
        if visible is None:
            return scores
        return self.grouped(scores, tile.rows).masked_fill_(~visible, float("-inf")).flatten(1, 2)

    def shared_key(self, x: Tensor) -> Tensor:
        """`shared_direction` of k or v, for each stack: `[stacks, 1, 1, head_dim]`."""
        return self.of_stacks(shared_direction(x.to(self.arithmetic.work)))[:, None]

    def shared_query(self, x: Tensor) -> Tensor:
        """`shared_direction` of the q or do of all query heads of a key/value head: `[batch * heads_kv, 1, head_dim]`."""
        rows = x.to(self.arithmetic.work).reshape(self.k.shape[0], -1, x.shape[-1])
        return shared_direction(rows)

    def along_mean(self, of_tile: Tensor, x: Tensor) -> Tensor:
        """Rows of q or do, `[stacks, group * rows, ...]`, along the mean of all of it, `x`: `[stacks, group * rows]`."""
        direction = torch.nn.functional.normalize(self.shared_query(x), dim=-1)
        along: Tensor = (of_tile.to(direction.dtype) * self.of_stacks(direction)).sum(-1)
        return along

    def per_row(self, of_stacks: Tensor) -> Tensor:
        """`[stacks, group, seqlen_q, ...]` as `[batch, seqlen_q, heads_q, ...]`."""
        case = self.case
        return of_stacks.reshape(case.batch, case.heads_q, case.seqlen_q, *of_stacks.shape[3:]).transpose(1, 2)

    def per_key(self, of_heads_kv: Tensor) -> Tensor:
        """`[batch * heads_kv, seqlen_kv, ...]` as `[batch, seqlen_kv, heads_kv, ...]`."""
        case = self.case
        return of_heads_kv.reshape(case.batch, case.heads_kv, *of_heads_kv.shape[1:]).transpose(1, 2)


def _is_flat(x: Tensor) -> Tensor:
    """Whether the entries of each vector have about one size, so that bf16 and fp16 leave them few values."""
    sizes = x.abs().float()
    return sizes.square().mean(-1) <= (1 + FLAT**2) * sizes.mean(-1).square()


def _covariance(x: Tensor) -> Tensor:
    """Of vectors `[stacks, n, head_dim]`, of some of them where there are many: `[stacks, head_dim, head_dim]`."""
    some = x[:, :: max(1, x.shape[1] // SOME)].to(torch.promote_types(x.dtype, torch.float32))
    if some.shape[1] < 2:  # no others to be alike with
        return (torch.eye(x.shape[2], dtype=some.dtype, device=x.device) * FAR).expand(len(x), -1, -1)
    apart = (some - some.mean(1, keepdim=True)).float()  # fp64 would be a fifth of a small reference's products
    return apart.mT @ apart / (some.shape[1] - 1)


def _norm2(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms along the last axis."""
    return x.to(dtype).square().sum(-1)
