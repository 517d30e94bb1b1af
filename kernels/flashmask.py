"""FlashMask: exact attention on FlashMask's column form, for all static masks; our own Triton kernel.

Algorithm: flash attention over tiles. A mask is two O(S) tables: the column form (the masked queries of each key, up to two intervals) and
its transpose (the visible keys of each query). Tiles are classified once from them: absent tiles are never visited, full tiles never
masked, partial tiles compared with the table of whichever side the program holds (dk and dv: columns; out and dq: rows).
Backward: dq by query blocks, then dk and dv by key blocks with the query heads of a group summed in registers; P is recomputed from lse.
The heaviest programs start first, and the last key blocks are split over their query heads, so that all SMs stop together.
Layout: BSHD with any strides whose last axis is contiguous. Dtypes: bf16, fp16; fp32 with IEEE products; no bf16 in Triton's interpreter.
Head dims: multiples of 8 from 16 to 256, head_dim_v may differ. GQA: yes. Directions: forward and backward, also from a merged
out and lse. lse: natural logarithm; a row that sees nothing gives out 0, lse -inf, gradients 0.
Architectures: sm90 with TMA; from sm80 with pointers and small tiles, which never ran on such hardware.
Determinism: yes, no atomics, sums in a fixed order.
Masks have one head axis for all heads; a batch axis is taken.
Source: FlashMask, arXiv:2410.01359.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Capabilities, Kernel, Requirement
from pytest_longca.kernels.flashmask_plan import Launch, Plan, Tile, make_plan
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.outcome import Unsupported
from pytest_longca.snippets import OWN_TRITON

Tiles = tuple[Tile, Tile, Tile]

HOPPER: dict[int, Tiles] = {
    64: (Tile(128, 64, 8, 3, 128), Tile(128, 64, 8, 2, 128), Tile(64, 64, 4, 2)),
    128: (Tile(128, 64, 8, 2, 128), Tile(64, 64, 4, 3, in_registers=2), Tile(64, 64, 4, 2, early=True)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
}
"""(forward, dq, dk and dv) for 2-byte dtypes on Hopper, by the largest padded head dim."""

PORTABLE: dict[int, Tiles] = {
    64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    256: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
"""The same for older architectures, which have less shared memory."""

IEEE: dict[int, Tiles] = {
    64: (Tile(32, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
    128: (Tile(32, 32, 8), Tile(32, 32, 8), Tile(32, 32, 8)),
    256: (Tile(16, 16, 8), Tile(16, 16, 8), Tile(16, 16, 8)),
}
"""The same for fp32, whose products run without tensor cores and hold their operands in registers."""

INTERPRETED: Tiles = (Tile(32, 32), Tile(32, 32), Tile(32, 32))
"""Triton's interpreter pays for each tile, not for its size."""


def choose_launch(head_dim: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """How the kernels are launched for the larger of the two head dims on a device."""
    if device.type == "cpu":
        return Launch(*INTERPRETED)
    properties = torch.cuda.get_device_properties(device)
    has_tma, is_half = properties.major >= 9, dtype.itemsize == 2
    table = IEEE if not is_half else HOPPER if has_tma else PORTABLE
    tiles = table[max(64, 1 << (head_dim - 1).bit_length())]
    return Launch(*tiles, tma=has_tma and is_half, processors=properties.multi_processor_count)


def plan_case(case: Case, launch: Launch, device: torch.device) -> Plan:
    """The plan of a case's mask; DidNotRun if it has no column form."""
    rows = case.mask.row_intervals(device)
    backward = case.direction.needs_backward
    plan = None if rows is None else make_plan(
        rows, case.seqlen_kv, fwd=launch.fwd, dq=launch.dq if backward else None, dkdv=launch.dkdv if backward else None,
        group=case.group, heads=case.heads_kv * (case.batch if case.mask.batch == 1 else 1), processors=launch.processors,
    )  # fmt: skip
    if plan is None:
        where = "row of visible keys" if rows is None else "column of masked queries"
        raise DidNotRun(Unsupported(f"takes two intervals in a row or column at most, and a {where} of {case.mask!r} has more: use flex"))
    return plan


class FlashMask(Kernel):
    """FlashMask's column form in Triton."""

    name = "flashmask"
    source = "pytest-longca"
    requires = (Requirement(distribution="triton", how="pip install 'pytest-longca[triton]'", at_least="3.6"),)
    capabilities = Capabilities(
        masks=frozenset({Form.ROW_INTERVALS}), dtypes=frozenset({"bf16", "fp16", "fp32"}), head_dims=range(16, 257, 8)
    )
    deterministic = True
    compiles_per_head_dim = True
    is_triton = True
    linear_memory = True
    device_kernel_pattern = r"^forward_kernel|^dq_kernel|^dkdv_kernel"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        interpreted = machine.device == "cpu"
        rules = (
            (interpreted and not machine.interpret, "runs on the CPU in Triton's interpreter only: set TRITON_INTERPRET=1 at the start"),
            (interpreted and case.dtype == "bf16", "takes no bf16 on the CPU: Triton's interpreter computes it wrongly; use fp32 or fp16"),
            (not interpreted and (machine.capability or (0, 0)) < (8, 0), "needs compute capability 8.0 or later"),
            (case.mask.heads > 1, "takes one mask for all heads"),
            (case.scale < 0, f"takes a positive scale, not {case.scale}: negate q instead"),
        )
        return next((reason for broken, reason in rules if broken), None)

    def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
        from pytest_longca.kernels.flashmask_attention import FlashMaskFunction

        device = inputs.q.device
        launch = choose_launch(max(case.head_dim, case.head_dim_v), inputs.q.dtype, device)
        plan = plan_case(case, launch, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = FlashMaskFunction.apply(q, k, v, plan, case.scale, launch)
            return out, lse

        facts = {"mask_form": "column form", "tma": str(launch.tma), "plan_bytes": str(plan.nbytes)}
        return AutogradCall(attend, inputs, case.direction.needs_backward, **facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        return f"""\
{OWN_TRITON}
from pytest_longca.intervals import two_runs
from pytest_longca.kernels.flashmask import choose_launch
from pytest_longca.kernels.flashmask_attention import FlashMaskFunction
from pytest_longca.kernels.flashmask_plan import make_plan

LAUNCH = choose_launch(max(HEAD_DIM, HEAD_DIM_V), DTYPE, torch.device(DEVICE))
PLAN = make_plan(
    two_runs(VISIBLE), SEQLEN_KV, fwd=LAUNCH.fwd, dq=LAUNCH.dq if BACKWARD else None, dkdv=LAUNCH.dkdv if BACKWARD else None,
    group=HEADS_Q // HEADS_KV, heads=HEADS_KV * (BATCH if len(VISIBLE) == 1 else 1), processors=LAUNCH.processors,
)


def attention(q, k, v):
    return FlashMaskFunction.apply(q, k, v, PLAN, SCALE, LAUNCH)
"""
