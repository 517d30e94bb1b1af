"""Block-sparse attention in Triton, for uniform and variable blocks: our own kernel for the masks of VSA.

Algorithm: each query tile walks the list of key tiles that its block selects, with an online softmax in base 2; the backward recomputes P
from lse in two kernels, one for dq (which also makes delta = rowsum(out * do)) and one for dk and dv, which walks the transposed lists
and sums the query heads of a group itself. Blocks lie as they are, at cumulative offsets: nothing is padded or gathered in memory.
Touching selected blocks become one run of tokens, so that small and odd blocks still fill tiles.
Layout: BSHD in any strides with a dense last dimension. Dtypes: bf16, fp16; in Triton's interpreter fp32 and fp16. Head dims: 1 to 128,
head_dim_v free (64 and 128 unmasked, others padded inside). GQA: yes, with one map for all heads or one for each query head.
Directions: forward, backward. Architectures: what Triton compiles for; tensor descriptors (TMA) from sm90 on. Determinism: yes, no atomics.
lse: natural logarithm. A row that sees nothing: out 0, lse -inf, gradients 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca import block_snippets, blocks
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Capabilities, Kernel, Requirement
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.snippets import OWN_TRITON


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is launched.

    `tma` reads the other side's full tiles through tensor descriptors where strides allow it; `in_registers` (not for dk and dv,
    which need theirs for sums) keeps the program's own operands in registers instead of shared memory. `max_registers` a thread lets
    one more program live on a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    in_registers: bool = False
    max_registers: int | None = None

    def keeps_in_registers(self, head_dim: int) -> bool:
        """Whether the own operands of this padded head dim are kept in registers.

        Where a tile of P is as wide as they are, ptxas gives P the registers of q, which the next round still needs, and every row is wrong
        (ptxas 12.8, which Triton 3.6 brings along; not that of Triton 3.9).
        """
        return self.in_registers and head_dim != self.block_n


@dataclass(frozen=True, slots=True)
class Configs:
    """The configurations of the three kernels."""

    forward: Config
    dq: Config
    dkdv: Config


CONFIGS: dict[int, Configs] = {
    128: Configs(Config(128, 64, 8, 2, True, max_registers=128), Config(64, 64, 4, 3, True, True), Config(64, 64, 4, 2, True)),
    64: Configs(Config(64, 64, 4, 3, True, True), Config(64, 64, 4, 3, True, True), Config(64, 64, 4, 2, True)),
    1: Configs(Config(64, 64, 4, 3, True, True), Config(64, 64, 4, 2, True), Config(32, 64, 4, 3, True)),
}
"""By the largest of 128, 64 and 1 that divides every block size."""

INTERPRETED = Configs(Config(32, 32), Config(32, 32), Config(32, 32))
"""Triton's interpreter pays for each tile, not for its size, and small tests should still have more than one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One kernel's work: the tiles that programs own, and for each block the tiles that it visits.

    `order` int32 `[map_heads, num_tiles]`: the tiles by falling length of their lists, so that the last programs are the short ones.
    """

    rows: blocks.RowTiles
    lists: blocks.TileLists
    order: Tensor
    map_heads: int
    num_blocks: int
    full_own: bool

    @property
    def num_tiles(self) -> int:
        return self.rows.start.numel()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels need to know of a block map; `dq` and `dkdv` are None for a forward only."""

    configs: Configs
    forward: Side
    dq: Side | None
    dkdv: Side | None


def choose_configs(sizes_q: Sequence[int], sizes_kv: Sequence[int]) -> Configs:
    """The table's row for these block sizes."""
    divisor = math.gcd(*sizes_q, *sizes_kv)
    return CONFIGS[next(size for size in CONFIGS if divisor % size == 0)]


