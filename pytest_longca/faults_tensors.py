"""Faults of everything but the mask: empty rows, buffers, head groups, strides, scale, lse, precision, races, state, bounds."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.faulty import (
    Bind,
    Fresh,
    Grads,
    Hooked,
    head_map,
    inside,
    right_heads,
    wrong_grad,
    wrong_inputs,
    wrong_results,
)
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Call, Kernel

TILE = 16


def _empty_rows(case: Case, device: torch.device) -> Tensor:
    """bool `[batch, heads_q, seqlen_q]`."""
    return ~case.mask.dense(device).any(-1).expand(case.batch, case.heads_q, -1)


def _empty_out(value: Callable[[Inputs], Tensor | float]) -> Bind:
    """out of rows that see nothing."""

    def forward(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        empty = _empty_rows(case, out.device).transpose(1, 2)[..., None]
        return torch.where(empty, torch.as_tensor(value(inputs), dtype=out.dtype, device=out.device), out), lse

    return wrong_results(forward)


def _mean_value(inputs: Inputs) -> Tensor:
    group = inputs.q.shape[2] // inputs.v.shape[2]
    return inputs.v.mean(1, keepdim=True).repeat_interleave(group, 2)


def _empty_lse(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return out, None if lse is None else lse.masked_fill(_empty_rows(case, lse.device), 0.0)


def _empty_dq(case: Case, dq: Tensor) -> Tensor:
    return dq.masked_fill(_empty_rows(case, dq.device).transpose(1, 2)[..., None], float("nan"))


def _tail_unwritten(case: Case, grad: Tensor) -> Tensor:
    """The last partial tile of rows stays as the allocator gave it."""
    written = grad.shape[1] - grad.shape[1] % TILE
    buffer = torch.empty_like(grad)
    buffer[:, :written] = grad[:, :written]
    return buffer


def _tail_repeated(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The last query row is a copy of the one before: a clamped index."""
    out = out.clone()
    out[:, -1:] = out[:, -2:-1]
    return out, lse


def _first_of_group(case: Case, x: Tensor) -> Tensor:
    return x[:, :, :: case.group].contiguous()


def _mean_of_group(case: Case, x: Tensor) -> Tensor:
    mean: Tensor = x.unflatten(2, (case.heads_kv, case.group)).float().mean(3)
    return mean.to(x.dtype)


def _last_dropped(case: Case, x: Tensor) -> Tensor:
    """The last head of each group does not reach dk and dv."""
    grouped: Tensor = x.unflatten(2, (case.heads_kv, case.group)).double()
    return (grouped.sum(3) - (grouped[:, :, :, -1] if case.group > 1 else 0)).to(x.dtype)


