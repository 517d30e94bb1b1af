"""FlashAttention-2 and 3 on one block of context parallelism: the runs of a segment as dense or varlen calls, explicit backward.

A row that sees no key lies in a sequence without keys (see `Round`): FA2 writes out 0 and lse +inf there, which becomes -inf. In the
backward such rows meet no key, so their lse does not matter. Dtypes bf16 and fp16, head_dim a multiple of 8.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.errors import DidNotRun
from pytest_longca.kernels.fa2 import Fa2, is_package, missing_size
from pytest_longca.outcome import Unsupported
from pytest_longca.parallel.kernel import INTERVALS, VarlenBlock
from pytest_longca.parallel.segment import Round


def _sides(call: Round, unlimited: int | None) -> tuple[int | None, int | None]:
    left, right = call.window
    return unlimited if left is None else left, unlimited if right is None else right


def _lengths(call: Round) -> tuple[Any, ...]:
    """cu_seqlens and the longest lengths; 2 for 1, because FA2 folds one-query sequences of grouped heads and then takes no empty ones."""
    return call.cu_seqlens_q, call.cu_seqlens_kv, max(2, call.max_seqlen_q), call.max_seqlen_kv


def _minus_infinity(lse: Tensor, call: Round) -> Tensor:
    return lse if call.is_dense else lse.masked_fill_(lse == torch.inf, -torch.inf)


class Fa2Block(VarlenBlock):
    """FA2 of the flash-attn package."""

    name = "fa2"

    def __init__(self) -> None:
        # A build with fewer head dims runs a larger one with wrong results and no word.
        head_dims = tuple(size for size in Fa2.capabilities.head_dims if missing_size(size) is None)
        self.capabilities = replace(Fa2.capabilities, masks=INTERVALS, head_dims=head_dims)

    def round_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Round, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_interface as fa2

        tail = (0.0, scale, call.is_causal, *_sides(call, -1), 0.0, None, False)
        if call.is_dense:
            out, lse = torch.ops.flash_attn._flash_attn_forward(q[None], k[None], v[None], *tail)[:2]
            return out[0], lse[0]
        out, lse = fa2._flash_attn_varlen_forward(q, k, v, *_lengths(call), *tail)[:2]
        return out, _minus_infinity(lse, call)

    def round_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Round, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn import flash_attn_interface as fa2

        grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        tail = (0.0, scale, call.is_causal, *_sides(call, -1), 0.0, None, False)
        if call.is_dense:
            operands = (x[None] for x in (do, q, k, v, out, lse, *grads))
            torch.ops.flash_attn._flash_attn_backward(*operands, *tail)
        else:
            fa2._flash_attn_varlen_backward(do, q, k, v, out, lse, *grads, *_lengths(call), *tail)
        return grads


class TorchFa2Block(VarlenBlock):
    """FA2 of PyTorch itself: nothing to install."""

    name = "fa2"
    capabilities = replace(Fa2.capabilities, masks=INTERVALS)

    def round_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Round, scale: float) -> tuple[Tensor, Tensor]:
        options = dict(zip(("window_size_left", "window_size_right"), _sides(call, None), strict=True))
        if call.is_dense:
            sizes = (None, None, len(q), len(k))
            out, lse = torch.ops.aten._flash_attention_forward(
                q[None], k[None], v[None], *sizes, 0.0, call.is_causal, False, scale=scale, **options
            )[:2]
            return out[0], lse[0]
        out, lse = torch.ops.aten._flash_attention_forward(q, k, v, *_lengths(call), 0.0, call.is_causal, False, scale=scale, **options)[:2]
        return out, _minus_infinity(lse, call)

    def round_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Round, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = dict(zip(("window_size_left", "window_size_right"), _sides(call, None), strict=True))
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        operands = (do, q, k, v, out, lse)
        if call.is_dense:
            sizes = (None, None, len(q), len(k))
            grads = torch.ops.aten._flash_attention_backward(
                *(x[None] for x in operands), *sizes, 0.0, call.is_causal, *no_dropout, scale=scale, **options
            )
            dq, dk, dv = (grad[0] for grad in grads)
            return dq, dk, dv
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *operands, *_lengths(call), 0.0, call.is_causal, *no_dropout, scale=scale, **options
        )
        return dq, dk, dv


def fa2_block() -> VarlenBlock:
    """The flash-attn package's FA2 where it is installed, else PyTorch's."""
    return Fa2Block() if is_package() else TorchFa2Block()


class Fa3Block(VarlenBlock):
    """FA3, forward; its wheels have no backward."""

    name = "fa3"
    capabilities = replace(Fa2.capabilities, masks=INTERVALS, capability=(9, 0), backward=False)

    def round_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Round, scale: float) -> tuple[Tensor, Tensor]:
        import flash_attn_interface as fa3

        window = (-1, -1) if call.is_causal else _sides(call, -1)
        options = {"softmax_scale": scale, "causal": call.is_causal, "window_size": window, "return_attn_probs": True}
        if call.is_dense:
            out, lse = fa3.flash_attn_func(q[None], k[None], v[None], **options)[:2]
            return out[0], lse[0]
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        out, lse = fa3.flash_attn_varlen_func(q, k, v, **dict(zip(names, _lengths(call), strict=True)), **options)[:2]
        return out, _minus_infinity(lse, call)

    def round_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Round, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise DidNotRun(Unsupported("fa3 serves context parallelism forward only: its wheels are built without a backward"))
