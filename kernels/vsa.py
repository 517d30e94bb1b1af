"""vsa: FastVideo's video sparse attention, the ThunderKittens kernels of fastvideo-kernel.

Algorithm: block-sparse FlashAttention in blocks of 64, one list of key blocks for each query block and head.
Masks: uniform and variable blocks. Upstream keeps its data padded, every block at a multiple of 64. Ours are not: unless all blocks are
multiples of 64 the call copies tokens into that layout and back, and this is timed with it, as whoever has such data pays it.
Layout: BHSD, made contiguous by upstream. Dtypes: bf16. Head dims: 64, 128. GQA: no. One batch element a call, in a loop.
Directions: forward and backward, through upstream's autograd; the backward inverts the lists again in every call. Architectures: sm90.
Determinism: forward; gradients are added in any order. lse: upstream's is -sqrt(head_dim) times the natural one. Its online softmax drifts
by up to |score| 2^-24 for each key block (docs/block-sparse.md), which shows in large scores and long rows.
A row that sees nothing: undefined upstream (it reads before its list), so such a map is refused.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca import block_snippets, blocks
from pytest_longca.backend import BackendCall
from pytest_longca.block_layout import PaddedBlocks, padded_blocks
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.machine import Machine
from pytest_longca.mask import Form

BLOCK = 64
FASTVIDEO = Requirement(distribution="fastvideo-kernel", at_least="0.3.2", how="pip install 'pytest-longca[vsa]'")


class Vsa(Kernel):
    """FastVideo's VSA on ThunderKittens."""

    name = "vsa"
    source = "fastvideo-kernel"
    requires = (FASTVIDEO,)
    capabilities = Capabilities(
        masks=frozenset({Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16"}),
        head_dims=(64, 128),
        devices=frozenset({"cuda"}),
        capability=(9, 0),
        gqa=False,
        unequal_head_dims=False,
    )
    device_kernel_pattern = r"fwd_attend_ker|bwd_attend_ker"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        if machine.capability != (9, 0):
            return "has ThunderKittens kernels for compute capability 9.0 only"
        if blocks.has_empty_rows(case.mask):
            return "takes no query block that selects no key block: fastvideo-kernel (0.3.2) leaves its result undefined"
        return refused_scale(case)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        import fastvideo_kernel.block_sparse_attn  # noqa: F401  # registers the operators

        op = torch.ops.fastvideo_kernel.block_sparse_attn_sm90
        layout = padded_blocks(case.mask, case.heads_q, inputs.q.device, BLOCK)
        lists = head_lists(layout, case.heads_q)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = layout.q.pad(q), layout.kv.pad(k), layout.kv.pad(v)
            parts = [op(q[b : b + 1], k[b : b + 1], v[b : b + 1], *lists, layout.kv.sizes) for b in range(case.batch)]
            out, minus_lse = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
            lse = minus_lse.squeeze(-1) / -math.sqrt(case.head_dim)
            return layout.q.unpad(out).transpose(1, 2), layout.q.unpad(lse)

        facts = {"source": "fastvideo_kernel.block_sparse_attn_sm90", **layout.facts()}
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        layout = padded_blocks(case.mask, case.heads_q, "cpu", BLOCK)
        out, lse = (block_snippets.unpad(layout, name) for name in ("out", "lse"))
        return f"""\
{snippet_lists(layout)}
def attention(q, k, v):
    q, k, v = {block_snippets.pad(layout)}
    op = torch.ops.fastvideo_kernel.block_sparse_attn_sm90  # of one batch element
    parts = [op(q[b : b + 1], k[b : b + 1], v[b : b + 1], INDEX, NUM, LENGTHS) for b in range(BATCH)]
    out, minus_lse = (torch.cat(x) for x in zip(*parts))
    lse = minus_lse.squeeze(-1) / -math.sqrt(HEAD_DIM)
    return {out}.transpose(1, 2), {lse}
"""


def refused_scale(case: Case) -> str | None:
    """FastVideo's kernels have 1/sqrt(head_dim) built in."""
    built_in = case.head_dim**-0.5
    return None if math.isclose(case.scale, built_in) else f"has the scale {built_in:.6g} built in, not {case.scale:.6g}"


def head_lists(layout: PaddedBlocks, heads: int) -> tuple[Tensor, Tensor]:
    """Upstream's `(q2k_idx [1, heads, blocks_q, blocks_kv], q2k_num [1, heads, blocks_q])`: rows as long as the map is wide, -1 behind."""
    block_map = layout.block_map.expand(heads, -1, -1)
    lists = blocks.padded_lists(block_map, capacity=block_map.shape[-1])
    return lists.index[None], lists.num[None]


def snippet_lists(layout: PaddedBlocks) -> str:
    """Lines of a standalone file that load the operators and define INDEX and NUM as `head_lists` does, LENGTHS, and what pads blocks."""
    return f"""\
import math

import fastvideo_kernel.block_sparse_attn  # registers the operators

{block_snippets.padded_map(layout)}
{block_snippets.LISTS}
INDEX, NUM = (x.expand(HEADS_Q, *x.shape[1:])[None].contiguous() for x in (INDEX, NUM))
LENGTHS = torch.tensor(SIZES_KV, dtype=torch.int32, device=DEVICE)

{block_snippets.padding(layout, BLOCK)}"""
