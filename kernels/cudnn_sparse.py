"""cudnn_sparse: cudnn.block_sparse_attention, CuTe DSL kernels for blocks of 64 and 128.

Algorithm: block-sparse FlashAttention with TMA and WGMMA, one list of key blocks for each query block and head.
Masks: uniform and variable blocks. Blocks of a multiple of 128 run as 128, the others as 64; blocks that are no multiple of 64 are padded
inside the call (see vsa). Index values are not checked upstream, where a wrong one reads out of bounds: they are checked in `bind`.
Layout: BSHD; other strides than multiples of 16 bytes, and stride 0, are copied. Dtypes: bf16, fp16. Head dims: 64, 96, 128 each.
GQA: yes in the forward. Directions: forward; backward for bf16, MHA and head dims of 128. Upstream has no autograd: its explicit backward
is called from an autograd function of ours. Architectures: sm90. Determinism: forward. lse: natural.
A row that sees nothing: out 0, lse -inf.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_longca import block_snippets, blocks
from pytest_longca.backend import BackendCall
from pytest_longca.block_layout import padded_blocks
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.kernels.cudnn import FRONTEND
from pytest_longca.kernels.cudnn_flex import DSL
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import aligned


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments that forward and backward share. `empty` says that some query block selects nothing.

    `sizes` int32 `[batch, heads_q, blocks_kv]`: upstream's forward makes that of a shorter one in every call. Its backward takes `[batch,
    blocks_kv]`, which is the first head's, as heads do not differ.
    """

    index: Tensor
    num: Tensor
    sizes: Tensor | None
    block: int
    scale: float
    empty: bool

    def arguments(self) -> dict[str, Any]:
        return {
            "q2k_block_index": self.index,
            "q2k_block_nums": self.num,
            "sparse_block_size": self.block,
            "softmax_scale": self.scale,
            "layout": "bshd",
        }


class CudnnSparse(Kernel):
    """cuDNN's block-sparse attention."""

    name = "cudnn_sparse"
    source = "nvidia-cudnn-frontend"
    requires = (FRONTEND, DSL)
    capabilities = Capabilities(
        masks=frozenset({Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=(64, 96, 128),
        devices=frozenset({"cuda"}),
        capability=(9, 0),
    )
    compiles_per_head_dim = True
    device_kernel_pattern = r"(?i)BlockSparseAttn|bsa|cutlass"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        backward = case.direction.needs_backward
        rules = (
            (machine.capability != (9, 0), "is bound for compute capability 9.0 only: elsewhere upstream's limits differ"),
            (backward and case.dtype != "bf16", f"has a backward for bf16, not {case.dtype}"),
            (backward and case.group > 1, "has a backward for as many key/value heads as query heads"),
            (backward and (case.head_dim, case.head_dim_v) != (128, 128), f"has a backward for head dims of 128, not {case.head_dim}"),
        )
        return next((reason for broken, reason in rules if broken), None)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        import cudnn.block_sparse_attention  # noqa: F401  # a missing or broken install shows here, not in the first call

        block = block_of(case)
        layout = padded_blocks(case.mask, case.heads_q, inputs.q.device, block)
        lists = blocks.padded_lists(layout.block_map)
        blocks.check_lists(lists, layout.block_map.shape[-1])
        index, num = (x.expand(case.batch, case.heads_q, *x.shape[1:]).contiguous() for x in (lists.index, lists.num))
        sizes = layout.kv.sizes.expand(*num.shape[:2], -1).contiguous() if layout.kv.slots is not None else None
        plan = Plan(index, num, sizes, block, case.scale, bool((num == 0).any()))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (aligned(side.pad(x).transpose(1, 2)) for side, x in ((layout.q, q), (layout.kv, k), (layout.kv, v)))
            out, lse = cudnn_block_sparse(q, k, v, plan)
            return layout.q.unpad(out.transpose(1, 2)).transpose(1, 2), layout.q.unpad(lse)

        facts = {"source": "cudnn.block_sparse_attention", "block": str(block), **layout.facts()}
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        block = block_of(case)
        layout = padded_blocks(case.mask, case.heads_q, "cpu", block)
        out = "out" if layout.q.slots is None else f"{block_snippets.unpad(layout, 'out.transpose(1, 2)')}.transpose(1, 2)"
        is_padded = layout.kv.slots is not None
        sizes = "torch.tensor(SIZES_KV, dtype=torch.int32, device=DEVICE).expand(*NUM.shape[:2], -1).contiguous()" if is_padded else "None"
        return f"""\
from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

{block_snippets.padded_map(layout)}
{block_snippets.LISTS}
INDEX = INDEX[:, :, : max(1, int(NUM.max()))]
INDEX, NUM = (x.expand(BATCH, HEADS_Q, *x.shape[1:]).contiguous() for x in (INDEX, NUM))
LISTS = dict(q2k_block_index=INDEX, q2k_block_nums=NUM, sparse_block_size={block}, softmax_scale=SCALE, layout="bshd")
LENGTHS = {sizes}

{block_snippets.padding(layout, block)}
{FUNCTION}

def attention(q, k, v):
    q, k, v = (aligned(x.transpose(1, 2)) for x in ({block_snippets.pad(layout)}))
    out, lse = Attention.apply(q, k, v)
    return {out}, {block_snippets.unpad(layout, "lse")}
"""


FUNCTION = '''\
class Attention(torch.autograd.Function):
    """Forward and backward as one differentiable function."""

    @staticmethod
    def forward(ctx, q, k, v):
        empty = bool((NUM == 0).any())
        result = block_sparse_attention_forward(q, k, v, **LISTS, block_sizes=LENGTHS, allow_empty_block_nums=empty)
        out, lse = result["o_tensor"], result["lse_tensor"]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _):
        lengths = None if LENGTHS is None else LENGTHS[:, 0].contiguous()
        result = block_sparse_attention_backward(aligned(do), *ctx.saved_tensors, **LISTS, block_sizes=lengths)
        return result["dq_tensor"], result["dk_tensor"], result["dv_tensor"]
'''
"""Lines of a standalone file: `CudnnBlockSparse` below, with its plan in names."""


def block_of(case: Case) -> int:
    """The block size that upstream is given."""
    uniform = blocks.uniform_size(case.mask)
    return 128 if uniform and uniform % 128 == 0 else 64


def cudnn_block_sparse(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of BSHD operands; out is differentiable."""
    out, lse = CudnnBlockSparse.apply(q, k, v, plan)
    return out, lse


class CudnnBlockSparse(torch.autograd.Function):
    """cuDNN's forward and explicit backward as one differentiable function. Its compiler reports on stdout: to stderr."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        with contextlib.redirect_stdout(sys.stderr):
            result = block_sparse_attention_forward(q, k, v, **plan.arguments(), block_sizes=plan.sizes, allow_empty_block_nums=plan.empty)
        out, lse = result["o_tensor"], result["lse_tensor"]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        q, k, v, out, lse = ctx.saved_tensors
        sizes = None if ctx.plan.sizes is None else ctx.plan.sizes[:, 0].contiguous()
        with contextlib.redirect_stdout(sys.stderr):
            result = block_sparse_attention_backward(aligned(grads[0]), q, k, v, out, lse, **ctx.plan.arguments(), block_sizes=sizes)
        return result["dq_tensor"], result["dk_tensor"], result["dv_tensor"], None
