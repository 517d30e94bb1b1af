"""fa2_sparse: Block-Sparse-Attention, FlashAttention-2 with a block map of 128 x 128.

Algorithm: FlashAttention-2 that skips the blocks which the map of its query head leaves out.
Masks: uniform blocks of a multiple of 128. The package turns the map into lists in Python in every call, forward and backward, and that
is timed with it: it is the only public differentiable path. Layout: THD; the batch is packed, with the same map for each element.
Dtypes: bf16, fp16. Head dims: 32, 64, 128. GQA: yes, with a map for each query head. Directions: forward and backward.
Architectures: from sm80. Determinism: forward; not dq. lse: natural, +inf where a row sees nothing, made -inf here; out is 0 there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca import block_snippets, blocks
from pytest_longca.backend import BackendCall
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import aligned
from pytest_longca.snippets import MINUS_INFINITY

BLOCK = 128


class Fa2Sparse(Kernel):
    """The block_sparse_attn package on uniform blocks."""

    name = "fa2_sparse"
    source = "block_sparse_attn"
    requires = (
        Requirement(
            distribution="block_sparse_attn",
            how="build it from https://github.com/mit-han-lab/Block-Sparse-Attention; it is not on PyPI",
        ),
    )
    capabilities = Capabilities(
        masks=frozenset({Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=(32, 64, 128),
        devices=frozenset({"cuda"}),
        capability=(8, 0),
        unequal_head_dims=False,
    )
    device_kernel_pattern = r"flash_(fwd|bwd)\w*block"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        size = blocks.uniform_size(case.mask)
        return None if size and size % BLOCK == 0 else f"takes uniform blocks of a multiple of {BLOCK} tokens"

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        from block_sparse_attn import block_sparse_attn_func

        device = inputs.q.device
        block_map = blocks.checked_map(case.mask, case.heads_q, device)
        size = blocks.uniform_size(case.mask)
        assert size, "supports refuses blocks of several sizes"
        fine = blocks.refine(block_map, size // BLOCK).expand(case.batch, case.heads_q, -1, -1).contiguous()
        head_mask_type = torch.ones(case.heads_q, dtype=torch.int32, device=device)
        lengths = (case.seqlen_q, case.seqlen_kv)
        offsets = [torch.arange(case.batch + 1, dtype=torch.int32, device=device) * length for length in lengths]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            packed = (aligned(x).flatten(0, 1) for x in (q, k, v))
            out, lse, _ = block_sparse_attn_func(
                *packed, *offsets, head_mask_type, None, fine, *lengths, 0.0, softmax_scale=case.scale, return_attn_probs=True
            )
            lse = lse[:, :, : case.seqlen_q]
            return out.unflatten(0, (case.batch, -1)), torch.where(lse.isposinf(), float("-inf"), lse)

        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, {"source": "block_sparse_attn"})

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        fine = ([BLOCK] * (seqlen // BLOCK) for seqlen in (case.seqlen_q, case.seqlen_kv))
        return f"""\
from block_sparse_attn import block_sparse_attn_func

{block_snippets.block_map(*fine)}
MAP = BLOCK_MAP.expand(BATCH, HEADS_Q, -1, -1).contiguous()
HEAD_MASK_TYPE = torch.ones(HEADS_Q, dtype=torch.int32, device=DEVICE)
CU_SEQLENS = [torch.arange(BATCH + 1, dtype=torch.int32, device=DEVICE) * seqlen for seqlen in (SEQLEN_Q, SEQLEN_KV)]


def attention(q, k, v):
    packed = (aligned(x).flatten(0, 1) for x in (q, k, v))
    out, lse, _ = block_sparse_attn_func(
        *packed, *CU_SEQLENS, HEAD_MASK_TYPE, None, MAP, SEQLEN_Q, SEQLEN_KV, 0.0, softmax_scale=SCALE, return_attn_probs=True
    )
    lse = lse[:, :, :SEQLEN_Q]
    return out.unflatten(0, (BATCH, -1)), {MINUS_INFINITY}
"""
