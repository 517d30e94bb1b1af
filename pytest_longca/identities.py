"""Identities: sums that every correct result keeps, at O(seqlen) cost and for all heads, with limits from the rounding of the results.

P's rows sum to 1, so the sum of dv over keys is the sum of do over the queries that see a key, and <do, out> = <v, dv>; dS's rows sum to 0,
so the sum of dk over keys is 0; dS meets q and k alike, so <q, dq> = <k, dk>. docs/limits.md derives the limits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result
from pytest_longca.limits import DS_ROUNDINGS, RMS, blocks_in_dtype, rounding_of

DEVIATIONS = 6.0
"""How many standard deviations the norm of a sum's error may be above its mean."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A broken or kept identity: the worst head's error over its limit."""

    name: str
    error_over_limit: float
    batch: int
    head_kv: int

    @property
    def ok(self) -> bool:
        return self.error_over_limit <= 1


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Everything in fp64, `[batch, heads_kv, ...]`; queries of a group side by side: `[batch, heads_kv, group * seqlen_q, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sees: Tensor
    scale: float
    roundings: float


def check_identities(case: Case, inputs: Inputs, result: Result) -> list[Identity]:
    """Each identity for all heads. Needs out and all gradients; memory is a few copies of the operands of one batch entry at a time."""
    worst: dict[str, Identity] = {}
    unit = rounding_of(case).unit
    sees = rows_that_see(case, inputs.q.device)
    for batch in range(case.batch):
        grouped = _group(case, inputs, result, sees, batch)
        for name, identity in IDENTITIES.items():
            error, variance = identity(grouped)
            ratio = _over_limit(error, variance, unit)
            head = int(ratio.argmax())
            if name not in worst or float(ratio[head]) > worst[name].error_over_limit:
                worst[name] = Identity(name, float(ratio[head]), batch, head)
    return list(worst.values())


def rows_that_see(case: Case, device: torch.device) -> Tensor:
    """Whether each query sees a key: bool `[batch or 1, heads or 1, seqlen_q]`."""
    rows = case.mask.row_intervals(device)
    if rows is not None:
        return (rows[..., 1] > rows[..., 0]).any(-1)
    tiles = 1
    found = case.mask.tiles(device, tiles, max(case.seqlen_kv, 1))
    return (found.partial | found.full).any(-1)


def _group(case: Case, inputs: Inputs, result: Result, sees: Tensor, batch: int) -> _Grouped:
    def queries(x: Tensor) -> Tensor:
        return x[batch].double().transpose(0, 1).reshape(case.heads_kv, -1, x.shape[-1])

    def keys(x: Tensor) -> Tensor:
        return x[batch].double().transpose(0, 1)

    given = (result.out, result.dq, result.dk, result.dv)
    assert all(x is not None for x in given), "identities need out and all gradients"
    seen = sees[batch if sees.shape[0] > 1 else 0].expand(case.heads_q, case.seqlen_q).reshape(case.heads_kv, -1)
    return _Grouped(
        *(queries(inputs.q), keys(inputs.k), keys(inputs.v), queries(inputs.do)),
        *(queries(result.out), queries(result.dq), keys(result.dk), keys(result.dv)),  # type: ignore[arg-type]  # asserted above
        sees=seen,
        scale=case.scale,
        # P, the result, each query head's part of it, and sums that are kept in the dtype
        roundings=2 + (case.group > 1) + ((blocks_in_dtype(case, "dk") - 1) / 2 if result.sums_in_dtype else 0),
    )


def _over_limit(error: Tensor, variance: Tensor, unit: float) -> Tensor:
    """Error over limit of each head, `[heads_kv, columns]` both: the norm against its mean and spread for independent columns."""
    total = variance.sum(-1)
    # The norm's relative spread is 1 / (2 n) ** 0.5, n the number of columns that count.
    columns = total.square() / variance.square().sum(-1).clamp_min(1e-300)
    limit = RMS * unit * total.sqrt() * (1 + DEVIATIONS / (2 * columns.clamp_min(1)).sqrt())
    size = torch.linalg.vector_norm(error, dim=-1)
    ratio: Tensor = (size / limit).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(size == 0, 0.0)
    return ratio


def _sum_of_dv(x: _Grouped) -> tuple[Tensor, Tensor]:
    """Sum of dv = sum of do. For independent do, the squares of dv are those of the terms P do whose P was rounded."""
    error = x.dv.sum(1) - (x.do * x.sees[..., None]).sum(1)
    return error, x.roundings * x.dv.square().sum(1)


def _sum_of_dk(x: _Grouped) -> tuple[Tensor, Tensor]:
    """Sum of dk = 0. Besides dS and dk, out was rounded: its error in D reaches the sum by every key."""
    delta2 = (x.do * x.out).square().sum(-1, keepdim=True)
    return x.dk.sum(1), (x.roundings - 1 + DS_ROUNDINGS) * x.dk.square().sum(1) + (delta2 * (x.q * x.scale).square()).sum(1)


def _out_and_dv(x: _Grouped) -> tuple[Tensor, Tensor]:
    """<do, out> = <v, dv>. P is rounded in both."""
    error = (x.do * x.out).sum((1, 2)) - (x.v * x.dv).sum((1, 2))
    terms = 2 * _terms(x.dv, x.v)
    return error[:, None], ((x.do * x.out).square().sum((1, 2)) + (x.roundings - 1) * (x.v * x.dv).square().sum((1, 2)) + terms)[:, None]


def _dq_and_dk(x: _Grouped) -> tuple[Tensor, Tensor]:
    """<q, dq> = <k, dk>. dS is rounded in both."""
    error = (x.q * x.dq).sum((1, 2)) - (x.k * x.dk).sum((1, 2))
    terms = 2 * DS_ROUNDINGS * _terms(x.dk, x.k)
    return error[:, None], ((x.q * x.dq).square().sum((1, 2)) + (x.roundings - 2 + DS_ROUNDINGS) * (x.k * x.dk).square().sum((1, 2)) + terms)[:, None]


def _terms(sums: Tensor, other: Tensor) -> Tensor:
    """Squares of the terms of <sums, other> before summation: independent directions, and the direction that `other`'s rows share."""
    rms2 = other.square().sum(-1).mean(1).clamp_min(1e-300)
    shared = other.mean(1).square().sum(-1) / rms2
    squares = (sums.square().sum(-1) * other.square().sum(-1)).sum(1)
    return squares * (1 / other.shape[-1] + shared).clamp(max=1)


IDENTITIES: dict[str, Callable[[_Grouped], tuple[Tensor, Tensor]]] = {
    "sum of dv = sum of do": _sum_of_dv,
    "sum of dk = 0": _sum_of_dk,
    "<do, out> = <v, dv>": _out_and_dv,
    "<q, dq> = <k, dk>": _dq_and_dk,
}
