"""FlashMask on one block of context parallelism: any segment whose keys have at most two runs of masked queries, in one call."""

from dataclasses import replace

from torch import Tensor

from pytest_longca.errors import DidNotRun
from pytest_longca.kernels.flashmask import FlashMask, choose_launch
from pytest_longca.kernels.flashmask_plan import Launch, Plan, make_plan
from pytest_longca.outcome import Unsupported
from pytest_longca.parallel.kernel import INTERVALS
from pytest_longca.parallel.segment import Segment


class FlashMaskBlock:
    """Our own Triton kernels. The plan is made once for each segment, group and launch.

    Some of the queries of a static mask mask a key in no more runs than all of them, so every layout's segments are taken.
    """

    name = "flashmask"
    capabilities = replace(FlashMask.capabilities, masks=INTERVALS)

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        from pytest_longca.kernels.flashmask_attention import attention_forward

        plan, launch = _planned(segment, q, k, v)
        out, lse = attention_forward(q[None], k[None], v[None], plan, scale, launch)
        return out[0], lse[0]

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from pytest_longca.kernels.flashmask_attention import attention_backward

        plan, launch = _planned(segment, q, k, v)
        dq, dk, dv = attention_backward(do[None], q[None], k[None], v[None], out[None], lse[None], plan, scale, launch)
        return dq[0], dk[0], dv[0]


def _planned(segment: Segment, q: Tensor, k: Tensor, v: Tensor) -> tuple[Plan, Launch]:
    """The plan of a segment for operands of these shapes, and the launch that it is for."""
    launch = choose_launch(max(q.shape[-1], v.shape[-1]), q.dtype, q.device)
    key = ("flashmask", launch, q.shape[1], k.shape[1])
    if key not in segment.cache:
        segment.cache[key] = _plan(segment, launch, q.shape[1] // k.shape[1], k.shape[1])
    plan: Plan = segment.cache[key]
    return plan, launch


def _plan(segment: Segment, launch: Launch, group: int, heads_kv: int) -> Plan:
    plan = make_plan(
        segment.intervals[None, None], segment.num_keys, fwd=launch.fwd, dq=launch.dq, dkdv=launch.dkdv,
        group=group, heads=heads_kv, processors=launch.processors,
    )  # fmt: skip
    if plan is None:
        raise DidNotRun(Unsupported("takes two runs of masked queries a key at most, and this segment has more: use fa4 or cudnn_flex"))
    return plan
