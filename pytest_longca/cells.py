"""Cells: which kernel meets which mask, on which cases, and how tests are parametrized with them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca.case import Case, Direction
from pytest_longca.mask import TimedShape
from pytest_longca.outcome import NotVerified, Outcome, OutOfMemory

if TYPE_CHECKING:
    from pytest_longca.session import Session

TYPICAL_SEQLEN = 256
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def typical_cases(session: "Session", kernel: str, mask: str) -> Iterator[Case]:
    """Cases that stand for a cell: a kernel that refuses all of them takes none. Sizes, dtypes, passes and head counts in turn."""
    for heads_q, heads_kv in ((2, 1), (2, 2)):
        for value in session.catalogue.mask(mask).timed(TYPICAL_SEQLEN, _shape(session, heads_q, heads_kv)):
            for dtype in session.taken("dtypes", kernel):
                for head_dim in session.taken("head_dims", kernel):
                    for direction in (Direction.FWD_BWD, Direction.FWD):
                        sizes: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim}
                        yield Case(mask=value, dtype=dtype, direction=direction, **sizes)


def timed_cases(session: "Session", mask: str) -> Iterator[Case]:
    """The cases of a mask that are timed: every asked-for length, head count, head dimension and dtype, in every pass."""
    options, device = session.options, session.machine.device
    # The backward first: its reference serves the forward, and not the other way round.
    passes = sorted(map(Direction, options.chosen("passes", device)), key=lambda direction: not direction.needs_backward)
    for seqlen in sorted(options.chosen("seqlens", device)):  # short before long, whatever the order asked for
        for heads_q, heads_kv in options.chosen("heads", device):
            for value in session.catalogue.mask(mask).timed(seqlen, _shape(session, heads_q, heads_kv)):
                for head_dim in options.chosen("head_dims", device):
                    for direction in passes:
                        yield Case(
                            mask=value,
                            heads_q=heads_q,
                            heads_kv=heads_kv,
                            head_dim=head_dim,
                            dtype=options.chosen("dtypes", device)[0],
                            direction=direction,
                            seed=options.seed,
                        )


def _shape(session: "Session", heads_q: int, heads_kv: int) -> TimedShape:
    options, device = session.options, session.machine.device
    blocks = options.chosen("block_sizes", device), options.chosen("densities", device)
    return TimedShape(heads_q, heads_kv, options.seed, session.lengths, *blocks)


def parametrize(metafunc: pytest.Metafunc, wanted: Sequence[str], session: "Session") -> None:
    """Parametrize a test over the session's kernels, masks and cases, as far as it asks for them."""
    names = tuple(wanted)
    metafunc.parametrize(names, list(_ROWS[names](session)) if names in _ROWS else _unknown(names))


def _unknown(names: tuple[str, ...]) -> list[Any]:
    known = "; ".join(" and ".join(row) for row in _ROWS)
    raise pytest.UsageError(f"a test asks for {' and '.join(names)}: tests can ask for {known}")


def _cell_rows(session: "Session") -> Iterable[Any]:
    """(kernel name, mask name), for the suite."""
    for kernel in session.kernels:
        for mask in session.masks:
            yield pytest.param(kernel, mask, id=f"{kernel}-{mask}", marks=_refused(session.cell_refusal(kernel, mask)))


def _timed_rows(session: "Session") -> Iterable[Any]:
    """(kernel name, case id, number of the process), for the suite: all cases in one process, then all in the next."""
    rows = [(kernel, case) for mask in session.masks for case in timed_cases(session, mask) for kernel in session.kernels]
    refusals = [_refused(timing_refusal(session, kernel, case)) for kernel, case in rows]
    for process in range(session.processes):
        suffix = f"-p{process + 1}" if process else ""
        for (kernel, case), marks in zip(rows, refusals, strict=True):
            if process == 0 or not marks:
                yield pytest.param(kernel, case.id, process, id=f"{kernel}-{case.id}{suffix}", marks=marks)


def timing_refusal(session: "Session", kernel: str, case: Case) -> Outcome | None:
    """Why the kernel is not timed on the case here, before anything runs, or None."""
    if refusal := session.refusal(kernel, case):
        return refusal
    if session.machine.device == "cuda" and session.num_sharing > 1:
        return NotVerified(f"a timing needs the GPU to itself, and {session.num_sharing} xdist workers share it: run timings without -n")
    if session.machine.interpret and session.catalogue.kernel(kernel).is_triton:
        return NotVerified("interpreted on a CPU: its time means nothing; not verified on hardware")
    limit, needed = session.options.memory_limit, least_bytes(case)
    return OutOfMemory.above_limit(needed, limit) if limit and needed > limit else None


