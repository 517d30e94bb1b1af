"""A fused kernel's arithmetic in plain torch: what an honest bf16 or fp16 kernel rounds, and where."""

import math

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import TORCH_DTYPES, Inputs
from pytest_longca.judge import Result

BLOCK = 128
"""Keys after which the running maximum moves on."""


def fused(case: Case, inputs: Inputs, round_p: bool = False, fold_scale: bool = False, sum_heads: bool = False) -> Result:
    """Scores, softmax, lse, D and sums in fp32; P, dS and results rounded; dk and dv of each query head rounded before the group's sum.

    The forward rounds P relative to the running maximum, the backward P = exp(score - lse); D comes from the rounded out.
    `round_p` forms dS from the rounded P, as torch's memory-efficient attention does; `fold_scale` rounds scale * dS instead of dS;
    `sum_heads` does not round what single heads give to dk and dv, as FlashMask's one sum of a group does not.
    """
    low = TORCH_DTYPES[case.dtype]
    q, do = (x.float().transpose(1, 2) for x in (inputs.q, inputs.do))
    k, v = (x.float().transpose(1, 2).repeat_interleave(case.group, 1) for x in (inputs.k, inputs.v))
    scores = (q @ k.mT * case.scale).masked_fill(~case.mask.dense(), -math.inf)
    out, lse = _forward(scores, v, low)
    p = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    delta = (out.float() * do).sum(-1, keepdim=True)
    rounded = p.to(low).float()
    before, after = (case.scale, 1.0) if fold_scale else (1.0, case.scale)
    ds = ((rounded if round_p else p) * (do @ v.mT - delta) * before).to(low).float()
    dq, dk, dv = ds @ k * after, ds.mT @ q * after, rounded.mT @ do

    def of_group(x: Tensor) -> Tensor:
        parts = x if sum_heads else x.to(low).float()
        return parts.unflatten(1, (case.heads_kv, case.group)).sum(2)

    tensors = (x.to(low).transpose(1, 2) for x in (out, dq, of_group(dk), of_group(dv)))
    first, *gradients = tensors
    return Result(first, lse[..., 0], *gradients)


def _forward(scores: Tensor, v: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse `[..., 1]`, block by block of keys."""
    highest = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    total, sums = torch.zeros_like(highest), scores.new_zeros(*scores.shape[:-1], v.shape[-1])
    for at in range(0, scores.shape[-1], BLOCK):
        block = scores[..., at : at + BLOCK]
        higher = torch.maximum(highest, block.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -math.inf, 0.0)
        p, before = (block - shift).exp(), (highest - shift).exp()
        total = total * before + p.sum(-1, keepdim=True)
        sums = sums * before + p.to(low).float() @ v[..., at : at + BLOCK, :]
        highest = higher
    empty = total == 0
    return (sums / total.masked_fill(empty, 1.0)).to(low), (highest + total.log()).masked_fill(empty, -math.inf)
