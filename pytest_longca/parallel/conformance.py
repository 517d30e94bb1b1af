"""The suite's context-parallel cells: a kernel on a mask, shared among ranks by a mechanism, judged as a whole."""

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca.case import Case, Direction
from pytest_longca.conformance import Findings, conclude, keep, record
from pytest_longca.errors import DidNotRun, InvalidArgument, InvalidMask
from pytest_longca.mask import Form
from pytest_longca.outcome import Outcome, Passed, Unsupported, Wrong
from pytest_longca.parallel.check import run_parallel
from pytest_longca.parallel.kernel import find_block_kernel, serves_blocks
from pytest_longca.parallel.mechanisms import Mesh
from pytest_longca.parallel.pool import Ranks
from pytest_longca.parallel.setup import Sharing, check

if TYPE_CHECKING:
    from pytest_longca.session import Session

SEQLENS = (97, 64, 160)
HEADS_Q, HEADS_KV = 8, 2
HEAD_DIM = 64
ALLOWED = 2.0
"""How many times its single-device limit an error may be: every block's output and gradients are rounded before they are merged."""


def shared_cases(session: "Session", mask: str) -> Iterator[Case]:
    """The cases of a cell: a few lengths, divisible by the world and not, with awkward documents, prefixes and windows."""
    for seqlen in SEQLENS:
        value = session.catalogue.mask(mask).sample(Random(f"{mask}:{seqlen}"), seqlen)
        dtype = session.options.chosen("dtypes", session.machine.device)[0]
        yield Case(mask=value, heads_q=HEADS_Q, heads_kv=HEADS_KV, head_dim=HEAD_DIM, dtype=dtype, direction=Direction.FWD_BWD, seed=seqlen)


def rows(session: "Session") -> Iterator[Any]:
    """(kernel name, mask name, sharing) for every kernel, mask, mechanism and world size that was asked for."""
    options = session.options
    for kernel in session.kernels:
        for mask in session.masks:
            for mechanism in session.mechanisms:
                for world in session.world_sizes:
                    sharing = Sharing(mechanism.name, world, Mesh.parse(options.mesh) if options.mesh else None, own=mechanism)
                    refused = refusal(session, kernel, mask, sharing)
                    marks = [pytest.mark.longca_outcome(refused)] if refused else []
                    yield pytest.param(kernel, mask, sharing, id=f"{mechanism.name}x{world}-{kernel}-{mask}", marks=marks)


def refusal(session: "Session", kernel: str, mask: str, sharing: Sharing) -> Outcome | None:
    """Why the ranks cannot share the cell, found before any process starts."""
    if not serves_blocks(kernel, session.catalogue):
        others = [name for name in session.catalogue.kernel_names if serves_blocks(name, session.catalogue)]
        return Unsupported(f"{kernel} offers no block_forward and block_backward; {', '.join(others)} do")
    if Form.ROW_INTERVALS not in session.catalogue.mask(mask).forms:
        return Unsupported(f"context parallel takes {Form.ROW_INTERVALS}, and {mask} has no such form")
    if missing := session.missing(kernel):
        return missing
    capabilities = find_block_kernel(kernel, session.catalogue).capabilities
    try:
        for case in shared_cases(session, mask):
            check(case, sharing)
            if reason := capabilities.refusal(case, session.machine):
                return Unsupported(f"as a block kernel, {kernel} {reason}")
    except InvalidMask:
        raise
    except InvalidArgument as error:
        return Unsupported(str(error))
    return None


def run_shared(item: pytest.Item, session: "Session", kernel: str, mask: str, sharing: Sharing) -> None:
    """Judge a cell's cases, each on all ranks; the first that is wrong, dies or hangs ends it."""
    findings, pool = Findings(), session.pool(sharing.world)
    outcome: Outcome = Passed()
    for case in shared_cases(session, mask):
        outcome, num_bytes = _judged(pool, session, case, kernel, sharing, findings)
        if not isinstance(outcome, Passed):
            break
    keep(
        item,
        record(
            session, "parallel", kernel, mask, outcome, findings, case=case.id,
            mechanism=sharing.mechanism, world_size=sharing.world, comm_bytes=num_bytes,
        ),
    )  # fmt: skip
    conclude(outcome, f"{kernel} shared by {sharing.mechanism} among {sharing.world} ranks: {outcome}\ncase: {case.id}")


def _judged(pool: Ranks, session: "Session", case: Case, kernel: str, sharing: Sharing, findings: Findings) -> tuple[Outcome, int]:
    """The outcome of one case, and the bytes that the busiest rank sent."""
    try:
        answer = run_parallel(pool, case, sharing, kernel, session.options.timeout, sources=session.sources)
    except DidNotRun as stopped:
        return stopped.outcome, 0
    findings.num_cases += 1
    for verdict in answer["verdicts"]:
        findings.note(verdict["tensor"], verdict["error_over_limit"], case)
    wrong = [verdict for verdict in answer["verdicts"] if not verdict["error_over_limit"] <= ALLOWED]
    outcome = Wrong("; ".join(f"{verdict['tensor']}: {verdict['message']}" for verdict in wrong)) if wrong else Passed()
    return outcome, max(sum(number for name, number in rank.items() if name.endswith("_bytes")) for rank in answer["traffic"])
