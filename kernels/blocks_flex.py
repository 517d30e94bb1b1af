"""FlexAttention on one block of context parallelism: any segment, by its BlockMask, through autograd.

FlexAttention has no backward that takes a softmax of more keys than the block's. Its own forward is run again instead, and its autograd is
given gradients of out and lse for which it computes the block's part of the merged attention: with w = exp(lse_block - lse) a row's share
of the merged softmax, d(out_block) = w do and d(lse_block) = w (do . out_block - do . out).
Not verified on hardware: on the CPU the forward is tested eagerly, and the gradients' rule on another attention with autograd.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.kernels.flex import Flex, uncompiled
from pytest_longca.parallel.kernel import INTERVALS
from pytest_longca.parallel.segment import Segment
from pytest_longca.parallel.segment_mask import SegmentMask

MAX_SHAPES = 256
"""Each shape of a block is compiled for itself."""


class FlexBlock:
    """flex_attention, compiled for each segment and shape."""

    name = "flex"
    capabilities = replace(
        Flex.capabilities, masks=INTERVALS, devices=frozenset({"cuda"}), capability=(8, 0), dtypes=frozenset({"fp32", "bf16", "fp16"}),
        head_dims=range(16, 257),
    )  # fmt: skip

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.attend(q, k, v, segment, scale)

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            own_out, own_lse = self.attend(q, k, v, segment, scale)
        wide = own_lse.dtype
        share = torch.exp(own_lse.detach() - lse).masked_fill(own_lse == -torch.inf, 0)  # [heads, rows]
        do_wide = do.to(wide)
        own_delta, delta = ((do_wide * x.detach()).sum(-1).mT for x in (own_out, out))
        grads = (do_wide * share.mT[..., None]).to(own_out.dtype), share * (own_delta - delta)
        dq, dk, dv = torch.autograd.grad((own_out, own_lse), (q, k, v), grads)
        return dq, dk, dv

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) of the block alone, differentiable."""
        run = _run(segment, (q, k, v), scale)
        out, extra = run(*(x[None].transpose(1, 2) for x in (q, k, v)))
        return out[0].transpose(0, 1), extra.lse[0].float()


def _run(segment: Segment, operands: tuple[Tensor, ...], scale: float) -> Callable[..., Any]:
    """flex_attention with the segment's mask; eager on the CPU."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, _ = operands
    key = ("flex", q.device, scale, *((x.shape, x.dtype) for x in operands))
    if key not in segment.cache:
        block_mask = SegmentMask(segment).block_mask(q.device)
        options = {"block_mask": block_mask, "scale": scale, "enable_gqa": q.shape[1] > k.shape[1], "return_aux": AuxRequest(lse=True)}
        segment.cache[key] = torch.compile(flex_attention, dynamic=False, fullgraph=True) if q.is_cuda else flex_attention, options
    function, options = segment.cache[key]

    def run(*tensors: Tensor) -> Any:
        context = torch._dynamo.config.patch(recompile_limit=MAX_SHAPES, fail_on_recompile_limit_hit=True) if q.is_cuda else uncompiled()
        with context:
            return function(*tensors, **options)

    return run
