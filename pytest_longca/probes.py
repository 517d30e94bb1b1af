"""P1 and P2: which keys a kernel reads and which gradients it writes, from inputs whose exact answer needs no tolerance.

Both answer many rows in one call: copies of the case along the batch, each with its own one-hot.
"""

from dataclasses import dataclass, replace
from math import log
from random import Random
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import OPERANDS, Case, Direction, Layout
from pytest_longca.inputs import TORCH_DTYPES, Inputs, shapes
from pytest_longca.judge import Result
from pytest_longca.limits import rounding_of
from pytest_longca.patterns import describe_pairs
from pytest_longca.subject import TENSORS, Finding, Subject

LN_2 = log(2)
EXHAUSTIVE_SCORES = 2**20
"""Scores (copies * heads_q * seqlen_q * seqlen_kv) up to which one call of P2 asks about every row of every head."""
SAMPLED_SCORES = 2**16
"""Scores of one call of P2 where that is too much: a quarter of a MiB in fp32, some milliseconds on a CPU core."""
FEWEST_ROWS = 4
INTERPRETED_TILES = 16
"""Tiles of one call of P2 to a kernel in Triton's interpreter, where each takes milliseconds."""
LISTED_PAIRS = 1024
"""Wrong pairs of one head up to which a place names each; more would fill the picture anyway."""
TILE = 32