def least_bytes(case: Case) -> int:
    """What a case holds whatever the kernel: operands and results, of the backward too if it runs."""
    queries = case.seqlen_q * case.heads_q * (case.head_dim + case.head_dim_v)  # q and out
    keys = case.seqlen_kv * case.heads_kv * (case.head_dim + case.head_dim_v)  # k and v
    with_gradients = 2 if case.direction.needs_backward else 1
    return case.batch * (queries + keys) * BYTES[case.dtype] * with_gradients


def _replayed_rows(session: "Session") -> Iterable[Any]:
    """(kernel name, case id) of --longca-case, for the suite."""
    case = session.replayed
    if case is None:
        return
    for kernel in session.kernels:
        yield pytest.param(kernel, case.id, id=f"{kernel}-{case.id}", marks=_refused(session.refusal(kernel, case)))


def _ledger_rows(session: "Session") -> Iterable[Any]:
    """(kernel name, known-failures entry) of the entries that are due here, for the suite."""
    from pytest_longca.known_failures import due

    found = [(kernel, entry) for kernel in session.kernels for entry in due(session.catalogue.kernel(kernel), session.machine)]
    for kernel, entry in found:
        yield pytest.param(kernel, entry, id=f"{kernel}-{entry.name}")
    if not found:
        yield pytest.param("", None, id="none")


def _kernel_rows(session: "Session") -> Iterable[Any]:
    """(Kernel,), for users' tests."""
    for name in session.kernels:
        yield pytest.param(session.catalogue.kernel(name), id=name, marks=_refused(session.missing(name)))


def _mask_rows(session: "Session") -> Iterable[Any]:
    """(Mask class,), for users' tests."""
    for name in session.masks:
        yield pytest.param(session.catalogue.mask(name), id=name)


def _case_rows(session: "Session") -> Iterable[Any]:
    """(Case,), for users' tests."""
    for mask in session.masks:
        for case in timed_cases(session, mask):
            yield pytest.param(case, id=case.id)


def _kernel_case_rows(session: "Session") -> Iterable[Any]:
    """(Kernel, Case), for users' tests."""
    for kernel, case_id in ((name, case) for name in session.kernels for mask in session.masks for case in timed_cases(session, mask)):
        yield pytest.param(
            session.catalogue.kernel(kernel), case_id, id=f"{kernel}-{case_id.id}", marks=_refused(session.refusal(kernel, case_id))
        )


def _kernel_mask_rows(session: "Session") -> Iterable[Any]:
    """(Kernel, Mask class), for users' tests."""
    for kernel in session.kernels:
        for mask in session.masks:
            yield pytest.param(
                session.catalogue.kernel(kernel),
                session.catalogue.mask(mask),
                id=f"{kernel}-{mask}",
                marks=_refused(session.cell_refusal(kernel, mask)),
            )


def _shared_rows(session: "Session") -> Iterable[Any]:
    """(kernel name, mask name, sharing) of --longca-mechanisms, for the suite."""
    from pytest_longca.parallel.conformance import rows

    return rows(session)


def _fault_rows(session: "Session") -> Iterable[Any]:
    """(name of a fault,) of --longca-selftest, for the suite."""
    from pytest_longca.faults import FAULTS

    for fault in FAULTS:
        yield pytest.param(fault, id=fault)


_ROWS: dict[tuple[str, ...], Any] = {
    ("longca_kernel_name", "longca_mask_name"): _cell_rows,
    ("longca_kernel_name", "longca_case_id", "longca_process"): _timed_rows,
    ("longca_kernel_name", "longca_replayed"): _replayed_rows,
    ("longca_kernel_name", "longca_known_failure"): _ledger_rows,
    ("longca_kernel_name", "longca_mask_name", "longca_sharing"): _shared_rows,
    ("longca_fault",): _fault_rows,
    ("longca_kernel",): _kernel_rows,
    ("longca_mask",): _mask_rows,
    ("longca_case",): _case_rows,
    ("longca_kernel", "longca_mask"): _kernel_mask_rows,
    ("longca_kernel", "longca_case"): _kernel_case_rows,
}


def _refused(outcome: Outcome | None) -> list[pytest.MarkDecorator]:
    return [pytest.mark.longca_outcome(outcome)] if outcome else []
