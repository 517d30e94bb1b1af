"""Naive-Torch: softmax(q k^T) v with a dense mask, as it is written in a textbook.

Algorithm: scores and softmax in fp32 (fp64 for fp64), P rounded to the case's dtype before P @ V, every product accumulated in
fp32; gradients come from autograd. A row that sees nothing gives out 0, lse -inf and gradients 0.
Layout: BSHD in any strides. Dtypes: all. Head dims: all, head_dim_v free. GQA: yes. Directions: forward and backward.
Architectures: any. Determinism: yes on the CPU; on a GPU as torch's matrix products. Memory: O(seqlen_q * seqlen_kv).
"""

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Capabilities, Kernel
from pytest_longca.machine import Machine
from pytest_longca.mask import Form

SCORE_COPIES = 6
"""Tensors of the size of the scores that live at once: scores, P, rounded P, their gradients and temporaries (measured: 5 to 6)."""
DEFAULT_MEMORY_BYTES = 8 * 2**30
"""What a machine that does not tell its memory is trusted with."""


def score_bytes(case: Case) -> int:
    """What one fp32 (fp64 for fp64) tensor of scores takes."""
    return case.num_scores * (8 if case.dtype == "fp64" else 4)


def too_long_for_scores(case: Case, machine: Machine) -> str | None:
    """The refusal of a kernel that holds all scores at once: above half of the machine's memory (8 GiB if unknown)."""
    needed, allowed = SCORE_COPIES * score_bytes(case), (machine.memory_bytes or 2 * DEFAULT_MEMORY_BYTES) // 2
    if needed <= allowed:
        return None
    sizes = f"about {needed / 2**30:.1f} GiB for this case, and is limited to {allowed / 2**30:.1f} GiB here"
    return f"holds all scores at once, {sizes}: use shorter sequences"


class Naive(Kernel):
    """The textbook form in plain torch operations."""

    name = "naive"
    source = "torch"
    capabilities = Capabilities(masks=frozenset({Form.PREDICATE}), empty_sequences=True)
    deterministic = True
    device_kernel_pattern = r"gemm|softmax|sgemm|cutlass|cublas"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        return too_long_for_scores(case, machine)

    def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
        hidden, empty = split_mask(case.mask.dense(inputs.q.device), case.heads_kv)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return naive_attention(q, k, v, hidden, empty, case.scale)

        return AutogradCall(attend, inputs, case.direction.needs_backward, backend="torch")

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        functions = (split_mask, naive_attention, _rounded)
        source = "\n\n".join(inspect.getsource(function) for function in functions)
        return f"""\
from torch import Tensor


{source}

HIDDEN, EMPTY = split_mask(VISIBLE, HEADS_KV)


def attention(q, k, v):
    return naive_attention(q, k, v, HIDDEN, EMPTY, SCALE)
"""


def split_mask(visible: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """`(hidden, empty)`: the keys to mask out, except in rows that see nothing, and those rows.

    Both have the grouped head axes: `[batch or 1, heads_kv or 1, group or 1, seqlen_q, seqlen_kv or 1]`.
    An empty row keeps its finite scores, so that neither softmax nor its gradient meets inf - inf; it is zeroed afterwards.
    """
    visible = visible.unflatten(1, (1, 1) if visible.shape[1] == 1 else (heads_kv, -1))
    empty = ~visible.any(-1, keepdim=True)
    return ~visible & ~empty, empty


def naive_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, empty: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of BSHD operands under `split_mask`'s masks: out `[batch, seqlen_q, heads_q, head_dim_v]` in q's dtype."""
    exact = torch.float64 if q.dtype is torch.float64 else torch.float32
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_kv, heads_kv = k.shape[1:3]
    group = heads_q // heads_kv
    stacks, queries = batch * heads_kv, group * seqlen_q  # each key/value head with all queries of its group
    q3 = q.to(exact).transpose(1, 2).reshape(stacks, queries, q.shape[-1])
    k3, v3 = (x.to(exact).transpose(1, 2).reshape(stacks, seqlen_kv, x.shape[-1]) for x in (k, v))
    scores = torch.bmm(q3, k3.mT * scale).view(batch, heads_kv, group, seqlen_q, seqlen_kv)
    scores = scores.masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    out = torch.bmm(_rounded(p, q.dtype).view(stacks, queries, seqlen_kv), v3)
    return out.view(batch, heads_q, seqlen_q, v.shape[-1]).transpose(1, 2).to(q.dtype), lse.flatten(1, 2).float()


def _rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """P rounded to `dtype` in the forward, with its gradient kept exact (a cast would round dP as well)."""
    return p if p.dtype is dtype else p + (p.to(dtype).to(p.dtype) - p).detach()
