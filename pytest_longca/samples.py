"""Samples: what is judged of a case that is too long to be judged in full.

Some key/value heads in full; in every head one random query of each 128-row tile (out, lse, dq) and two random keys of each key tile
(dk, dv), and those at edges. A wrong tile is wrong in each of its rows, and in nearly all of its keys.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.backward import Backward
from pytest_longca.case import Case, Direction
from pytest_longca.forward import Forward
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result, Verdict, judge
from pytest_longca.limits import Bound, rounding_of
from pytest_longca.operands import Operands
from pytest_longca.picked import PickedHeads, PickedKeys, PickedQueries
from pytest_longca.reference import Reference, choose_arithmetic, compute, kept

TILE = 128
BUDGET_PAIRS = 5 * 2**38
"""Visible pairs that are worth a full reference: causal 128K tokens of 64 heads are 2^39, and of 512K tokens 8 heads are 2^40."""
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
    heads = (0,) if case.area / case.heads_kv <= budget else ()
    generator = torch.Generator().manual_seed(case.seed)
    queries = _positions(case.seqlen_q, case.heads_q * max(case.head_dim, case.head_dim_v), 1, _query_edges(case), generator)
    keys = _positions(case.seqlen_kv, case.heads_kv * max(case.head_dim, case.head_dim_v), 2, _key_edges(case), generator)
    return Choice(False, heads, queries, keys)


def _positions(length: int, row_elements: int, of_tile: int, edges: Iterable[int], generator: torch.Generator) -> Tensor:
    """`of_tile` random positions of each tile, first and last, the mask's edges, and where offsets pass 2^31 and 2^32 elements."""
    starts = torch.arange(0, length, TILE).repeat(of_tile)
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
    reference = kept((case, str(at.device), "queries"), lambda: compute(part, some))
    return judge(part, some, reference, rows, numbering=queries)


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
    part = dataclasses.replace(case, direction=Direction.FWD)
    forward = kept((part, str(inputs.q.device)), lambda: compute(part, inputs))
    return forward.out, forward.lse


def reference_of_keys(part: Case, inputs: Inputs, out: Tensor, lse: Tensor) -> Reference:
    """The reference of dk and dv for keys whose queries' out and lse are known, one key/value head after the other (memory)."""
    heads = [_reference_of_head(part, inputs, out, lse, head_kv) for head_kv in range(part.heads_kv)]

    def together(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors), 2)

    bounds = {name: Bound(*map(together, zip(*(head.bounds[name].tensors() for head in heads), strict=True))) for name in ("dk", "dv")}
    dk, dv = (together(getattr(head, name) for head in heads) for name in ("dk", "dv"))
    return Reference(out, lse, dk=dk, dv=dv, bounds=bounds)


def _head_of(case: Case, inputs: Inputs, head_kv: int) -> tuple[Case, Inputs, slice]:
    """A key/value head and its group of query heads as a case, its operands, and the slice of those query heads."""
    group = slice(head_kv * case.group, (head_kv + 1) * case.group)
    own = slice(head_kv, head_kv + 1)
    mask = case.mask if case.mask.heads == 1 else PickedHeads(case.mask, group.start, case.group)
    part = dataclasses.replace(case, mask=mask, heads_q=case.group, heads_kv=1)
    return part, Inputs(inputs.q[:, :, group], inputs.k[:, :, own], inputs.v[:, :, own], inputs.do[:, :, group]), group


@torch.no_grad()
def _reference_of_head(case: Case, inputs: Inputs, out: Tensor, lse: Tensor, head_kv: int) -> Reference:
    part, inputs, group = _head_of(case, inputs, head_kv)
    out, lse = out[:, :, group], lse[:, group]
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
    del found["dq"]  # of these keys alone: no truth
    tensors = {name: value for name, (value, _) in found.items()}
    return Reference(out, lse, **tensors, bounds={name: bound for name, (_, bound) in found.items()})


def judge_head(case: Case, inputs: Inputs, result: Result, head_kv: int) -> list[Verdict]:
    """Everything of a key/value head `head_kv` and its query heads."""
    part, some, group = _head_of(case, inputs, head_kv)
    own = slice(head_kv, head_kv + 1)
    heads = {"out": group, "dq": group, "dk": own, "dv": own}
    parts = {name: None if (x := getattr(result, name)) is None else x[:, :, at] for name, at in heads.items()}
    lse = None if result.lse is None else result.lse[:, group]
    reference = kept((case, str(inputs.q.device), f"head {head_kv}"), lambda: compute(part, some))
    found = judge(part, some, reference, Result(lse=lse, **parts, sums_in_dtype=result.sums_in_dtype))
    return [_in_head(verdict, head_kv, case.group) for verdict in found]


def _in_head(verdict: Verdict, head_kv: int, group: int) -> Verdict:
    """A verdict on one key/value head, with the heads' numbers in the whole."""
    place = verdict.place
    if place is None or not head_kv:
        return verdict
    first = head_kv * (1 if verdict.tensor in ("dk", "dv") else group)
    moved = dataclasses.replace(place, head=place.head + first, heads=tuple(head + first for head in place.heads))
    return dataclasses.replace(verdict, place=moved, message=verdict.message.replace(str(place), str(moved)))
