"""vsa_fastvideo_triton: FastVideo's own Triton kernels for video sparse attention, what vsa_triton is compared with.

Algorithm: block-sparse FlashAttention in blocks of 64 with separate kernels for dq and for dk and dv.
Masks: uniform and variable blocks, in upstream's padded layout (see vsa). Layout: BHSD, made contiguous by upstream. Dtypes: bf16.
Head dims: powers of two from 16 to 128. GQA: no. Directions: forward and backward, through upstream's autograd; the backward inverts the
lists and scales a copy of k in every call. Architectures: from sm80. Determinism: forward and dq; the lists are inverted by an atomic
counter, so that dk and dv sum their query blocks in the order in which programs happened to arrive. lse: upstream's is in base 2.
A row that sees nothing: out 0, lse -inf.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca import block_snippets
from pytest_longca.backend import BackendCall
from pytest_longca.block_layout import padded_blocks
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.kernels.vsa import BLOCK, FASTVIDEO, head_lists, refused_scale, snippet_lists
from pytest_longca.machine import Machine
from pytest_longca.mask import Form


class VsaFastvideoTriton(Kernel):
    """FastVideo's VSA on Triton."""

    name = "vsa_fastvideo_triton"
    source = "fastvideo-kernel"
    requires = (FASTVIDEO,)
    capabilities = Capabilities(
        masks=frozenset({Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16"}),
        head_dims=(16, 32, 64, 128),
        devices=frozenset({"cuda"}),
        capability=(8, 0),
        gqa=False,
        unequal_head_dims=False,
    )
    compiles_per_shape = True  # the forward is tuned anew for each number of queries
    device_kernel_pattern = r"_attn_fwd_sparse|_attn_bwd"

    def compiles_to_disk(self, machine: Machine) -> bool:
        return True

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        return refused_scale(case)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        import fastvideo_kernel.block_sparse_attn  # noqa: F401  # registers the operators

        op = torch.ops.fastvideo_kernel.block_sparse_attn_triton
        layout = padded_blocks(case.mask, case.heads_q, inputs.q.device, BLOCK)
        lists = [x.expand(case.batch, *x.shape[1:]).contiguous() for x in head_lists(layout, case.heads_q)]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse_log2 = op(layout.q.pad(q), layout.kv.pad(k), layout.kv.pad(v), *lists, layout.kv.sizes)
            return layout.q.unpad(out).transpose(1, 2), layout.q.unpad(lse_log2) * math.log(2)

        facts = {"source": "fastvideo_kernel.block_sparse_attn_triton", **layout.facts()}
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        layout = padded_blocks(case.mask, case.heads_q, "cpu", BLOCK)
        out, lse = (block_snippets.unpad(layout, name) for name in ("out", "lse"))
        return f"""\
{snippet_lists(layout)}
INDEX, NUM = (x.expand(BATCH, *x.shape[1:]).contiguous() for x in (INDEX, NUM))


def attention(q, k, v):
    q, k, v = {block_snippets.pad(layout)}
    out, lse = torch.ops.fastvideo_kernel.block_sparse_attn_triton(q, k, v, INDEX, NUM, LENGTHS)
    return {out}.transpose(1, 2), {lse} * math.log(2)
"""
