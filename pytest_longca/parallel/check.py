"""`run_parallel`: judge one case on a world of ranks, from the parent's side."""

from collections.abc import Sequence
from typing import Any

from pytest_longca.case import Case
from pytest_longca.errors import DidNotRun
from pytest_longca.outcome import outcome_from_json
from pytest_longca.parallel.job import sharing_to_json
from pytest_longca.parallel.pool import Ranks
from pytest_longca.parallel.setup import Sharing, check
from pytest_longca.sources import Source

JUDGE = "pytest_longca.parallel.job:judge_case"


def run_parallel(
    pool: Ranks,
    case: Case,
    sharing: Sharing,
    kernel: str = "naive",
    timeout_s: float = 60.0,
    target: str = JUDGE,
    sources: Sequence[Source] = (),
) -> dict[str, Any]:
    """Rank 0's figures of a case (`verdicts`; `errors`, `rms`: tensor to number) and every rank's `traffic`.

    `sources` are where masks and kernels come from that are not built in.
    Raises InvalidArgument before any process starts, DidNotRun if the kernel refuses or a rank died, raised or hung.
    """
    check(case, sharing)
    about = {"kernel": kernel, "sources": [source.to_json() for source in sources]}
    request = {"case": case.id, "sharing": sharing_to_json(case, sharing), **about}
    answers = pool.call(target, request, timeout_s)
    if "outcome" in answers[0]:  # the same on every rank, found before anything was sent
        raise DidNotRun(outcome_from_json(answers[0]["outcome"]))
    return {**answers[0], "traffic": [answer["traffic"] for answer in answers]}
