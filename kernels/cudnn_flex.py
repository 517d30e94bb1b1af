"""cudnn_flex: cudnn.flex_attention, planned from row intervals.

Algorithm: FlashAttention with CuTe DSL kernels; the plan lists partial and full tiles and their bit masks, both ways.
Masks: every mask with row intervals, as endpoint rows `[0, F0) | [F1, F2) | [F3, F4)` of each query. The plan is made in `bind`.
Layout: BSHD; other strides than multiples of 16 bytes, and stride 0, are copied. Dtypes: bf16, fp16. GQA: yes.
Head dims: multiples of 8 up to 128, head_dim_v apart; (192, 128) and (256, 256). Directions: forward and backward. lse: yes.
Architectures: sm90 and sm100. Determinism: forward; not the gradients.
"""

import contextlib
import os
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca.backend import BackendCall, refusals
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.intervals import endpoint_rows
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.kernels.cudnn import FRONTEND
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import aligned, copied

LARGE_HEAD_DIMS = ((192, 128), (256, 256))
DISK_CACHE = "FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""What it compiled is kept for other processes where this is set when it is imported: a dozen kernels for a plan, besides attention."""
MAX_SPELLED = 1024
"""The most queries whose endpoints a standalone file spells out."""
DSL = Requirement(distribution="nvidia-cutlass-dsl", at_least="4.6", how="pip install 'nvidia-cutlass-dsl[cu13]'")


class CudnnFlex(Kernel):
    """cuDNN's flex_attention on every mask that has row intervals."""

    name = "cudnn_flex"
    source = "nvidia-cudnn-frontend"
    requires = (FRONTEND, DSL)
    capabilities = Capabilities(
        masks=frozenset({Form.ROW_INTERVALS}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=(*range(8, 129, 8), 192, 256),
        devices=frozenset({"cuda"}),
        capability=(9, 0),
    )
    compiles_per_head_dim = True
    device_kernel_pattern = r"cudnnflex_attention"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        sizes = (case.head_dim, case.head_dim_v)
        rules = (
            (max(sizes) > 128 and sizes not in LARGE_HEAD_DIMS, f"takes head dims up to 128, (192, 128) and (256, 256), not {sizes}"),
            (1 in (case.seqlen_q, case.seqlen_kv), "takes no sequence of one token: it raises RuntimeError on its strides (seen in 1.32)"),
            (case.mask.batch > 1 and case.mask.heads > 1, "takes a mask that differs by batch or by head, not both"),
        )
        return next((reason for broken, reason in rules if broken), None)

    def compiles_to_disk(self, machine: Machine) -> bool:
        return True

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        os.environ.setdefault(DISK_CACHE, "1")
        from cudnn.flex_attention.api import flex_attn_func

        plan = make_plan(case, inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = flex_attn_func(*(aligned(x) for x in (q, k, v)), mask_plan=plan, softmax_scale=case.scale, return_lse=True)
            return out, lse

        facts = {"source": f"cudnn.flex_attention {self.version()}", "mask_form": "row intervals"}
        facts |= {"copies": copied({"q": inputs.q, "k": inputs.k, "v": inputs.v})}
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str | None:
        if case.batch * case.seqlen_q > MAX_SPELLED:
            return None
        rows = endpoint_rows(row_intervals_of(case, torch.device("cpu")), case.batch)
        return f"""\
from cudnn.flex_attention.api import create_mask_plan, flex_attn_func

# [heads or 1, functions, batch * seqlen_q]: row r sees [0, F0) | [F1, F2) | [F3, F4)
ROWS = torch.tensor({rows.tolist()}, dtype=torch.int32, device=DEVICE)


def attention(q, k, v):
    q, k, v = (aligned(x) for x in (q, k, v))
    plan = create_mask_plan(ROWS, q.detach(), k.detach(), v.detach(), build_backward=BACKWARD)
    return flex_attn_func(q, k, v, mask_plan=plan, softmax_scale=SCALE, return_lse=True)
"""


def make_plan(case: Case, inputs: Inputs) -> object:
    """cuDNN's mask plan of the case. Its compiler reports on stdout, which belongs to whoever runs us: to stderr."""
    from cudnn.flex_attention.api import create_mask_plan

    rows = endpoint_rows(row_intervals_of(case, inputs.q.device), case.batch)
    operands = (aligned(x) for x in (inputs.q, inputs.k, inputs.v))
    with contextlib.redirect_stdout(sys.stderr), refusals("cudnn_flex"):
        return create_mask_plan(rows, *operands, build_backward=case.direction.needs_backward)


def row_intervals_of(case: Case, device: torch.device) -> Tensor:
    """The mask's row intervals, which `supports` has asked for: int32 `[batch or 1, heads or 1, seqlen_q, 2, 2]`."""
    rows = case.mask.row_intervals(device)
    assert rows is not None, f"{case.mask.name} has no row intervals: supports must refuse it"
    return rows
