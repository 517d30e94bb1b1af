"""flashinfer: FlashInfer's block-sparse wrappers.

Algorithm: FlashAttention over gathered keys. Where all heads share a uniform map, BlockSparseAttentionWrapper (pages of a block); otherwise
VariableBlockSparseAttentionWrapper, whose plan lists single tokens: 4 bytes for each selected key of each query block and key/value head.
Masks: uniform and variable blocks; the query heads of a group share a map. The plan, the workspace and the first compilation (more than a
minute with nvcc) belong to `bind`. Layout: tokens first (shared map) or heads first; copied. One batch element a call, in a loop.
Dtypes: bf16, fp16. Head dims: 64, 128, 256. GQA: yes. Directions: forward. Architectures: from sm80. Determinism: yes.
lse: upstream's is in base 2, and its minus infinity is -50000 (`math::inf` in its math.cuh), which a row that sees nothing gets beside an
out of 0: made -inf here. Up to 0.6.17 what is masked has that value as its product of q and k before the scale, so that a row whose every
product lies below may lose all its keys: a known failure. A map that selects nothing at all is refused: the plan fails on it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_longca import block_snippets, blocks
from pytest_longca.backend import BackendCall, refusals
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.machine import Machine
from pytest_longca.mask import Form

WORKSPACE_BYTES = 128 * 2**20
INT_WORKSPACE_BYTES = 64 * 2**20
"""The wrapper's own 8 MiB end at some ten thousand rows of blocks."""
LOWEST_LOG2 = -5e4
"""What the library writes for the lse of a row that sees nothing."""
MAX_ROWS = 32768
"""Entries of the wrapper's buffer of row lengths: one for each row of blocks, of each key/value head where maps differ."""

SHARED_PLAN = """\
WRAPPER = flashinfer.BlockSparseAttentionWrapper(WORKSPACES[0])
WRAPPER.reset_workspace_buffer(*WORKSPACES)
INDPTR = torch.tensor([0, *BLOCK_MAP[0].sum(-1).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
INDICES = BLOCK_MAP[0].nonzero()[:, 1].to(torch.int32)
WRAPPER.plan(
    INDPTR, INDICES, SEQLEN_Q, SEQLEN_KV, SIZES_Q[0], SIZES_KV[0], HEADS_Q, HEADS_KV, HEAD_DIM,
    sm_scale=SCALE, q_data_type=DTYPE, o_data_type=DTYPE,
)


def attention(q, k, v):
    parts = [WRAPPER.run(*(x[b].contiguous() for x in (q, k, v)), return_lse=True) for b in range(BATCH)]
    out, lse_log2 = (torch.stack(x) for x in zip(*parts))
    return out, natural(lse_log2.transpose(1, 2))
"""
VARIABLE_PLAN = """\
WRAPPER = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACES[0])
WRAPPER.reset_workspace_buffer(*WORKSPACES)
MAP = BLOCK_MAP.expand(HEADS_Q, -1, -1)[:: HEADS_Q // HEADS_KV].contiguous()
SIZES = [torch.tensor([sizes] * HEADS_KV, dtype=torch.int32, device=DEVICE) for sizes in (SIZES_Q, SIZES_KV)]
WRAPPER.plan(MAP, *SIZES, HEADS_Q, HEADS_KV, HEAD_DIM, sm_scale=SCALE, q_data_type=DTYPE)


def attention(q, k, v):
    parts = [WRAPPER.run(*(x[b].transpose(0, 1) for x in (q, k, v)), return_lse=True) for b in range(BATCH)]
    out, lse_log2 = (torch.stack(x) for x in zip(*parts))
    return out.transpose(1, 2), natural(lse_log2)
"""
"""The two calls as lines of a standalone file, as `plan_shared` and `plan_variable` make them."""

