"""Judge: a kernel's tensors against the reference, row by row, and what is wrong in words."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import BATCH, COLUMNS, HEADS, TORCH_DTYPES, Inputs, shapes, shares_memory
from pytest_longca.limits import (
    SCORE_UNIT,
    TILE,
    TILE_ROWS,
    Bound,
    Rounding,
    blocks_in_dtype,
    deviations,
    have_one_p,
    rounding_of,
    row_limit,
)
from pytest_longca.reference import Reference, compute
from pytest_longca.signatures import Evidence, causes, causes_across

OPERAND_OF = {"out": "do", "dq": "q", "dk": "k", "dv": "v"}
"""Each result has the shape of an operand."""
TENSORS = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")
SMALLEST_NORM = {torch.float64: 1e-140, torch.float32: 1e-17}
"""Norms whose squares and products are exact enough."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a kernel gave: out, dq, dk, dv as their operands, lse `[batch, heads_q, seqlen_q]`; None is not judged.

    `sums_in_dtype` says that the kernel adds its gradients up in their own dtype, block by block, as torch's CPU attention does.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    sums_in_dtype: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The worst row: its batch, head and row (a query, or a key of dk and dv), its worst column, and the extent of all bad rows.

    `head` is a query head of out, lse and dq, a key/value head of dk and dv.
    """

    batch: int
    head: int
    row: int
    column: int | None
    rows: tuple[int, int]
    num_rows: int
    heads: tuple[int, ...]
    tiles_128: tuple[int, ...]

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        tiles = f"(16-row tile {self.row // 16}, 128-row tile {self.row // 128})"
        return f"batch {self.batch}, head {self.head}, row {self.row}{column} {tiles}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement on one tensor: ok where `error_over_limit` is at most 1."""

    tensor: str
    error_over_limit: float
    ok: bool
    message: str = ""
    place: Place | None = None
    stats: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON values (infinities stay floats)."""
        return asdict(self)


def judge(case: Case, inputs: Inputs, reference: Reference, result: Result, numbering: Tensor | None = None) -> list[Verdict]:
    """One verdict for each tensor that the kernel gave and the reference has.

    `numbering` are the numbers of the rows in the whole case, where this case is a sample of it.
    """
    found = _found(case, inputs, reference, result)
    evidence: dict[str, Evidence] = {}
    told = _on_host([one for one in found.values() if isinstance(one, _Measured)])
    verdicts = [one if isinstance(one, Verdict) else _verdict(case, name, one, next(told), evidence) for name, one in found.items()]
    if numbering is not None:
        return [_renumbered(verdict, numbering) for verdict in verdicts]
    explained = _right_at_usual_scale(verdicts, case, inputs, result)
    verdicts = [verdict if verdict.tensor in explained else _with_causes(verdict, evidence, verdicts) for verdict in verdicts]
    text = f"looks like scale 1/sqrt(head_dim), not {case.scale:.4g}"  # said once, and no other guess beside it
    return [replace(verdict, message=f"{verdict.message}; {text}") if verdict.tensor in explained[:1] else verdict for verdict in verdicts]


@torch.inference_mode()  # its many small operations start faster in it
def _found(case: Case, inputs: Inputs, reference: Reference, result: Result) -> "dict[str, Verdict | _Measured]":
    """Each tensor that the kernel gave and the reference has, measured; malformed ones have their verdict."""
    found: dict[str, Verdict | _Measured] = {}
    copies = _copies(case, inputs, reference.lse)
    well_formed: dict[str, _Given] = {}
    for name in TENSORS:
        value, truth = getattr(result, name), getattr(reference, name)
        if value is None or truth is None:
            continue
        if malformed := _malformed(case, name, value):
            found[name] = Verdict(name, math.inf, False, malformed)
        elif name == "lse":
            found[name] = _measure_lse(case, value, truth, reference.bounds[name])
        else:
            bound = _with_sums(case, name, truth, reference.bounds[name], copies[name]) if result.sums_in_dtype else reference.bounds[name]
            well_formed[name] = _Given(value, truth, bound, copies[name])
    for names in _measured_at_once(well_formed):
        lse = reference.lse if names[0] in ("out", "dq") else None
        found |= _measure_rows(case, {name: well_formed[name] for name in names}, lse)
    return {name: found[name] for name in TENSORS if name in found}


def _right_at_usual_scale(verdicts: list[Verdict], case: Case, inputs: Inputs, result: Result) -> list[str]:
    """The wrong tensors that are right if the case's unusual scale was ignored."""
    usual = replace(case, scale=0.0)
    wrong = [verdict.tensor for verdict in verdicts if not verdict.ok]
    if usual.scale == case.scale or not wrong:
        return []
    right = {verdict.tensor for verdict in judge(usual, inputs, compute(usual, inputs), result) if verdict.ok}
    return [tensor for tensor in wrong if tensor in right]