def _as_contiguous(x: Tensor, keep_offset: bool = True) -> Tensor:
    """The operand as a kernel sees it that takes its memory for contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    offset = x.storage_offset() if keep_offset else 0
    room = x.untyped_storage().nbytes() // x.element_size() - offset
    return x.as_strided(x.shape, strides, offset) if room >= x.numel() else x


def _strides_ignored(*names: str, keep_offset: bool = True) -> Bind:
    def change(case: Case, inputs: Inputs) -> Inputs:
        tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "do")}
        return Inputs(**{name: _as_contiguous(x, keep_offset) if name in names else x for name, x in tensors.items()})

    return wrong_inputs(change)


def _do_strides_ignored(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return Hooked(inner.bind(case, inputs), before_backward=_as_contiguous)


def _lse(change: Callable[[Case, Inputs, Tensor], Tensor]) -> Bind:
    return wrong_results(lambda case, inputs, out, lse: (out, None if lse is None else change(case, inputs, lse)))


def _custom_scale_ignored(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return inner.bind(replace(case, scale=0.0), inputs)


def _every(n: int, spoil: Callable[[Tensor], Tensor], name: str) -> Bind:
    """Every n-th call spoils a tensor: a race."""
    calls = count(1)

    def forward(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (spoil(out.clone()) if name == "out" and next(calls) % n == 0 else out), lse

    def backward(case: Case, inputs: Inputs, grads: Grads) -> Grads:
        dq, dk, dv = grads
        return dq, dk, (spoil(dv.clone()) if name == "dv" and next(calls) % n == 0 else dv)

    return wrong_results(forward, backward)


def _nudge_tile(x: Tensor) -> Tensor:
    x[0, :TILE, 0, :TILE] += 1e-2
    return x


def _lose_tile(x: Tensor) -> Tensor:
    x[0, :TILE, -1, :TILE] = 0
    return x


def _mask_cached_by_shape() -> Bind:
    """What is made of the mask is kept by shape alone."""
    kept: dict[tuple[int, ...], Any] = {}

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        shape = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
        return inner.bind(replace(case, mask=kept.setdefault(shape, case.mask)), inputs)

    return bind


def _backward_of_latest() -> Bind:
    """The backward takes what the latest forward of any call left behind, if it fits."""
    latest: list[Call] = []

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        call = inner.bind(case, inputs)

        def after_forward(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
            latest[:] = [call]
            return out, lse

        def after_backward(*grads: Tensor) -> Grads:
            if latest[0] is not call:
                return grads[0], grads[1] * 0, grads[2]
            return grads[0], grads[1], grads[2]

        return Hooked(call, after_forward=after_forward, after_backward=after_backward)

    return bind


def _out_buffer_reused() -> Bind:
    """out of every call of one shape is the same memory."""
    kept: dict[tuple[Any, ...], Tensor] = {}

    def forward(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        buffer = kept.setdefault((tuple(out.shape), out.dtype), torch.empty_like(out))
        return buffer.copy_(out), lse

    return wrong_results(forward)


def _gradient_accumulated() -> Bind:
    """dq is added to what the last call of this shape left in its buffer."""
    kept: dict[tuple[Any, ...], Tensor] = {}

    def change(case: Case, dq: Tensor) -> Tensor:
        buffer = kept.setdefault((tuple(dq.shape), dq.dtype), torch.zeros_like(dq))
        return buffer.add_(dq).clone()

    return wrong_grad("dq", change)


def _scale_clipped(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return inner.bind(replace(case, scale=min(case.scale, 1.0)), inputs)


def _scaled_in_place(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """q is scaled where it lies and scaled back, which half precision does not undo."""
    call = inner.bind(case, inputs)

    def after_forward(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        inputs.q.detach().mul_(0.3)
        return out, lse

    return Hooked(call, after_forward=after_forward)


def _do_doubled_in_place(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """do is changed where it lies, after it was read."""
    kept: list[Tensor] = []

    def before_backward(do: Tensor) -> Tensor:
        kept[:] = [do]
        return do

    def after_backward(*grads: Tensor) -> Grads:
        kept[0].detach()[..., -1:, -1:].mul_(2)
        return grads[0], grads[1], grads[2]

    return Hooked(inner.bind(case, inputs), before_backward=before_backward, after_backward=after_backward)


def _beyond(x: Tensor) -> Tensor | None:
    """The element right after an operand's last one, if its storage goes on."""
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    room = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((1,), (1,), last + 1) if last + 1 < room else None


def _reads_beyond(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The key after the last one is read with weight 0, which only NaN and infinity betray."""
    beyond = _beyond(inputs.v)
    return (out if beyond is None else out + 0 * beyond), lse


def _writes_beyond(case: Case, inputs: Inputs, grads: Grads) -> Grads:
    beyond = _beyond(inputs.k)
    if beyond is not None:
        beyond.fill_(0.5)
    return grads


def _low_precision_softmax(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """Scores and probabilities held in the operands' dtype throughout (fp16 where that is fp32)."""
    hidden = ~case.mask.dense(inputs.q.device)
    low = torch.float16 if inputs.q.dtype is torch.float32 else inputs.q.dtype

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).to(low) for x in (q, k.repeat_interleave(case.group, 2), v.repeat_interleave(case.group, 2)))
        scores = (q @ k.mT * case.scale).masked_fill(hidden, -torch.inf)
        p = scores.softmax(-1).nan_to_num()
        return (p @ v).transpose(1, 2).to(inputs.q.dtype), None

    return AutogradCall(attend, inputs, case.direction.needs_backward)


