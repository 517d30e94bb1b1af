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
from pytest_longca.limits import DS_ROUNDINGS, RMS, blocks_in_dtype, rounding_of, truncation

DEVIATIONS = 6.0
"""How many standard deviations the norm of a sum's error may be above its mean."""
ACROSS = 1 / 16
"""The part of what sums may lose that may lie across their partial sums, where a kernel goes through the queries of some keys otherwise."""


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
    """One key/value head: its queries side by side `[group * seqlen_q, head_dim]`, its keys `[seqlen_kv, head_dim]`."""

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
    group: int
    roundings: float
    truncation: float
    """What sums over all these queries lose of their partial sums, at most."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """What is left of a sum that should vanish, `[columns]`: its variance by rounding, and what sums cut off towards 0 may leave of it.

    `partial` `[columns, directions]` are the partial sums of which a share of `truncation` may be lost.
    """

    error: Tensor
    variance: Tensor
    partial: Tensor | None = None


def check_identities(case: Case, inputs: Inputs, result: Result) -> list[Identity]:
    """Each identity for all heads. Needs out and all gradients; memory is a few fp32 copies of one key/value head's operands at a time."""
    worst: dict[str, Identity] = {}
    unit = rounding_of(case).unit
    sees = rows_that_see(case, inputs.q.device)
    for batch in range(case.batch):
        for head in range(case.heads_kv):
            grouped = _group(case, inputs, result, sees, batch, head)
            for name, identity in IDENTITIES.items():
                ratio = _over_limit(identity(grouped), unit, grouped.truncation)
                if name not in worst or ratio > worst[name].error_over_limit:
                    worst[name] = Identity(name, ratio, batch, head)
    return list(worst.values())


def rows_that_see(case: Case, device: torch.device) -> Tensor:
    """Whether each query sees a key: bool `[batch or 1, heads or 1, seqlen_q]`."""
    rows = case.mask.row_intervals(device)
    if rows is not None:
        return (rows[..., 1] > rows[..., 0]).any(-1)
    tiles = 1
    found = case.mask.tiles(device, tiles, max(case.seqlen_kv, 1))
    return (found.partial | found.full).any(-1)


def _group(case: Case, inputs: Inputs, result: Result, sees: Tensor, batch: int, head: int) -> _Grouped:
    # Products of two bf16 or fp16 numbers are exact in fp32; their sums are kept in fp64.
    work = torch.float32 if case.dtype in ("bf16", "fp16") else torch.float64
    group = slice(head * case.group, (head + 1) * case.group)

    def queries(x: Tensor) -> Tensor:
        return x[batch, :, group].to(work).transpose(0, 1).flatten(0, 1)

    def keys(x: Tensor) -> Tensor:
        return x[batch, :, head].to(work)

    given = (result.out, result.dq, result.dk, result.dv)
    assert all(x is not None for x in given), "identities need out and all gradients"
    seen = sees[batch if sees.shape[0] > 1 else 0].expand(case.heads_q, case.seqlen_q)[group].flatten()
    return _Grouped(
        *(queries(inputs.q), keys(inputs.k), keys(inputs.v), queries(inputs.do)),
        *(queries(result.out), queries(result.dq), keys(result.dk), keys(result.dv)),  # type: ignore[arg-type]  # asserted above
        sees=seen,
        scale=case.scale,
        group=case.group,
        truncation=truncation(2 * case.group * case.seqlen_q, rounding_of(case)),  # twice: of what has been added up so far
        # P, the result, each query head's part of it, and sums that are kept in the dtype
        roundings=2 + (case.group > 1) + ((blocks_in_dtype(case, "dk") - 1) / 2 if result.sums_in_dtype else 0),
    )


def _over_limit(x: _Sum, unit: float, truncation: float) -> float:
    """Error over limit. What sums lose towards 0 lies along their partial sums: across these the limit is little more than rounding's."""
    limit = _limit(x.variance, unit)
    if x.partial is None or not truncation:
        return _ratio(x.error, limit)
    basis = torch.linalg.qr(x.partial).Q
    along = basis @ (basis.T @ x.error)
    lost = truncation * float(torch.linalg.vector_norm(x.partial))
    across = _ratio(x.error - along, limit + ACROSS * lost) if basis.shape[0] > basis.shape[1] else 0.0
    return max(_ratio(along, limit + lost), across)


