"""Samples: what is judged of a case that is too long to be judged in full.

Some key/value heads in full; in every head one random query of each 128-row tile (out, lse, dq) and one random key of each key tile
(dk, dv), and those at edges. A wrong tile is wrong in each of its rows, so one row of it is enough.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.backward import Backward
from pytest_longca.case import Case
from pytest_longca.forward import Forward
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result, Verdict, judge
from pytest_longca.limits import rounding_of
from pytest_longca.operands import Operands
from pytest_longca.picked import PickedKeys, PickedQueries
from pytest_longca.reference import Reference, choose_arithmetic, compute

TILE = 128
BUDGET_PAIRS = 2**40
"""Visible pairs that are worth a full reference: causal 128K tokens of 64 heads are 2^39."""
MASK_EDGES = 32
"""How many of the places where a mask's rows change (documents, windows, prefixes) are sampled, with their neighbours."""
WIDE_OFFSETS = (2**31, 2**32)
"""Element offsets where narrow index arithmetic wraps."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to judge: everything if `is_full`, else the key/value heads `heads_kv` in full and `queries` and `keys` of every head."""

    is_full: bool
    heads_kv: tuple[int, ...]
    queries: Tensor
    keys: Tensor


def choose(case: Case, budget: float = BUDGET_PAIRS) -> Choice:
    """Full where the case has at most `budget` visible pairs; else samples drawn from its seed, and the first head if that fits."""
    none = torch.zeros(0, dtype=torch.int64)
    if case.area <= budget:
        return Choice(True, (), none, none)
    is_shared = case.mask.heads == 1 and case.mask.batch == 1
    heads = (0,) if is_shared and case.area / (case.batch * case.heads_kv) <= budget else ()
    generator = torch.Generator().manual_seed(case.seed)
    queries = _positions(case.seqlen_q, case.heads_q * max(case.head_dim, case.head_dim_v), _query_edges(case), generator)
    keys = _positions(case.seqlen_kv, case.heads_kv * max(case.head_dim, case.head_dim_v), _key_edges(case), generator)
    return Choice(False, heads, queries, keys)