OneElement = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class FlashInfer(Kernel):
    """FlashInfer's block-sparse attention, forward only."""

    name = "flashinfer"
    source = "flashinfer-python"
    requires = (Requirement(distribution="flashinfer-python", at_least="0.6", how="pip install 'pytest-longca[flashinfer]'"),)
    capabilities = Capabilities(
        masks=frozenset({Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=(64, 128, 256),
        devices=frozenset({"cuda"}),
        capability=(8, 0),
        backward=False,
        unequal_head_dims=False,
    )
    compiles_per_head_dim = True
    deterministic = True
    device_kernel_pattern = r"PrefillWithKVCacheKernel|BatchPrefillWithPagedKVCacheKernel"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        if not blocks.groups_share(case.mask, case.group):
            return "takes one map for the query heads of a group"
        rows = len(blocks.of(case.mask).sizes_q()) * (1 if one_map(case) else case.heads_kv)
        if rows > MAX_ROWS:
            return f"has room for {MAX_ROWS} rows of blocks (times key/value heads where maps differ), not {rows}"
        return "fails on a map that selects nothing" if not selects_anything(case) else None

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        with refusals(self.name):
            element = (plan_shared if one_map(case) else plan_variable)(case, inputs)
        has_empty_rows = blocks.has_empty_rows(case.mask)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            parts = [element(q[b], k[b], v[b]) for b in range(case.batch)]
            out, lse_log2 = (torch.stack(x) for x in zip(*parts, strict=True))
            lse = lse_log2 * math.log(2)
            return out, lse.masked_fill(lse_log2 == LOWEST_LOG2, -torch.inf) if has_empty_rows else lse

        wrapper = "BlockSparseAttentionWrapper" if one_map(case) else "VariableBlockSparseAttentionWrapper"
        facts = {"source": f"flashinfer.{wrapper}"}
        if has_empty_rows:
            facts["empty_rows"] = f"lse {LOWEST_LOG2:.0f} in base 2 turned into -inf"
        return BackendCall(self.name, attend, inputs, False, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        sparse = blocks.of(case.mask)
        plan = SHARED_PLAN if one_map(case) else VARIABLE_PLAN
        return f"""\
import math

import flashinfer

{block_snippets.block_map(sparse.sizes_q(), sparse.sizes_kv())}
WORKSPACES = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in ({WORKSPACE_BYTES}, {INT_WORKSPACE_BYTES})]


def natural(lse_log2):  # -inf where the library writes its own minus infinity
    return (lse_log2 * math.log(2)).masked_fill(lse_log2 == {LOWEST_LOG2:.0f}, -torch.inf)


{plan}"""


def one_map(case: Case) -> bool:
    """Whether the wrapper for one uniform map serves the case: rows of fewer than 4 queries would go to its decode kernel."""
    size = blocks.uniform_size(case.mask)
    return case.mask.heads == 1 and size is not None and size * case.group >= 4


def selects_anything(case: Case) -> bool:
    return not blocks.has_empty_rows(case.mask) or bool(blocks.of(case.mask).expand().any())


def _workspaces(device: torch.device) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in (WORKSPACE_BYTES, INT_WORKSPACE_BYTES))  # type: ignore[return-value]  # two


def plan_shared(case: Case, inputs: Inputs) -> OneElement:
    """A call for one batch element with BlockSparseAttentionWrapper."""
    import flashinfer

    device, dtype = inputs.q.device, inputs.q.dtype
    size = blocks.uniform_size(case.mask)
    lists = blocks.csr(blocks.checked_map(case.mask, case.heads_q, device))
    workspaces = _workspaces(device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspaces[0])
    wrapper.reset_workspace_buffer(*workspaces)
    wrapper.plan(
        lists.indptr.to(torch.int32), lists.indices, case.seqlen_q, case.seqlen_kv, size, size, case.heads_q, case.heads_kv, case.head_dim,
        sm_scale=case.scale, q_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = wrapper.run(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
        return out, lse.transpose(0, 1)

    return run


def plan_variable(case: Case, inputs: Inputs) -> OneElement:
    """A call for one batch element with VariableBlockSparseAttentionWrapper."""
    import flashinfer

    device, sparse = inputs.q.device, blocks.of(case.mask)
    block_map = blocks.checked_map(case.mask, case.heads_q, device)
    block_map = block_map.expand(case.heads_kv, -1, -1) if case.mask.heads == 1 else block_map[:: case.group]
    sizes = [torch.tensor(x, dtype=torch.int32, device=device).expand(case.heads_kv, -1) for x in (sparse.sizes_q(), sparse.sizes_kv())]
    workspaces = _workspaces(device)
    wrapper: Any = flashinfer.VariableBlockSparseAttentionWrapper(workspaces[0])
    wrapper.reset_workspace_buffer(*workspaces)
    wrapper.plan(
        block_map.contiguous(), *(x.contiguous() for x in sizes), case.heads_q, case.heads_kv, case.head_dim,
        sm_scale=case.scale, q_data_type=inputs.q.dtype,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = wrapper.run(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), return_lse=True)
        return out.transpose(0, 1), lse

    return run