def _with_causes(verdict: Verdict, evidence: dict[str, Evidence], verdicts: list[Verdict]) -> Verdict:
    """The verdict with what its error looks like."""
    if verdict.ok or verdict.tensor not in evidence:
        return verdict
    ok = {other.tensor: other.ok for other in verdicts}
    texts = [*causes(evidence[verdict.tensor]), *causes_across(verdict.tensor, ok)]
    message = "; ".join([verdict.message, *texts])
    return Verdict(verdict.tensor, verdict.error_over_limit, False, message, verdict.place, verdict.stats)


def _renumbered(verdict: Verdict, numbering: Tensor) -> Verdict:
    """A verdict on sampled rows, in the numbers of the whole; which signatures there are cannot be told from samples."""
    if verdict.ok or verdict.place is None:
        return verdict
    place = verdict.place
    row, first, last = (int(numbering[at]) for at in (place.row, *place.rows))
    moved = replace(place, row=row, rows=(first, last), tiles_128=(row // TILE_ROWS,))
    extent = f"{place.num_rows} sampled rows are beyond their limits, in rows {first} to {last}"
    message = f"{moved}: error over limit {verdict.error_over_limit:.3g}; {extent}"
    return replace(verdict, place=moved, message=message)


@dataclass(frozen=True, slots=True)
class _Copies:
    """How errors of rows hang together: how many `batches`, `heads` and `columns` err alike."""

    batches: int = 1
    heads: int = 1
    columns: int = 1


NO_COPIES = _Copies()


def _copies(case: Case, inputs: Inputs, lse: Tensor) -> dict[str, _Copies]:
    """How many batch elements, heads and columns of each result err alike, because their operands share their memory.

    One q, one k and one set of visible keys make one P: what its roundings add to a row, as a part of it, is the same whatever v and do.
    """
    batches = case.batch if case.mask.batch == 1 and all(shares_memory(x, BATCH) for x in (inputs.q, inputs.k)) else 1
    of_rows = of_keys = 1
    if shares_memory(inputs.q, HEADS):
        one_k = shares_memory(inputs.k, HEADS)
        of_rows = _most_alike(case, lse if one_k else lse.unflatten(1, (case.heads_kv, -1)).transpose(1, 2))
        of_keys = min(of_rows, case.heads_kv) if one_k else 1
    rows, keys = _Copies(batches, of_rows), _Copies(batches, of_keys)
    columns_dv = case.head_dim_v if shares_memory(inputs.do, COLUMNS) else 1
    return {"out": rows, "dq": rows, "dk": keys, "dv": replace(keys, columns=columns_dv)}


def _most_alike(case: Case, lse: Tensor) -> int:
    """How many heads, which have the same scores, have one P in a row, at most; `lse` `[batch, heads, ...]`."""
    if not lse.numel() or lse.shape[1] == 1:
        return 1
    rounding = rounding_of(case)
    return max(int(have_one_p(lse, lse[:, head, None], rounding).sum(1).max()) for head in range(lse.shape[1])) or 1


def _malformed(case: Case, name: str, value: Tensor) -> str | None:
    """What is wrong with a tensor's form, or None."""
    shape = (case.batch, case.heads_q, case.seqlen_q) if name == "lse" else shapes(case)[OPERAND_OF[name]]
    if tuple(value.shape) != shape:
        return f"shape {tuple(value.shape)}: it must be {shape}"
    dtypes = (torch.float32, torch.float64) if name == "lse" else (TORCH_DTYPES[case.dtype],)
    if value.dtype not in dtypes:
        return f"dtype {value.dtype}: it must be {' or '.join(map(str, dtypes))}"
    return None


@dataclass(frozen=True, slots=True)
class _Measured:
    """A result beside its truth: the size of each row's error, its limit, error over limit of rows and of whole tiles.

    Rows are `[batch, seqlen, heads]`, of lse `[batch, heads, seqlen]`; `stats` are what the verdict tells, single
    numbers that are still on their device.
    """

    value: Tensor
    truth: Tensor
    sizes: Tensor
    limits: Tensor
    rows: Tensor
    stats: dict[str, Tensor]
    tiles: Tensor | None = None


def _on_host(measured: Sequence[_Measured]) -> Iterator[dict[str, float]]:
    """The stats of each as numbers. One copy brings them all: each waits for the device."""
    everything = [number for one in measured for number in one.stats.values()]
    numbers = iter(torch.stack(everything).tolist() if everything else ())
    for one in measured:
        yield {name: next(numbers) for name in one.stats}


@dataclass(frozen=True, slots=True)
class _Given:
    """A well-formed out, dq, dk or dv, and what it is held against."""

    value: Tensor
    truth: Tensor
    bound: Bound
    copies: _Copies


ROWS_AT_ONCE = 2**20
"""Up to so many rows, tensors of as many are measured together: in long ones the copies would cost more than the starts of operations."""


def _measured_at_once(given: dict[str, _Given]) -> list[tuple[str, ...]]:
    """The names in groups that have the same rows: queries or keys."""
    groups = [tuple(name for name in names if name in given) for names in (("out", "dq"), ("dk", "dv"))]
    is_small = all(one.truth[..., 0].numel() <= ROWS_AT_ONCE for one in given.values())
    return [group for group in groups if group] if is_small else [(name,) for group in groups for name in group]


def _measure_lse(case: Case, value: Tensor, truth: Tensor, bound: Bound) -> _Measured:
    sizes, limits = _lse_errors(_as_truth(value, truth), truth), row_limit(bound, SCORE_UNIT[case.dtype])
    rows = _over(sizes, limits)
    return _Measured(value, truth, sizes, limits, rows, {"rows": _largest(rows)})


def _with_sums(case: Case, name: str, truth: Tensor, bound: Bound, copies: _Copies) -> Bound:
    """The bound of a kernel that adds its gradients up in their dtype."""
    if name not in GRADIENTS:
        return bound
    lost = truth.shape[-1] ** 0.5 * rounding_of(case).smallest
    dim, at_most = truth.shape[-1] // copies.columns, deviations(truth[..., 0].numel())
    return bound.with_sums_in_dtype(blocks_in_dtype(case, name), dim, at_most, lost, torch.linalg.vector_norm(truth, dim=-1))


def _as_truth(value: Tensor, truth: Tensor) -> Tensor:
    """A result where and in the dtype that the truth is."""
    return value.detach().to(truth.device, truth.dtype)


def _measure_rows(case: Case, given: dict[str, _Given], lse: Tensor | None) -> dict[str, _Measured]:
    """Tensors of the same rows: each row's error and the part of it along the row itself, and how these add up.

    What follows the sums over a row is `[tensors, batch, seqlen, heads]`. With `lse`, rows that see no key must be exactly 0.
    """
    rounding = rounding_of(case)
    size, norm, along = (torch.stack(of_each) for of_each in zip(*(_errors(one, rounding) for one in given.values()), strict=True))
    size.nan_to_num_(nan=math.inf, posinf=math.inf)
    along.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    along.masked_fill_(norm < SMALLEST_NORM[norm.dtype], 0.0)  # a row whose square underflows has no direction
    bounds = [one.bound for one in given.values()]
    limit = torch.stack([row_limit(bound, rounding.unit) for bound in bounds])
    if lse is not None:
        limit.masked_fill_((lse == -math.inf).transpose(1, 2), 0.0)
    of_along, of_shared, of_joint = (torch.stack(of_each) for of_each in zip(*((b.along, b.shared, b.joint) for b in bounds), strict=True))
    likely, shared = norm * (deviations(size[0].numel()) * rounding.unit), of_shared * norm
    own, joint = of_along * likely, of_joint * likely
    rows = torch.maximum(_over(size, limit), _over(along.abs(), own + shared))
    of_heads = torch.stack((along, (own.square() - joint.square()).clamp_min_(0.0), joint, shared)).sum((2, 3))  # [4, tensors, heads]
    copies = next(iter(given.values())).copies  # batches and heads are as many for all
    largest, largest_gain = _largest_of_each(rows), _largest_of_each(_gain(of_heads, copies.batches))
    gain = _gain(of_heads.sum(2), copies.batches * copies.heads)
    found = {}
    for (name, one), *measures in zip(given.items(), size, limit, rows, largest, largest_gain, gain, strict=True):
        own_size, own_limit, own_rows, *numbers = measures
        stats = dict(zip(("rows", "head_gain", "gain"), numbers, strict=True))
        tiles = _tile_errors(own_size, one.bound, rounding.unit) if size.shape[2] >= TILE_ROWS and one.copies.columns == 1 else None
        if tiles is not None:
            stats["tiles"] = _largest(tiles)
        found[name] = _Measured(one.value, one.truth, own_size, own_limit, own_rows, stats, tiles)
    return found


def _errors(given: _Given, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's error, the norm of its truth, and their product <error, truth>."""
    truth = given.truth
    x = _as_truth(given.value, truth)
    as_held = truth / (truth.abs() <= rounding.largest)  # infinite where the dtype holds nothing so large
    error = (x - truth).masked_fill_(x == as_held, 0.0)
    size, norm = torch.linalg.vector_norm(error, dim=-1), torch.linalg.vector_norm(truth, dim=-1)
    return size, norm, error.mul_(truth).sum(-1)


def _over(error: Tensor, limit: Tensor) -> Tensor:
    """Error over limit; 0 where there is no error, infinite where there is no limit to hold it against."""
    return (error / limit).masked_fill_(error == 0, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def _tile_errors(size: Tensor, bound: Bound, unit: float) -> Tensor:
    """Root mean square of error over spread of each whole tile of rows, over what it may be: `[batch, tiles, heads]`."""
    whole = size.shape[1] - size.shape[1] % TILE_ROWS
    size, flush, spread = (x[:, :whole].unflatten(1, (-1, TILE_ROWS)) for x in (size, bound.flush, bound.tile))
    return _over((size - flush).clamp_min_(0.0), unit * spread).square().mean(2).sqrt() / TILE


def _largest(ratios: Tensor) -> Tensor:
    return ratios.max() if ratios.numel() else ratios.new_zeros(())


def _largest_of_each(ratios: Tensor) -> Tensor:
    """The largest of each tensor's ratios `[tensors, ...]`."""
    return ratios.flatten(1).amax(1) if ratios.numel() else ratios.new_zeros(len(ratios))


def _gain(sums: Tensor, copies: int) -> Tensor:
    """Over limit, sums of errors along their rows: independent parts add up as squares, copies of a row and what rows share as they are."""
    along, own2, joint, shared = sums
    return _over(along.abs(), (copies * own2 + joint.square()).sqrt() + shared)


def _lse_errors(x: Tensor, truth: Tensor) -> Tensor:
    """Errors of lse `[batch, heads, seqlen]`, 0 where both are -inf."""
    return (x - truth).abs_().masked_fill_(x == truth, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def _verdict(case: Case, name: str, measured: _Measured, stats: dict[str, float], evidence: dict[str, Evidence]) -> Verdict:
    """The verdict on a tensor; what there is to be read from one that is beyond its limit goes to `evidence`."""
    worst = max(stats.values())
    if worst <= 1:
        return Verdict(name, worst, True, stats=stats)
    truth, sizes, limits, rows = measured.truth, measured.sizes, measured.limits, measured.rows
    x = _as_truth(measured.value, truth)
    if measured.tiles is not None and stats["rows"] <= 1 < stats["tiles"]:  # no row alone is wrong: every row of such a tile is
        of_tiles = measured.tiles.repeat_interleave(TILE_ROWS, 1)
        rows = torch.cat((of_tiles, rows[:, of_tiles.shape[1] :]), 1)
    if name == "lse":  # as rows of one column, `[batch, seqlen, heads]`
        rows, sizes, limits, x, truth = (item.transpose(1, 2) for item in (rows, sizes, limits, x, truth))
        x, truth = x[..., None], truth[..., None]
    bad = rows > 1
    evidence[name] = Evidence(case, name, x, truth, bad)
    if not bool(bad.any()):
        return Verdict(name, worst, False, _gain_message(x, truth, stats), None, stats)
    at = torch.unravel_index(rows.argmax(), rows.shape)
    batch, row, head = (int(index) for index in at)
    place = _place(bad, x, truth, batch, row, head)
    return Verdict(name, worst, False, _message(place, x, rows, sizes, limits, worst), place, stats)


def _gain_message(x: Tensor, truth: Tensor, stats: dict[str, float]) -> str:
    """Every row is good enough alone, but they all err to one side."""
    gains = (x * truth).sum((0, 1, 3)) / truth.square().sum((0, 1, 3))
    if stats["gain"] >= stats["head_gain"]:
        of, gain = "the tensor", float((x * truth).sum() / truth.square().sum())
    else:
        head = int((gains - 1).abs().nan_to_num().argmax())
        of, gain = f"head {head}", float(gains[head])
    over = f"{max(stats.values()):.3g} times what rounding explains"
    return f"every row is within its limit, but {of} as a whole is {gain:.5f} times what it should be, {over}"


def _place(bad: Tensor, x: Tensor, truth: Tensor, batch: int, row: int, head: int) -> Place:
    difference = (x[batch, row, head] - truth[batch, row, head]).abs().nan_to_num(nan=math.inf)
    bad_rows = bad.any(2).any(0).nonzero()[:, 0]
    tiles = (bad_rows // 128).unique()[:8].tolist()
    heads = bad.any(1).any(0).nonzero()[:, 0].tolist()
    column = int(difference.argmax()) if len(difference) > 1 else None
    return Place(batch, head, row, column, (int(bad_rows[0]), int(bad_rows[-1])), int(bad.sum()), tuple(heads), tuple(tiles))


def _message(place: Place, x: Tensor, rows: Tensor, sizes: Tensor, limits: Tensor, worst: float) -> str:
    at = (place.batch, place.row, place.head)
    if not bool(x[at].isfinite().all()):
        how = f"holds {_not_finite(x[at])}"
    elif float(limits[at]) == 0.0:
        how = f"is not 0 (norm {float(sizes[at]):.3g}), and it sees no key"
    elif float(sizes[at]) > float(limits[at]):
        how = f"error {float(sizes[at]):.3g} is {worst:.3g} times its limit {float(limits[at]):.3g}"
    else:
        how = f"error {float(sizes[at]):.3g}, along the row itself or over its 128-row tile {worst:.3g} times what rounding explains"
    first, last = place.rows
    return f"{place} {how}; {place.num_rows} of {rows.numel()} rows are beyond their limits, in rows {first} to {last}"


def _not_finite(row: Tensor) -> str:
    return "NaN" if bool(row.isnan().any()) else f"{float(row[row.isinf()][0])}"