def _positions(length: int, row_elements: int, edges: Iterable[int], generator: torch.Generator) -> Tensor:
    """One random position of each tile, first and last, the mask's edges, and where offsets pass 2^31 and 2^32 elements."""
    starts = torch.arange(0, length, TILE)
    drawn = starts + (torch.rand(len(starts), generator=generator) * (length - starts).clamp(max=TILE)).long()
    wide = [offset // row_elements + step for offset in WIDE_OFFSETS for step in (-1, 0, 1)]
    chosen = [0, TILE - 1, TILE, length - length % TILE, length - 1, *wide, *edges]
    extra = torch.tensor([at for at in chosen if 0 <= at < length], dtype=torch.int64)
    positions: Tensor = torch.cat([drawn, extra]).unique()
    return positions


def _query_edges(case: Case) -> list[int]:
    """Some queries where the run of visible keys starts anew, and the queries before them."""
    rows = case.mask.row_intervals()
    if rows is None:
        return []
    start = rows[0, 0, :, 0, 0]
    return _some((start[1:] != start[:-1]).nonzero()[:, 0] + 1)


def _key_edges(case: Case) -> list[int]:
    """Some keys where a query's first run starts or ends, and the keys before them."""
    rows = case.mask.row_intervals()
    return [] if rows is None else _some(rows[0, 0, :, 0].flatten().unique())


def _some(edges: Tensor) -> list[int]:
    """At most MASK_EDGES of them, evenly, each with the position before it."""
    step = max(1, len(edges) // MASK_EDGES)
    return [at for edge in edges[::step].tolist() for at in (edge - 1, edge)]


def judge_samples(case: Case, inputs: Inputs, result: Result, choice: Choice) -> list[Verdict]:
    """The worst verdict on each tensor, over heads in full, sampled queries and sampled keys. dk and dv need the result's out and lse."""
    found = judge_queries(case, inputs, result, choice.queries)
    if result.dk is not None:
        found += judge_keys(case, inputs, result, choice.keys)
    for head_kv in choice.heads_kv:
        found += judge_head(case, inputs, result, head_kv)
    worst: dict[str, Verdict] = {}
    for verdict in found:
        if verdict.tensor not in worst or verdict.error_over_limit > worst[verdict.tensor].error_over_limit:
            worst[verdict.tensor] = verdict
    return list(worst.values())


def judge_queries(case: Case, inputs: Inputs, result: Result, queries: Tensor) -> list[Verdict]:
    """Out, lse and dq of some queries of every head."""
    part = dataclasses.replace(case, mask=PickedQueries(case.mask, queries))
    at = queries.to(inputs.q.device)
    some = Inputs(inputs.q[:, at], inputs.k, inputs.v, inputs.do[:, at])
    rows = Result(
        None if result.out is None else result.out[:, at],
        None if result.lse is None else result.lse[:, :, at],
        None if result.dq is None else result.dq[:, at],
        sums_in_dtype=result.sums_in_dtype,
    )
    return judge(part, some, compute(part, some), rows, numbering=queries)


def judge_keys(case: Case, inputs: Inputs, result: Result, keys: Tensor) -> list[Verdict]:
    """dk and dv of some keys of every head."""
    part = dataclasses.replace(case, mask=PickedKeys(case.mask, keys))
    at = keys.to(inputs.k.device)
    some = Inputs(inputs.q, inputs.k[:, at], inputs.v[:, at], inputs.do)
    dk, dv = (None if x is None else x[:, at] for x in (result.dk, result.dv))
    rows = Result(dk=dk, dv=dv, sums_in_dtype=result.sums_in_dtype)
    out, lse = row_statistics(case, inputs, result)
    return judge(part, some, reference_of_keys(part, some, out, lse), rows, numbering=keys)


def row_statistics(case: Case, inputs: Inputs, result: Result) -> tuple[Tensor, Tensor]:
    """Out and lse of all rows: the kernel's own, which `judge_queries` judges, or from a forward where it gives no lse."""
    if result.out is not None and result.lse is not None:
        return result.out, result.lse
    forward = compute(dataclasses.replace(case, direction=type(case.direction).FWD), inputs)
    return forward.out, forward.lse


@torch.no_grad()
def reference_of_keys(part: Case, inputs: Inputs, out: Tensor, lse: Tensor) -> Reference:
    """The reference of dk and dv for keys whose queries' out and lse are known; its dq is of these keys alone, and no truth."""
    ops = Operands(part, inputs, choose_arithmetic(part, inputs), rounding_of(part))
    forward = Forward(ops)
    shape = forward.highest.shape
    forward.out = out.transpose(1, 2).reshape(*shape, -1).to(forward.out.dtype)
    finite = lse.to(forward.highest.dtype).masked_fill(lse.isinf(), 0.0)
    forward.highest, forward.total = finite.reshape(shape) / ops.scale, torch.ones_like(forward.total)
    backward = Backward(ops, forward)
    for tile in ops.tiles():
        backward.visit(tile, None)
    found = backward.finish()
    tensors = {name: value for name, (value, _) in found.items()}
    return Reference(out, lse, **tensors, bounds={name: bound for name, (_, bound) in found.items()})


def judge_head(case: Case, inputs: Inputs, result: Result, head_kv: int) -> list[Verdict]:
    """Everything of the first batch's key/value head `head_kv` and its query heads. Only for masks that all heads share."""
    part = dataclasses.replace(case, batch=1, heads_q=case.group, heads_kv=1)
    group = slice(head_kv * case.group, (head_kv + 1) * case.group)
    own = slice(head_kv, head_kv + 1)
    some = Inputs(inputs.q[:1, :, group], inputs.k[:1, :, own], inputs.v[:1, :, own], inputs.do[:1, :, group])
    slices = {"out": (group, 2), "lse": (group, 1), "dq": (group, 2), "dk": (own, 2), "dv": (own, 2)}
    tensors = {name: getattr(result, name) for name in slices}
    parts = {
        name: None if x is None else x[:1].narrow(slices[name][1], slices[name][0].start, slices[name][0].stop - slices[name][0].start)
        for name, x in tensors.items()
    }
    return judge(part, some, compute(part, some), Result(**parts, sums_in_dtype=result.sums_in_dtype))
