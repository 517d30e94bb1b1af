"""Truth: what is held against a result: every row of it, or samples of a case that is too long, with the identities that all heads keep."""

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.identities import Identity, check_identities
from pytest_longca.inputs import Inputs
from pytest_longca.judge import Result, Verdict, judge
from pytest_longca.reference import cached_reference
from pytest_longca.samples import BUDGET_PAIRS, choose, judge_samples

Given = TypeVar("Given", Inputs, Result)
VERIFIED = "verified"
"""The fact that says how."""
ALL_ROWS, SAMPLED = "all rows", "sampled rows + identities"
CPU_BUDGET_PAIRS = 2**31
"""Visible pairs that are worth a full reference in fp64 on a CPU: some minutes."""
HOST_SCORES = 2**17
"""Up to so many scores a result is judged on the host: the thousand small operations of a reference cost a GPU more time than the work in
them, and processes that share a GPU do them one after another there."""
TENSOR_OF = {"sum of dv = sum of do": "dv", "sum of dk = 0": "dk", "<do, out> = <v, dv>": "dv", "<q, dq> = <k, dk>": "dq"}
"""The tensor that an identity is counted against."""


def verified_by(case: Case, device: torch.device) -> str:
    """How results of a case are judged on a device."""
    return ALL_ROWS if choose(case, budget_of(device)).is_full else SAMPLED


def budget_of(device: torch.device) -> float:
    """How many visible pairs are judged in full."""
    return BUDGET_PAIRS if device.type == "cuda" else CPU_BUDGET_PAIRS


def verdicts(case: Case, inputs: Inputs, result: Result) -> list[Verdict]:
    """The verdict on each tensor of a result of the case's own inputs."""
    inputs, result = where_judged(case, inputs), where_judged(case, result)
    choice = choose(case, budget_of(inputs.q.device))
    if choice.is_full:
        return judge(case, inputs, cached_reference(case, inputs, inputs.q.device), result)
    found = judge_samples(case, inputs, result, choice)
    if result.out is None or result.dk is None:
        return found
    worst = {verdict.tensor: verdict for verdict in found}
    for identity in check_identities(case, inputs, result):
        tensor = TENSOR_OF[identity.name]
        if identity.error_over_limit > worst[tensor].error_over_limit:
            worst[tensor] = _as_verdict(tensor, identity)
    return list(worst.values())


def where_judged(case: Case, given: Given) -> Given:
    """Operands or results of a case where they are judged: a small one's on the host."""
    return on_host(given) if case.num_scores <= HOST_SCORES else given


def on_host(given: Given) -> Given:
    """Operands or results in the host's memory; what shares memory along an axis (stride 0) still does. What is there already stays.

    One copy brings all of them: each waits for the device, and for whoever else has it.
    """
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    away = {name: x for name, x in fields.items() if isinstance(x, Tensor) and x.device.type != "cpu"}
    return dataclasses.replace(given, **fetched(away)) if away else given


@torch.no_grad()
def fetched(away: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors of one device in the host's memory, by one copy."""
    # The widest elements first: then each tensor begins at a multiple of its element's size.
    widest_first = sorted(away.items(), key=lambda item: -item[1].element_size())
    once = {name: x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())] for name, x in widest_first}
    every = torch.cat([_bytes(x) for x in once.values()]).cpu()
    parts = every.split([x.numel() * x.element_size() for x in once.values()])
    moved = zip(once.items(), parts, strict=True)
    return {name: part.view(x.dtype).view(x.shape).expand(away[name].shape) for (name, x), part in moved}


def _bytes(x: Tensor) -> Tensor:
    """A tensor's bytes in a row; a single number may have come with a stride of 0."""
    return x.reshape(-1).as_strided((x.numel(),), (1,)).view(torch.uint8)


def _as_verdict(tensor: str, identity: Identity) -> Verdict:
    message = (
        f"{identity.name} does not hold in batch {identity.batch}, key/value head {identity.head_kv}: "
        f"off by {identity.error_over_limit:.3g} times what rounding explains"
    )
    return Verdict(tensor, identity.error_over_limit, identity.ok, "" if identity.ok else message)
