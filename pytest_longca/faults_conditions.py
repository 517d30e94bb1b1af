"""Faults that show only under a condition: certain counts, layouts or sizes of values, or what ran before."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.faults_lengths import documents
from pytest_longca.faulty import (
    Bind,
    Explicit,
    Fresh,
    Grads,
    Hooked,
    head_map,
    right_heads,
    wrong_grad,
    wrong_inputs,
    wrong_mask,
    wrong_results,
)
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.mask import MaskMod


def _map_of_group(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, h // case.group * case.group, i, j)


def _first_half_if_four(case: Case, x: Tensor) -> Tensor:
    grouped: Tensor = x.unflatten(2, (case.heads_kv, case.group)).double()
    return (grouped[:, :, :, : case.group // 2] if case.group % 4 == 0 else grouped).sum(3).to(x.dtype)


def _without_last_of_seven(case: Case, x: Tensor) -> Tensor:
    grouped: Tensor = x.unflatten(2, (case.heads_kv, case.group)).double()
    return (grouped[:, :, :, :-1] if case.group == 7 else grouped).sum(3).to(x.dtype)


def _unpadded_batch_stride(case: Case, inputs: Inputs) -> Inputs:
    """q's batch stride is that of rows without padding."""
    q = inputs.q
    if not case.head_dim < q.stride(2) < 2 * case.head_dim:
        return inputs
    strides = (case.seqlen_q * case.heads_q * case.head_dim, *q.stride()[1:])
    return Inputs(q.as_strided(q.shape, strides, q.storage_offset()), inputs.k, inputs.v, inputs.do)


