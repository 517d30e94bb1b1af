"""Judge: a kernel's tensors against the reference, row by row, and what is wrong in words."""

import math
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
    along_limit,
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
    verdicts: list[Verdict] = []
    evidence: dict[str, Evidence] = {}
    for name in ("out", "lse", "dq", "dk", "dv"):
        value, truth = getattr(result, name), getattr(reference, name)
        if value is None or truth is None:
            continue
        verdict, found = _judge_tensor(
            case, name, value, truth, reference, _Circumstances(result.sums_in_dtype, *_copies(case, inputs, name, reference.lse))
        )
        if numbering is not None:
            verdict, found = _renumbered(verdict, numbering), None
        verdicts.append(verdict)
        if found:
            evidence[name] = found
    explained = [] if numbering is not None else _right_at_usual_scale(verdicts, case, inputs, result)
    told = [verdict if verdict.tensor in explained else _with_causes(verdict, evidence, verdicts) for verdict in verdicts]
    text = f"looks like scale 1/sqrt(head_dim), not {case.scale:.4g}"  # said once, and no other guess beside it
    return [replace(verdict, message=f"{verdict.message}; {text}") if verdict.tensor in explained[:1] else verdict for verdict in told]


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


def _judge_tensor(
    case: Case, name: str, value: Tensor, truth: Tensor, reference: Reference, circumstances: "_Circumstances"
) -> tuple[Verdict, Evidence | None]:
    malformed = _malformed(case, name, value)
    if malformed:
        return Verdict(name, math.inf, False, malformed), None
    x = value.detach().to(truth.device, truth.dtype)
    bound = reference.bounds[name]
    if circumstances.sums_in_dtype and name in GRADIENTS:
        lost = truth.shape[-1] ** 0.5 * rounding_of(case).smallest
        dim, at_most = truth.shape[-1] // circumstances.columns, deviations(truth[..., 0].numel())
        bound = bound.with_sums_in_dtype(blocks_in_dtype(case, name), dim, at_most, lost, torch.linalg.vector_norm(truth, dim=-1))
    if name == "lse":
        sizes = _lse_errors(x, truth)
        limits = row_limit(bound, SCORE_UNIT[case.dtype])
        rows = _over(sizes, limits)
        stats = {"rows": _largest(rows)}
    else:
        sizes, limits, rows, stats = _row_errors(case, name, x, truth, bound, reference, circumstances)
    worst = max(stats.values())
    if worst <= 1:
        return Verdict(name, worst, True, stats=stats), None
    return _wrong(case, name, x, truth, rows, sizes, limits, worst, stats)


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """How errors of rows hang together: `batches`, `heads` and `columns` are how many err alike."""

    sums_in_dtype: bool
    batches: int
    heads: int
    columns: int


def _copies(case: Case, inputs: Inputs, name: str, lse: Tensor) -> tuple[int, int, int]:
    """How many batch elements, heads and columns of a result err alike, because their operands share their memory.

    One q, one k and one set of visible keys make one P: what its roundings add to a row, as a part of it, is the same whatever v and do.
    """
    columns = case.head_dim_v if name == "dv" and shares_memory(inputs.do, COLUMNS) else 1
    batches = case.batch if case.mask.batch == 1 and all(shares_memory(x, BATCH) for x in (inputs.q, inputs.k)) else 1
    if not shares_memory(inputs.q, HEADS):
        return batches, 1, columns
    one_k = shares_memory(inputs.k, HEADS)
    alike = _most_alike(case, lse if one_k else lse.unflatten(1, (case.heads_kv, -1)).transpose(1, 2))
    if name in ("out", "dq"):
        return batches, alike, columns
    return batches, min(alike, case.heads_kv) if one_k else 1, columns


def _most_alike(case: Case, lse: Tensor) -> int:
    """How many heads, which have the same scores, have one P in a row, at most; `lse` `[batch, heads, ...]`."""
    if not lse.numel():
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


