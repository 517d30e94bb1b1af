"""Judge a block kernel on one segment, by the limits of any kernel: the segment is taken for the mask of a case of its own."""

from collections.abc import Sequence

from pytest_longca.case import Case, Direction
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.judge import Result, Verdict, judge
from pytest_longca.parallel.kernel import BlockKernel
from pytest_longca.parallel.segment import Segment
from pytest_longca.parallel.segment_mask import SegmentMask
from pytest_longca.reference import compute


def judge_block(kernel: BlockKernel, segment: Segment, dtype: str, heads: tuple[int, int] = (4, 2), head_dim: int = 64) -> list[Verdict]:
    """A verdict for each of out, lse, dq, dk and dv of the kernel alone on a segment, on the segment's device.

    Limits come from sums of absolute terms, so a gradient that is exactly 0 (every row sees one key) has a limit above 0.
    """
    direction = Direction.FWD_BWD if kernel.capabilities.backward else Direction.FWD
    mask = SegmentMask(segment)
    case = Case(mask=mask, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, dtype=dtype, direction=direction, seed=3)
    inputs = make_inputs(case, segment.intervals.device)
    return judge(case, inputs, compute(case, inputs), _result(kernel, segment, case, inputs))


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict whose error is the largest part of its limit."""
    return max(verdicts, key=lambda verdict: verdict.error_over_limit)


def _result(kernel: BlockKernel, segment: Segment, case: Case, inputs: Inputs) -> Result:
    q, k, v, do = inputs.q[0], inputs.k[0], inputs.v[0], inputs.do[0]
    out, lse = kernel.block_forward(q, k, v, segment, case.scale)
    if not case.direction.needs_backward:
        return Result(out[None], lse[None])
    dq, dk, dv = kernel.block_backward(do, q, k, v, out, lse, segment, case.scale)
    return Result(out[None], lse[None], dq[None], dk[None], dv[None])