def count(subject: Subject) -> list[Finding]:
    """P1: with q = k = 0 every visible key weighs 1/n; V is one-hot in the key, so out shows each weight by itself.

    Masked keys must weigh exactly 0, and 1/weight must round to the number n of visible keys; lse is log n.
    V's one-hot is rotated by batch and key/value head, so that a swapped head or batch shows.
    """
    case = replace(subject.case, direction=Direction.FWD, layouts=(Layout.CONTIGUOUS,) * 4)
    device = subject.machine.device
    copies = -(-case.seqlen_kv // case.head_dim_v)
    column, values = _one_hot_values(case, copies, device)
    q, k, do = (torch.zeros((copies * case.batch, *shapes(case)[name][1:]), dtype=values.dtype, device=device) for name in ("q", "k", "do"))
    result = run_copies(subject, case, Inputs(q, k, values, do))
    assert result.out is not None
    out = result.out.double().unflatten(0, (copies, case.batch))
    visible = case.mask.dense(device).expand(case.batch, case.heads_q, -1, -1)
    findings = _judge_weights(case, _read_weights(case, out, column), visible)
    if not findings and bool(_stray(case, out, column).any()):
        findings.append(
            Finding("count", "out", "has values in columns where every value vector is 0: out mixes columns or reads beyond the keys")
        )
    if result.lse is not None:
        findings += _judge_count_lse(case, result.lse[: case.batch], visible)
    return findings


def _one_hot_values(case: Case, copies: int, device: str) -> tuple[Tensor, Tensor]:
    """The column of each key's 1, int `[batch, heads_kv, seqlen_kv]`, and v `[copies * batch, seqlen_kv, heads_kv, head_dim_v]`.

    Copy c holds the keys `c * head_dim_v` and following; elsewhere v is 0.
    """
    batch, seqlen, heads, width = case.batch, case.seqlen_kv, case.heads_kv, case.head_dim_v
    keys = torch.arange(seqlen, device=device)
    shift = torch.arange(batch, device=device)[:, None, None] * 5 + torch.arange(heads, device=device)[None, :, None] * 3
    column = (keys + shift) % width
    v = torch.zeros((copies, batch, seqlen, heads, width), dtype=TORCH_DTYPES[case.dtype], device=device)
    b = torch.arange(batch, device=device)[:, None, None]
    h = torch.arange(heads, device=device)[None, :, None]
    v[keys // width, b, keys, h, column] = 1
    return column, v.flatten(0, 1)


def _read_weights(case: Case, out: Tensor, column: Tensor) -> Tensor:
    """The weight of every key, `[batch, heads_q, seqlen_q, seqlen_kv]`, read from out `[copies, batch, seqlen_q, heads_q, head_dim_v]`."""
    device = out.device
    copy = torch.arange(case.seqlen_kv, device=device) // case.head_dim_v
    b = torch.arange(case.batch, device=device)[:, None, None]
    h = torch.arange(case.heads_q, device=device)[None, :, None]
    by_head = out.permute(0, 1, 3, 4, 2)  # [copies, batch, heads_q, head_dim_v, seqlen_q]
    return by_head[copy, b, h, column.repeat_interleave(case.group, 1)].mT


def _stray(case: Case, out: Tensor, column: Tensor) -> Tensor:
    """Non-zero elements of out in columns that belong to no key of their copy."""
    used = torch.zeros((out.shape[0], case.batch, case.heads_q, case.head_dim_v), dtype=torch.bool, device=out.device)
    copy = torch.arange(case.seqlen_kv, device=out.device) // case.head_dim_v
    b = torch.arange(case.batch, device=out.device)[:, None, None]
    h = torch.arange(case.heads_q, device=out.device)[None, :, None]
    used[copy, b, h, column.repeat_interleave(case.group, 1)] = True
    return (out != 0) & ~used[:, :, None]


def _judge_weights(case: Case, weight: Tensor, visible: Tensor) -> list[Finding]:
    keys = visible.sum(-1, keepdim=True)
    slack = (4 * rounding_of(case).unit * keys).clamp(min=0.5)
    off = case.seqlen_kv - case.seqlen_q
    empty = keys == 0
    not_number = ~weight.isfinite()
    wrong = (
        ("gives NaN or infinity for", not_number & empty, "in rows that see nothing, which must give 0"),
        ("gives NaN or infinity for", not_number & ~empty, ""),
        ("reads", ~not_number & ~visible & (weight != 0), "which the mask hides"),
        ("does not read", ~not_number & visible & (weight == 0), "which the mask shows"),
    )
    findings = [
        Finding("count", "out", describe_pairs(verb, pairs.nonzero(), off, case.group, why), _place(pairs))
        for verb, pairs, why in wrong
        if bool(pairs.any())
    ]
    if not findings:
        off_count = visible & ~((1 / weight - keys).abs() <= slack)
        if bool(off_count.any()):
            b, h, i, j = off_count.nonzero()[0].tolist()
            share = f"its {int(keys[b, h, i])} visible keys share 1 equally"
            message = f"batch {b}, head {h}, query {i} gives key {j} the weight {weight[b, h, i, j]:.6g}, and {share}"
            findings.append(Finding("count", "out", message, _place(off_count)))
    return findings


def _judge_count_lse(case: Case, lse: Tensor, visible: Tensor) -> list[Finding]:
    keys = visible.sum(-1).double()  # [batch, heads_q, seqlen_q]
    lse = lse.double()
    empty = keys == 0
    if bool((empty & (lse != -torch.inf)).any()):
        b, h, i = (empty & (lse != -torch.inf)).nonzero()[0].tolist()
        return [
            Finding(
                "count",
                "lse",
                f"is {lse[b, h, i]:.6g} at batch {b}, head {h}, query {i}, which sees nothing: -inf is due",
                _place(empty),
            )
        ]
    wrong = ~empty & ~((lse.exp() - keys).abs() < (keys * 2.0**-16).clamp(min=0.5))
    if not bool(wrong.any()):
        return []
    b, h, i = wrong.nonzero()[0].tolist()
    n, got = int(keys[b, h, i]), float(lse[b, h, i])
    base_2 = " (this is log2: the lse is in base 2)" if n > 1 and abs(got - keys[b, h, i].log2().item()) < 1e-3 else ""
    due = f"log {n} = {keys[b, h, i].log().item():.6g} is due{base_2}"
    message = f"is {got:.6g} at batch {b}, head {h}, query {i}, which sees {n} keys with score 0: {due}"
    return [Finding("count", "lse", message, _place(wrong))]


def _place(wrong: Tensor) -> dict[str, object]:
    """The place of the wrong elements of `[batch, heads, rows]` or `[batch, heads, rows, keys]`: all of the first one's head."""
    b, h = wrong.nonzero()[0, :2].tolist()
    here = wrong[b, h]
    if here.ndim == 1:  # of an lse, no key is wrong
        return {"batch": b, "head": h, "rows": here.nonzero().flatten().tolist()[:64]}
    rows, keys = here.any(-1).nonzero().flatten().tolist(), here.any(0).nonzero().flatten().tolist()
    pairs = here.nonzero().tolist()
    exactly = {"pairs": pairs} if len(pairs) <= LISTED_PAIRS else {}
    return {"batch": b, "head": h, "rows": rows[:64], "keys": keys[:64], **exactly}


def run_copies(subject: Subject, case: Case, inputs: Inputs) -> Result:
    """Run a case on inputs with more batch elements than it has, copy by copy if the mask itself has a batch axis."""
    total = inputs.q.shape[0]
    if case.mask.batch == 1:
        return subject.run(replace(case, batch=total), inputs)
    parts = []
    for start in range(0, total, case.batch):
        part = slice(start, start + case.batch)
        parts.append(subject.run(case, Inputs(inputs.q[part], inputs.k[part], inputs.v[part], inputs.do[part])))
    joined: dict[str, Any] = {name: _cat([getattr(part, name) for part in parts]) for name in TENSORS}
    return replace(parts[0], **joined)


def _cat(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


@dataclass(frozen=True, slots=True)
class Support:
    """What P2 asks: copy c has a do in row `rows[c]` of head `heads[c]` alone; and what must come back, in fp64.

    `weight` is P `[copies, seqlen_kv]`, `ds` dS `[copies, seqlen_kv]`, `ds_size` the same sum over absolute terms.
    """

    rows: Tensor
    heads: Tensor
    weight: Tensor
    ds: Tensor
    ds_size: Tensor


def support(subject: Subject) -> list[Finding]:
    """P2: do is non-zero in one row of one head, so only what that row sees may get a gradient, and all of it must.

    Twice in one call: with k = 0 the dv and dk, and with q = 0 the dq, have simple known values; all others are exactly 0.
    """
    case = replace(subject.case, direction=Direction.FWD_BWD, layouts=(Layout.CONTIGUOUS,) * 4)
    if case.mask.batch == 1:
        case = replace(case, batch=1)
    chosen = _choose_rows(case, INTERPRETED_TILES if subject.is_slow else None)
    inputs, asked = _support_inputs(case, chosen, subject.machine.device)
    before = {name: getattr(inputs, name).clone() for name in OPERANDS}
    result = run_copies(subject, case, inputs)
    # What is due is read from the operands: first of all they must be as they were.
    written = [name for name in OPERANDS if not torch.equal(getattr(inputs, name), before[name])]
    if written:
        return [Finding("support", name, f"the call wrote to the operand {name}: operands are read-only") for name in written]
    return _judge_support(case, asked, inputs, result)


def _choose_rows(case: Case, tiles: int | None = None) -> list[tuple[int, int]]:
    """The (row, head) pairs to ask about: all of them if one call holds them, else edges, tile edges and random ones.

    `tiles` limits the call of a slow kernel.
    """
    everything = [(row, head) for head in range(case.heads_q) for row in range(case.seqlen_q)]
    scores = 2 * case.num_scores
    affordable = max(FEWEST_ROWS, SAMPLED_SCORES // scores)
    if tiles is not None:
        affordable = max(2, tiles // (2 * case.batch * case.heads_q * -(-case.seqlen_q // TILE) * -(-case.seqlen_kv // TILE)))
    elif len(everything) * scores <= EXHAUSTIVE_SCORES:
        return everything
    rng = Random(case.seed)
    edges = sorted({row for tile in (16, 64, 128, case.seqlen_q) for row in (0, tile - 1, tile) if row < case.seqlen_q})
    pairs = [(row, rng.randrange(case.heads_q)) for row in edges] + rng.sample(everything, min(len(everything), len(edges)))
    return rng.sample(pairs, min(len(pairs), affordable))


def _support_inputs(case: Case, chosen: list[tuple[int, int]], device: str) -> tuple[Inputs, Support]:
    """Inputs of `2 * copies * batch` elements, the half with k = 0 first, and what is asked. All batch elements of a copy are alike."""
    dtype, copies = TORCH_DTYPES[case.dtype], len(chosen)
    generator = torch.Generator(device).manual_seed(case.seed)
    rows, heads = (torch.tensor(x, device=device) for x in zip(*chosen, strict=True))

    def draw(*shape: int) -> Tensor:
        """Values away from 0, rounded to the case's dtype."""
        sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
        return ((torch.rand(shape, generator=generator, device=device) + 0.5) * sign).to(dtype)

    q = draw(case.seqlen_q, case.heads_q, case.head_dim)
    k = draw(case.seqlen_kv, case.heads_kv, case.head_dim)
    v = draw(case.seqlen_kv, case.heads_kv, case.head_dim_v)
    vector = draw(case.head_dim_v)
    do = torch.zeros((copies, case.seqlen_q, case.heads_q, case.head_dim_v), dtype=dtype, device=device)
    do[torch.arange(copies, device=device), rows, heads] = vector
    first_half = torch.arange(2 * copies, device=device)[:, None, None, None] < copies
    q_all, k_all = torch.where(first_half, q, 0), torch.where(first_half, 0, k)
    spread = [
        x.repeat_interleave(case.batch, 0) for x in (q_all, k_all, v.expand(2 * copies, -1, -1, -1).contiguous(), do.repeat(2, 1, 1, 1))
    ]
    return Inputs(*spread), _known_terms(case, rows, heads, vector.double(), v.double())


def _known_terms(case: Case, rows: Tensor, heads: Tensor, vector: Tensor, v: Tensor) -> Support:
    """P and dS of the asked rows under equal scores: P = 1/n on visible keys, dS = P (do.v - do.out). Of batch element 0."""
    dense = case.mask.dense(rows.device)[0]
    visible = dense[heads if dense.shape[0] > 1 else torch.zeros_like(heads), rows].double()  # [copies, seqlen_kv]
    weight = visible / visible.sum(-1, keepdim=True).clamp(min=1)
    dp = (v @ vector).T[heads // case.group]  # [copies, seqlen_kv]
    dp_size = (v.abs() @ vector.abs()).T[heads // case.group]
    ds = weight * (dp - (weight * dp).sum(-1, keepdim=True))
    return Support(rows, heads, weight, ds, weight * (dp_size + (weight * dp_size).sum(-1, keepdim=True)))


def _judge_support(case: Case, asked: Support, inputs: Inputs, result: Result) -> list[Finding]:
    copies, step = len(asked.rows), case.batch
    at = torch.arange(copies, device=asked.rows.device)
    kv_heads = asked.heads // case.group
    vector = inputs.do[::step][at, asked.rows, asked.heads].double()
    q, k = inputs.q[::step][at, asked.rows, asked.heads].double(), inputs.k[::step][copies:][at, :, kv_heads].double()
    ds, size = (case.scale * asked.ds)[..., None], (abs(case.scale) * asked.ds_size)[..., None]
    by_key, by_row = (at, slice(None), kv_heads), (at, asked.rows, asked.heads)
    dv = (asked.weight[..., None] * vector[:, None], asked.weight[..., None] * vector.abs()[:, None])
    dk = (ds * q[:, None], size * q.abs()[:, None])
    dq = ((ds * k).sum(1, keepdim=True), (size * k.abs()).sum(1, keepdim=True))
    due = (  # tensor, which half (0: k = 0, 1: q = 0), where, value and sum of absolute terms `[copies, positions, head_dim]`
        Due("dq", 0, by_row, None, None),
        Due("dq", 1, by_row, *dq),
        Due("dk", 0, by_key, *dk),
        Due("dk", 1, by_key, None, None),
        Due("dv", 0, by_key, *dv),
        Due("dv", 1, by_key, *dv),
    )
    findings = []
    for one in due:
        grad = getattr(result, one.tensor)[::step][one.half * copies :][:copies]
        findings += [found for found in _compare_support(case, asked, one, grad) if found not in findings]  # dv is asked for twice
    return findings


@dataclass(frozen=True, slots=True)
class Due:
    """What must be in a gradient: `value` at `index` (None: 0 there too), 0 everywhere else."""

    tensor: str
    half: int
    index: tuple[Tensor | slice, ...]
    value: Tensor | None
    size: Tensor | None


def _compare_support(case: Case, asked: Support, due: Due, grad: Tensor) -> list[Finding]:
    """Exact zeros where nothing is due; elsewhere within the rounding of a few terms. grad is `[copies, seqlen, heads, head_dim]`."""
    findings, rest = [], grad
    if due.value is not None and due.size is not None:
        got = grad[due.index].double().view_as(due.value)
        wrong = ~((got - due.value).abs() <= 32 * rounding_of(case).unit * due.size + 2.0**-24) | ((due.size == 0) & (got != 0))
        if bool(wrong.any()):
            findings.append(_wrong_value(case, asked, due, got, wrong))
        rest = grad.clone()
        rest[due.index] = 0
    if bool(rest.count_nonzero()):  # NaN counts
        findings.append(_stray_gradient(asked, due, rest))
    return findings


def _wrong_value(case: Case, asked: Support, due: Due, got: Tensor, wrong: Tensor) -> Finding:
    assert due.value is not None and due.size is not None
    copy, position = wrong.any(-1).nonzero()[0].tolist()
    element = (copy, position, int(wrong[copy, position].nonzero()[0]))
    row, head = int(asked.rows[copy]), int(asked.heads[copy])
    value, is_seen = float(got[element]), float(due.size[element]) != 0
    if due.tensor == "dq":
        text = "its own dq is wrong"
    elif not is_seen:
        text = f"key {position} of key/value head {head // case.group} gets a {due.tensor}, and the query does not see it"
    elif value == 0:
        text = f"key {position} of key/value head {head // case.group} gets no {due.tensor}, and the query sees it"
    else:
        text = f"{due.tensor} of key {position} of key/value head {head // case.group} is wrong"
    number = int(wrong.any(-1).sum())
    message = (
        f"do is non-zero in query {row} of head {head} alone: {text} ({value:.4g}, due {float(due.value[element]):.4g}); "
        f"{_such_places(number)}{_common_factor(case, got, due.value, wrong)}"
    )
    keys = {} if due.tensor == "dq" else {"keys": wrong[copy].any(-1).nonzero().flatten().tolist()[:64]}
    return Finding("support", due.tensor, message, {"batch": 0, "head": head, "rows": [row], **keys})


def _such_places(number: int) -> str:
    """How many places there are of which one is told and drawn."""
    return "the only such place" if number == 1 else f"the first of {number} such places"


def _common_factor(case: Case, got: Tensor, value: Tensor, wrong: Tensor) -> str:
    """What all wrong elements were multiplied by, and what that number is, if it is one."""
    usable = wrong & (value != 0)
    ratio = got[usable] / value[usable]
    if not len(ratio) or float(ratio[0]) == 0:
        return ""
    # Of what is off by its precision there is no factor: the ratios differ by as much as they are away from 1.
    apart = torch.minimum(1e-2 * ratio[0].abs(), (ratio[0] - 1).abs() / 2)
    if not bool(((ratio - ratio[0]).abs() <= apart).all()):
        return ""
    known = {"the scale": case.scale, "the group": case.group, "2": 2.0, "ln 2": LN_2}
    for name, number in known.items():
        for label, factor in ((name, number), (f"1 / {name}", 1 / number)):
            if factor != 1 and abs(float(ratio[0]) / factor - 1) < 1e-2:
                return f": all {float(ratio[0]):.4g} times what is due, which is {label}"
    return f": all {float(ratio[0]):.4g} times what is due"


def _stray_gradient(asked: Support, due: Due, rest: Tensor) -> Finding:
    """A gradient where none may be: another row, another head, or everywhere."""
    places = (rest != 0).any(-1).nonzero()  # (copy, position, head)
    copy, position, head = places[0].tolist()
    row, query_head = int(asked.rows[copy]), int(asked.heads[copy])
    value = float(rest[copy, position, head][rest[copy, position, head] != 0][0])
    what = f"query {position} of head {head}" if due.tensor == "dq" else f"key {position} of key/value head {head}"
    why = "k = 0" if due.tensor == "dq" and due.half == 0 else "q = 0" if due.tensor == "dk" and due.half == 1 else "that head's do is 0"
    alone = f"do is non-zero in query {row} of head {query_head} alone"
    message = f"{alone}: {what} gets a {due.tensor} of {value:.4g}, and {why}; {_such_places(len(places))}"
    side = {"rows": [position]} if due.tensor == "dq" else {"rows": [row], "keys": [position]}
    return Finding("support", due.tensor, message, {"batch": 0, "head": query_head, **side})