def _row_errors(
    case: Case, name: str, x: Tensor, truth: Tensor, bound: Bound, reference: Reference, copies: _Circumstances
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Row errors, their limits, error over limit of each row `[batch, seqlen, heads]`, and of each head's and the tensor's gain."""
    rounding = rounding_of(case)
    error = x - truth
    overflow = (truth.abs() > rounding.largest) & (x.sign() == truth.sign()) & x.isinf()
    error = error.masked_fill_(overflow, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf)
    size = torch.linalg.vector_norm(error, dim=-1)
    limit = row_limit(bound, rounding.unit)
    if name in ("out", "dq"):  # a row that sees no key is exactly 0
        limit = limit.masked_fill((reference.lse == -math.inf).transpose(1, 2), 0.0)
    along = (error * truth).sum(-1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # <error, ref>
    norm = torch.linalg.vector_norm(truth, dim=-1)
    along = along.masked_fill(norm < SMALLEST_NORM[truth.dtype], 0.0)  # a row whose square underflows has no direction
    at_most = deviations(size.numel())
    along_allowed = along_limit(bound, rounding.unit, at_most) * norm
    over = torch.maximum(_over(size, limit), _over(along.abs(), along_allowed))
    tiles = _over(_tile_errors(size, bound, rounding.unit), torch.tensor(TILE if copies.columns == 1 else math.inf, device=size.device))
    shared, joint = bound.shared * norm, at_most * rounding.unit * bound.joint * norm
    own2 = ((along_allowed - shared).square() - joint.square()).clamp_min(0.0)
    stats = {
        "rows": _largest(over),
        "tiles": _largest(tiles),
        "head_gain": _largest(_over(along.sum((0, 1)).abs(), _pooled(own2, joint, shared, (0, 1), copies.batches))),
        "gain": _largest(_over(along.sum().abs(), _pooled(own2, joint, shared, (0, 1, 2), copies.batches * copies.heads))),
    }
    if stats["rows"] <= 1 < stats["tiles"]:  # no row alone is wrong: every row of such a tile is
        whole = tiles.shape[1] * TILE_ROWS
        over[:, :whole] = tiles.repeat_interleave(TILE_ROWS, 1)
    return size, limit, over, stats


def _over(error: Tensor, limit: Tensor) -> Tensor:
    """Error over limit; 0 where there is no error, infinite where there is no limit to hold it against."""
    return (error / limit).masked_fill_(error == 0, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def _tile_errors(size: Tensor, bound: Bound, unit: float) -> Tensor:
    """Root mean square of error over spread of each whole tile of rows: `[batch, tiles, heads]`."""
    whole = size.shape[1] - size.shape[1] % TILE_ROWS
    unlikely = (size - bound.flush).clamp_min(0) / (unit * bound.tile)
    tiles = unlikely[:, :whole].nan_to_num(nan=0.0, posinf=math.inf).unflatten(1, (-1, TILE_ROWS)) if whole else unlikely[:, :0, None]
    return tiles.square().mean(2).sqrt()


def _largest(ratios: Tensor) -> float:
    return float(ratios.max()) if ratios.numel() else 0.0


def _pooled(own2: Tensor, joint: Tensor, shared: Tensor, dims: tuple[int, ...], copies: int) -> Tensor:
    """The limit of a sum of errors along their rows: independent parts as squares, copies of a row and what rows share as they are."""
    return (copies * own2.sum(dims) + joint.sum(dims).square()).sqrt() + shared.sum(dims)


def _lse_errors(x: Tensor, truth: Tensor) -> Tensor:
    """Errors of lse `[batch, heads, seqlen]`, 0 where both are -inf."""
    return torch.where(x == truth, 0.0, (x - truth).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def _wrong(
    case: Case, name: str, x: Tensor, truth: Tensor, rows: Tensor, sizes: Tensor, limits: Tensor, worst: float, stats: dict[str, float]
) -> tuple[Verdict, Evidence]:
    """The verdict on a tensor that is beyond its limit, and what there is to be read from it."""
    if name == "lse":  # as rows of one column, `[batch, seqlen, heads]`
        rows, sizes, limits, x, truth = (item.transpose(1, 2) for item in (rows, sizes, limits, x, truth))
        x, truth = x[..., None], truth[..., None]
    bad = rows > 1
    evidence = Evidence(case, name, x, truth, bad)
    if not bool(bad.any()):
        return Verdict(name, worst, False, _gain_message(x, truth, stats), None, stats), evidence
    at = torch.unravel_index(rows.argmax(), rows.shape)
    batch, row, head = (int(index) for index in at)
    place = _place(bad, x, truth, batch, row, head)
    return Verdict(name, worst, False, _message(place, x, rows, sizes, limits, worst), place, stats), evidence


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