def _limit(variance: Tensor, unit: float) -> float:
    """The norm's mean and spread for independent columns."""
    total = variance.sum(-1)
    # The norm's relative spread is 1 / (2 n) ** 0.5, n the number of columns that count.
    columns = total.square() / variance.square().sum(-1).clamp_min(1e-300)
    return float(RMS * unit * total.sqrt() * (1 + DEVIATIONS / (2 * columns.clamp_min(1)).sqrt()))


def _ratio(error: Tensor, limit: float) -> float:
    size = float(torch.linalg.vector_norm(error))
    if size == 0:
        return 0.0
    return size / limit if limit > 0 and math.isfinite(size) else math.inf


def _sum(x: Tensor, dim: int | None = None) -> Tensor:
    """A sum kept in fp64."""
    return x.sum(dtype=torch.float64) if dim is None else x.sum(dim, dtype=torch.float64)


def _sum_of_dv(x: _Grouped) -> _Sum:
    """Sum of dv = sum of do. For independent do, the squares of dv are those of the terms P do whose P was rounded.

    After some queries, the keys' partial sums add up to the sum of do so far: on average do by the part of the queries that come after it,
    or before it, as the kernel goes through them.
    """
    do = x.do * x.sees[..., None]
    heads = do.unflatten(0, (x.group, -1))
    before = torch.linspace(0, 1, heads.shape[1], dtype=torch.float64, device=do.device)
    parts = torch.stack((before, 1 - before))
    partial = torch.cat([parts @ head.double() for head in heads]).T
    return _Sum(_sum(x.dv, 0) - _sum(do, 0), x.roundings * _sum(x.dv.square(), 0), partial)


def _sum_of_dk(x: _Grouped) -> _Sum:
    """Sum of dk = 0, and of partial sums too. Besides dS and dk, out was rounded: its error in D reaches the sum by every key."""
    delta2 = (x.do * x.out).square().sum(-1, keepdim=True)
    of_delta = _sum(delta2 * (x.q * x.scale).square(), 0)
    return _Sum(_sum(x.dk, 0), (x.roundings - 1 + DS_ROUNDINGS) * _sum(x.dk.square(), 0) + of_delta)


def _out_and_dv(x: _Grouped) -> _Sum:
    """<do, out> = <v, dv>. P is rounded in both."""
    of_out, of_dv = x.do * x.out, x.v * x.dv
    variance = _sum(of_out.square()) + (x.roundings - 1) * _sum(of_dv.square()) + 2 * _terms(x.dv, x.v)
    return _Sum((_sum(of_out) - _sum(of_dv))[None], variance[None], _sum(of_dv)[None, None])


def _dq_and_dk(x: _Grouped) -> _Sum:
    """<q, dq> = <k, dk>. dS is rounded in both."""
    of_dq, of_dk = x.q * x.dq, x.k * x.dk
    variance = _sum(of_dq.square()) + (x.roundings - 2 + DS_ROUNDINGS) * _sum(of_dk.square()) + 2 * DS_ROUNDINGS * _terms(x.dk, x.k)
    return _Sum((_sum(of_dq) - _sum(of_dk))[None], variance[None], _sum(of_dk)[None, None])


def _terms(sums: Tensor, other: Tensor) -> Tensor:
    """Squares of the terms of <sums, other> before summation: independent directions, and the direction that `other`'s rows share."""
    other2 = other.square().sum(-1)
    shared = other.mean(0).square().sum() / other2.mean().clamp_min(1e-30)
    return _sum(sums.square().sum(-1) * other2) * (1 / other.shape[-1] + shared).clamp(max=1)


IDENTITIES: dict[str, Callable[[_Grouped], _Sum]] = {
    "sum of dv = sum of do": _sum_of_dv,
    "sum of dk = 0": _sum_of_dk,
    "<do, out> = <v, dv>": _out_and_dv,
    "<q, dq> = <k, dk>": _dq_and_dk,
}