def _padding_overflows(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """The backward scores padded keys 0 instead of -inf: exp(0 - lse) overflows where lse is low, and infinity times a zero key is NaN."""
    call = inner.bind(case, inputs)
    kept: list[Tensor] = []

    def after_forward(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kept[:] = [] if lse is None else [lse.detach().float()]
        return out, lse

    def after_backward(dq: Tensor, dk: Tensor, dv: Tensor) -> Grads:
        if kept and case.seqlen_kv % TILE:
            dq = dq + (0 * kept[0].masked_fill(kept[0].isinf(), 0.0).neg().exp()).transpose(1, 2)[..., None].to(dq.dtype)
        return dq, dk, dv

    return Hooked(call, after_forward=after_forward, after_backward=after_backward)


def _one_key_gains(case: Case, dk: Tensor) -> Tensor:
    dk[:, dk.shape[1] // 2] *= 1.01
    return dk


def _overflowing(case: Case, scores: Tensor) -> Tensor:
    """exp without subtracting the row's maximum, in fp32: overflow shows as infinity over infinity."""
    weights = scores.exp()
    return (weights / weights.sum(-1, keepdim=True)).log()


def _delta_dropped(case: Case, delta: Tensor) -> Tensor:
    return torch.zeros_like(delta)


def _delta_halved(case: Case, delta: Tensor) -> Tensor:
    return delta / 2


def _zeroed_element(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out = out.clone()
    out[-1:, -1:, -1:, : max(1, out.shape[-1] // 8)] = 0
    return out, lse


ROWS: list[tuple[str, str, str, str, Bind | Fresh]] = [
    ("empty rows", "empty_nan", "causal", "rows that see nothing give NaN", _empty_out(lambda inputs: float("nan"))),
    ("empty rows", "empty_mean", "full_document", "rows that see nothing give the mean of all values", _empty_out(_mean_value)),
    ("empty rows", "empty_lse_zero", "causal", "lse of rows that see nothing is 0", wrong_results(_empty_lse)),
    ("empty rows", "empty_dq_nan", "causal", "dq of rows that see nothing is NaN", wrong_grad("dq", _empty_dq)),
    ("buffer", "dq_tail_unwritten", "full", "the last partial tile of dq is not written", wrong_grad("dq", _tail_unwritten)),
    ("buffer", "dv_tail_unwritten", "causal", "the last partial tile of dv is not written", wrong_grad("dv", _tail_unwritten)),
    ("buffer", "dq_accumulated", "full", "dq is added to the last call's", Fresh(_gradient_accumulated)),
    ("tail", "last_row_repeated", "causal", "the last query's row is the one before", wrong_results(_tail_repeated)),
    (
        "head group",
        "group_not_summed",
        "full",
        "dk and dv are those of the first head of each group",
        head_map(right_heads, _first_of_group),
    ),
    ("head group", "group_averaged", "causal", "dk and dv are averaged over the group", head_map(right_heads, _mean_of_group)),
    (
        "head group",
        "group_last_dropped",
        "full",
        "the last head of each group does not reach dk and dv",
        head_map(right_heads, _last_dropped),
    ),
    (
        "head map",
        "heads_interleaved",
        "full",
        "query head h reads key/value head h % heads_kv",
        head_map(lambda case, h: h % case.heads_kv),
    ),
    ("head map", "heads_first", "causal", "all query heads read key/value head 0", head_map(lambda case, h: h * 0)),
    (
        "head map",
        "heads_reversed",
        "full",
        "key/value heads are taken in reverse",
        head_map(lambda case, h: case.heads_kv - 1 - h // case.group),
    ),
    ("strides", "q_strides_ignored", "full", "q is taken for contiguous", _strides_ignored("q")),
    ("strides", "k_strides_ignored", "full", "k is taken for contiguous", _strides_ignored("k")),
    ("strides", "v_strides_ignored", "causal", "v is taken for contiguous", _strides_ignored("v")),
    ("strides", "do_strides_ignored", "full", "do is taken for contiguous", _do_strides_ignored),
    ("strides", "offset_ignored", "full", "the storage offset of k and v is ignored", _strides_ignored("k", "v", keep_offset=False)),
    ("scale", "dq_scaled_twice", "full", "dq is multiplied by the scale twice", wrong_grad("dq", lambda case, x: x * case.scale)),
    ("scale", "dk_scaled_twice", "causal", "dk is multiplied by the scale twice", wrong_grad("dk", lambda case, x: x * case.scale)),
    ("scale", "dk_unscaled", "full", "dk is not multiplied by the scale", wrong_grad("dk", lambda case, x: x / case.scale)),
    ("scale", "custom_scale_ignored", "full", "a scale other than head_dim ** -0.5 is ignored", _custom_scale_ignored),
    ("scale", "scale_clipped", "full", "a scale above 1 is taken for 1", _scale_clipped),
    ("lse", "lse_base_2", "full", "lse is in base 2", _lse(lambda case, inputs, lse: lse / torch.log(torch.tensor(2.0)).to(lse))),
    ("lse", "lse_negative", "causal", "lse has the other sign", _lse(lambda case, inputs, lse: -lse)),
    ("lse", "lse_rounded", "full", "lse is rounded to bf16", _lse(lambda case, inputs, lse: lse.bfloat16().float())),
    ("softmax", "low_precision_softmax", "full", "scores and probabilities are held in half precision", _low_precision_softmax),
    ("softmax", "no_maximum", "full", "exp without subtracting the row's maximum", inside(scores=_overflowing)),
    ("softmax", "padding_overflows", "causal", "the backward scores padded keys 0: NaN in dq where lse is below -88.7", _padding_overflows),
    ("gradient", "delta_dropped", "full", "the backward lacks the row-sum term", inside(delta=_delta_dropped)),
    ("gradient", "delta_halved", "causal", "the row-sum term is halved", inside(delta=_delta_halved)),
    ("gradient", "dk_one_key_one_percent", "full", "dk of one key is 1 % too large", wrong_grad("dk", _one_key_gains)),
    ("gradient", "out_corner_zero", "full", "some elements of the last row of the last head are 0", wrong_results(_zeroed_element)),
    ("race", "race_out", "full", "every 5th call adds 0.01 to a 16 x 16 tile of out", Fresh(lambda: _every(5, _nudge_tile, "out"))),
    ("race", "race_dv", "causal", "every 7th call loses a 16 x 16 tile of dv", Fresh(lambda: _every(7, _lose_tile, "dv"))),
    ("state", "mask_cached_by_shape", "causal_document", "what is made of the mask is kept by shape alone", Fresh(_mask_cached_by_shape)),
    ("state", "backward_of_latest", "full", "the backward takes what the latest forward left", Fresh(_backward_of_latest)),
    ("state", "out_buffer_reused", "full", "out is the same memory in every call", Fresh(_out_buffer_reused)),
    ("bounds", "q_changed_in_place", "full", "q is changed where it lies", _scaled_in_place),
    ("bounds", "do_changed_in_place", "causal", "do is changed where it lies", _do_doubled_in_place),
    ("bounds", "reads_beyond_values", "full", "the element after the last value is read with weight 0", wrong_results(_reads_beyond)),
    ("bounds", "writes_beyond_keys", "causal", "the element after the last key is written", wrong_results(backward=_writes_beyond)),
]