def make_plan(
    block_map: Tensor, sizes_q: Sequence[int], sizes_kv: Sequence[int], heads_kv: int, heads_q: int, configs: Configs, backward: bool = True
) -> Plan:
    """The plan of a map `[1 or heads_q, blocks_q, blocks_kv]` that lies on the device where the kernels run."""
    forward = make_side(block_map, sizes_q, sizes_kv, configs.forward.block_m, configs.forward.block_n)
    if not backward:
        return Plan(configs, forward, None, None)
    same_tiles = (configs.dq.block_m, configs.dq.block_n) == (configs.forward.block_m, configs.forward.block_n)
    dq = forward if same_tiles else make_side(block_map, sizes_q, sizes_kv, configs.dq.block_m, configs.dq.block_n)
    # Under GQA a key block's list names the query heads of its group one after the other, even where they share a map.
    group = heads_q // heads_kv
    each_head = block_map.expand(group, -1, -1) if block_map.shape[0] == 1 else block_map
    seen = blocks.transposed(each_head, each_head.shape[0] // group)
    return Plan(configs, forward, dq, make_side(seen, sizes_kv, sizes_q, configs.dkdv.block_n, configs.dkdv.block_m, parts=group))


def make_side(
    block_map: Tensor, sizes_own: Sequence[int], sizes_other: Sequence[int], own_tile: int, other_tile: int, parts: int = 1
) -> Side:
    """One kernel's work, in tiles of `own_tile` and `other_tile` tokens; `parts` as in `blocks.tile_lists`."""
    rows = blocks.row_tiles(sizes_own, own_tile, block_map.device)
    lists = blocks.tile_lists(block_map, sizes_other, other_tile, parts)
    heads, num_blocks, _ = block_map.shape
    lengths = lists.indptr.diff().view(heads, num_blocks)[:, rows.block]
    order = lengths.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return Side(rows, lists, order, heads, num_blocks, all(size % own_tile == 0 for size in sizes_own))


class VsaTriton(Kernel):
    """Block-sparse attention in Triton, uniform and variable blocks, forward and backward."""

    name = "vsa_triton"
    source = "pytest-longca"
    requires = (Requirement(distribution="triton", how="pip install 'pytest-longca[triton]'", at_least="3.6"),)
    capabilities = Capabilities(masks=frozenset({Form.BLOCK_MAP}), dtypes=frozenset({"fp32", "bf16", "fp16"}), head_dims=range(1, 129))
    deterministic = True
    compiles_per_head_dim = True
    is_triton = True
    device_kernel_pattern = "vsa_triton_"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        if case.scale < 0:
            return f"takes scales that are not negative, not {case.scale}: it takes the maximum before scaling"
        if machine.device == "cpu" and not machine.interpret:
            return "runs on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
        if machine.interpret and case.dtype == "bf16":
            return "takes no bf16 in Triton's interpreter, which computes on its raw bits"
        if machine.device == "cuda" and not machine.interpret and case.dtype == "fp32":
            return "takes bf16 and fp16 on a GPU, not fp32"
        return None

    def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
        from pytest_longca.kernels.vsa_triton_launch import block_sparse_attention

        sparse = blocks.of(case.mask)
        sizes = sparse.sizes_q(), sparse.sizes_kv()
        configs = INTERPRETED if inputs.q.device.type == "cpu" else choose_configs(*sizes)
        block_map = blocks.checked_map(case.mask, case.heads_q, inputs.q.device)
        plan = make_plan(block_map, *sizes, case.heads_kv, case.heads_q, configs, case.direction.needs_backward)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return block_sparse_attention(q, k, v, plan, case.scale)

        return AutogradCall(attend, inputs, case.direction.needs_backward, backend="triton")

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        sparse = blocks.of(case.mask)
        return f"""\
{OWN_TRITON}
from pytest_longca.kernels.vsa_triton import INTERPRETED, choose_configs, make_plan
from pytest_longca.kernels.vsa_triton_launch import block_sparse_attention

{block_snippets.block_map(sparse.sizes_q(), sparse.sizes_kv())}
CONFIGS = INTERPRETED if DEVICE == "cpu" else choose_configs(SIZES_Q, SIZES_KV)
PLAN = make_plan(BLOCK_MAP, SIZES_Q, SIZES_KV, HEADS_KV, HEADS_Q, CONFIGS, BACKWARD)


def attention(q, k, v):
    return block_sparse_attention(q, k, v, PLAN, SCALE)
"""