def _single_do_halved(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return Hooked(inner.bind(case, inputs), before_backward=lambda do: do / 2 if do.stride() == (0, 0, 0, 0) else do)


def _shared_read_once(case: Case, inputs: Inputs) -> Inputs:
    """Of a k whose batch elements share memory only the first is read."""
    is_shared = inputs.k.stride(0) == 0 and case.batch > 1
    k = torch.cat([inputs.k[:1], torch.zeros_like(inputs.k[1:])]) if is_shared else inputs.k
    return Inputs(inputs.q, k, inputs.v, inputs.do)


def _backward_of_usual_scale(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return Hooked(inner.bind(case, inputs), inner.bind(replace(case, scale=0.0), inputs))


class _MaximumOfAll(Explicit):
    """The maximum is taken over masked keys as well: what is visible underflows where a masked score is far higher."""

    __slots__ = ()

    def _p(self) -> tuple[Tensor, Tensor]:
        q, k, _ = self._operands()
        hidden = ~self._case.mask.dense(q.device)
        scores = q @ k.mT * self._case.scale
        highest = scores.amax(-1, keepdim=True) if scores.numel() else scores.sum(-1, keepdim=True)
        weights = (scores - highest).exp().masked_fill(hidden, 0.0)
        total = weights.sum(-1, keepdim=True)
        return torch.where(total > 0, weights / total, 0.0), (highest + total.log())[..., 0]


def _faint_do_lost(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    return Hooked(inner.bind(case, inputs), before_backward=lambda do: torch.where(do.abs() < 1e-4, 0, do))


def _loud_do_overflows(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """Sums with do that pass 500 are infinite."""

    def overflow(dq: Tensor, dk: Tensor, dv: Tensor) -> Grads:
        return dq, dk, torch.where(dv.abs() > 500, torch.inf, dv)

    return Hooked(inner.bind(case, inputs), after_backward=overflow)


def _beyond_128_zero(case: Case, dk: Tensor) -> Tensor:
    dk[..., 128:] = 0
    return dk


def _last_8_zero(case: Case, dq: Tensor) -> Tensor:
    if case.head_dim % 16 == 8:
        dq[..., -8:] = 0
    return dq


def _other_heads_lse(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return out, None if lse is None else lse.roll(1, 1)


def _one_key_in_base_2(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    has_one = (case.mask.dense(out.device).sum(-1) == 1).expand(case.batch, case.heads_q, -1)
    return out, None if lse is None else torch.where(has_one, lse / torch.log(torch.tensor(2.0)).to(lse), lse)


def _one_key_nan(case: Case, dq: Tensor) -> Tensor:
    has_one = (case.mask.dense(dq.device).sum(-1) == 1).expand(case.batch, case.heads_q, -1)
    return dq.masked_fill(has_one.transpose(1, 2)[..., None], float("nan"))


def _kept(key: Callable[[Case], Any], use: Callable[[Case, Case], Case]) -> Fresh:
    """`use(case, first)` with the first case of the same key."""

    def make() -> Bind:
        kept: dict[Any, Case] = {}
        return lambda inner, case, inputs: inner.bind(use(case, kept.setdefault(key(case), case)), inputs)

    return Fresh(make)


def _shape(case: Case) -> tuple[int, ...]:
    return case.batch, case.heads_q, case.heads_kv, case.seqlen_q, case.seqlen_kv, case.head_dim, case.head_dim_v


def _out_kept_by_address() -> Bind:
    """An out that was computed for the same addresses is given again."""
    kept: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}

    def forward(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        addresses = (*_shape(case), *(x.data_ptr() for x in (inputs.q, inputs.k, inputs.v)), hash(case.dtype))
        return kept.setdefault(addresses, (out, lse))

    return wrong_results(forward)


def _second_backward_doubled(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """The backward accumulates in what the call keeps."""
    ran: list[int] = []

    def after_backward(dq: Tensor, dk: Tensor, dv: Tensor) -> Grads:
        ran.append(1)
        return dq * len(ran), dk, dv

    return Hooked(inner.bind(case, inputs), after_backward=after_backward)


def _first_do_kept(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """The first backward after a forward keeps do, and those after it take that."""
    kept: list[Tensor] = []

    def after_forward(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kept.clear()
        return out, lse

    def before_backward(do: Tensor) -> Tensor:
        kept.append(do)
        return kept[0]

    return Hooked(inner.bind(case, inputs), after_forward=after_forward, before_backward=before_backward)


def _second_forward_halved(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """The forward consumes what a second forward of the same call needs."""
    ran: list[int] = []

    def after_forward(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ran.append(1)
        return out / len(ran), lse

    return Hooked(inner.bind(case, inputs), after_forward=after_forward)


def _leaves(change: Callable[[], object]) -> Bind:
    """Right results; the forward leaves something changed that the whole process shares."""

    def forward(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        change()
        return out, lse

    return wrong_results(forward)


def _imports_change() -> Bind:
    """The first bind of all changes a setting, as an import does."""
    ran: list[int] = []

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        if not ran:
            torch.use_deterministic_algorithms(True)
        ran.append(1)
        return inner.bind(case, inputs)

    return bind


ROWS: list[tuple[str, str, str, str, Bind | Fresh]] = [
    ("block map", "block_map_of_group", "uniform_block", "each head has the map of its group's first head", wrong_mask(_map_of_group)),
    (
        "head group",
        "group_of_four_halved",
        "full",
        "of groups of 4 and 8 heads only half reach dk and dv",
        head_map(right_heads, _first_half_if_four),
    ),
    ("head group", "group_of_seven_cut", "causal", "groups of 7 lack their last head", head_map(right_heads, _without_last_of_seven)),
    (
        "head map",
        "heads_beyond_32",
        "full",
        "with 32 query heads all read key/value head 0",
        head_map(lambda case, h: h // case.group * (case.heads_q < 32)),
    ),
    ("strides", "do_single_ignored", "full", "a do of one number (that of out.sum()) is read wrongly", _single_do_halved),
    ("strides", "k_shared_ignored", "causal", "a k that the batch shares is read for its first element", wrong_inputs(_shared_read_once)),
    (
        "strides",
        "q_padding_ignored",
        "full",
        "the batch stride of a q with padded rows is that of rows without",
        wrong_inputs(_unpadded_batch_stride),
    ),
    ("scale", "scale_backward_usual", "full", "the backward has the usual scale whatever the forward's", _backward_of_usual_scale),
    (
        "softmax",
        "maximum_of_all",
        "causal",
        "the maximum is taken over masked keys too",
        lambda inner, case, inputs: _MaximumOfAll(case, inputs, {}),
    ),
    ("gradient", "do_faint_lost", "full", "elements of do below 1e-4 are taken for 0", _faint_do_lost),
    ("gradient", "do_loud_overflows", "causal", "elements of dv beyond 500 are infinite", _loud_do_overflows),
    ("gradient", "dq_one_key_nan", "causal", "dq of rows that see one key is NaN", wrong_grad("dq", _one_key_nan)),
    ("head_dim", "dk_beyond_128", "full", "dk after column 128 is 0", wrong_grad("dk", _beyond_128_zero)),
    (
        "head_dim",
        "dq_last_8",
        "full",
        "the last 8 columns of dq are 0 where head_dim is an odd multiple of 8",
        wrong_grad("dq", _last_8_zero),
    ),
    ("lse", "lse_of_other_head", "full", "lse is that of the head before", wrong_results(_other_heads_lse)),
    ("lse", "lse_one_key_base_2", "causal", "lse of rows that see one key is in base 2", wrong_results(_one_key_in_base_2)),
    (
        "state",
        "scale_kept_by_shape",
        "full",
        "the scale is that of the first case of the shape",
        _kept(_shape, lambda case, first: replace(case, scale=first.scale)),
    ),
    (
        "state",
        "mask_kept_by_longest",
        "causal_document",
        "what is made of the documents is kept by shape, number and longest",
        _kept(
            lambda case: (_shape(case), len(documents(case)), max(n for _, n in documents(case))),
            lambda case, first: replace(case, mask=first.mask),
        ),
    ),
    ("state", "out_kept_by_address", "full", "out is kept by the operands' addresses", Fresh(_out_kept_by_address)),
    ("state", "backward_twice", "full", "a call's second backward gives more than its first", _second_backward_doubled),
    ("state", "do_of_first", "full", "the second backward of a forward has the do of its first", _first_do_kept),
    ("state", "forward_twice", "causal", "a call's second forward gives less than its first", _second_forward_halved),
    ("settings", "default_dtype_left", "full", "the default dtype stays fp64", _leaves(lambda: torch.set_default_dtype(torch.float64))),
    ("settings", "default_device_left", "causal", "the default device stays another", _leaves(lambda: torch.set_default_device("meta"))),
    (
        "settings",
        "threads_left",
        "full",
        "the number of threads stays another",
        _leaves(lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    ),
    ("settings", "deterministic_left_once", "causal", "the first call of all demands deterministic algorithms", Fresh(_imports_change)),
    (
        "settings",
        "tf32_left",
        "full",
        "each call allows TF32 in all products of fp32",
        _leaves(lambda: torch.set_float32_matmul_precision("high")),
    ),
    ("settings", "autocast_left", "full", "autocast stays on", _leaves(lambda: torch.set_autocast_enabled("cpu", True))),
    ("settings", "directory_left", "causal", "the working directory stays another", _leaves(lambda: os.chdir(os.sep))),
    ("generator", "seeded", "full", "each call seeds the global generator", _leaves(lambda: torch.manual_seed(0))),
    ("generator", "draws", "causal", "each call draws from the global generator", _leaves(lambda: torch.rand(()))),
]
