"""Warming: what a session's cases compile is compiled ahead, in several processes, into the caches on disk that all processes share.

A compilation takes seconds, and a suite runs one case at a time. So the cases of kernels that compile are run once before the first item
begins, of those that need the same code the cheapest; the items then find what they need on disk. That time is told apart, and no budget
pays for it. A case that passes its checks here need not run them again in its item: they are the same.
"""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pytest_longca.budget import key_of_item, stage_of
from pytest_longca.case import Case, Direction, Values
from pytest_longca.cells import least_bytes
from pytest_longca.checknames import select_checks
from pytest_longca.errors import InvalidMask, LongcaError
from pytest_longca.ids import parse_case
from pytest_longca.intervals import columns_of
from pytest_longca.kernel import Kernel
from pytest_longca.machine import Machine
from pytest_longca.mask import Form, Mask
from pytest_longca.outcome import Passed
from pytest_longca.processes import LOOK_S
from pytest_longca.workers import Worker

if TYPE_CHECKING:
    import pytest

    from pytest_longca.session import Session
    from pytest_longca.sources import Source

MOST_PROCESSES = 12
"""By default: each has a context of some 0.6 GiB on the GPU, and compiles on a core or two."""
MEMORY_FACTOR = 3
"""A case takes so many times its operands and results on the device while it is drawn and run, about."""
TOLD_EVERY_S = 10.0
MOST_DIVISIBLE = 16 * 128
"""Compilers take integers that are multiples of 16 apart: lengths, and numbers of blocks of up to 128 tokens."""


@dataclass(frozen=True, slots=True)
class Run:
    """A case that a kernel runs ahead: as these checks run it, or once without any."""

    kernel: str
    case: Case
    checks: tuple[str, ...] = ()


def warm(session: "Session", items: "Sequence[pytest.Item]", reporter: Any) -> None:
    """Run ahead what the items will compile; `session.warming` says how it went. Several xdist workers compile side by side as it is."""
    options, started = session.options, time.monotonic()
    is_off = options.compile_workers == 0 or options.isolate == "off" or session.num_sharing > 1
    if served := {} if is_off else _due(session, items):
        runs = list(served)
        num, told = num_processes(options.compile_workers, runs, session.machine), started
        with contextlib.closing(run_all(runs, session.sources, num, session.timeout_s)) as answers:
            for done, (run, answer) in enumerate(answers, 1):
                now = time.monotonic()
                _keep(session, run, served[run], answer)
                session.warming = f"compiled ahead: {done} of {len(runs)} cases in {now - started:.0f} s, {num} processes"
                if reporter and (done == len(runs) or now - told > TOLD_EVERY_S):
                    told = now
                    reporter.write_line(session.warming)
    session.began = time.monotonic()
    if session.budget:
        session.budget.add(session.began - started)


def _due(session: "Session", items: "Sequence[pytest.Item]") -> dict[Run, list[Case]]:
    """The runs that are due, with the cases that each serves; none at all where a mask's predicate raises, which its items will say."""
    try:
        return cheapest_of_alike(runs_of(session, items), session.catalogue.kernel)
    except InvalidMask:
        return {}


def _keep(session: "Session", run: Run, served: Sequence[Case], answer: dict[str, Any]) -> None:
    """Remember what a run ahead gave; of verdicts the passes, as other processes disturb it: what else became of it, its item finds out.

    What compiling took is said of all cases that it served: each would have paid it had it come first.
    """
    from pytest_longca.checks import Verification

    if "compile_ms" in answer:
        session.compile_ms.update(((run.kernel, case), answer["compile_ms"]) for case in served)
    if "verification" in answer and session.options.isolate == "auto":  # else each case or kernel has a process of its own
        verification = Verification.from_json(answer["verification"])
        if isinstance(verification.outcome, Passed):
            session.passed_ahead[run.kernel, run.case.id, run.checks] = verification


def runs_of(session: "Session", items: "Sequence[pytest.Item]") -> list[Run]:
    """What the items of kernels that compile will run, each once, in their order: with checks as it is, else what is compiled alike."""
    found: dict[Run, None] = {}
    for item in items:
        stage = stage_of(item)
        if stage is None or item.get_closest_marker("longca_outcome"):
            continue
        key = key_of_item(item)
        kernel = session.catalogue.kernel(key.kernel)
        if kernel.compiles_to_disk(session.machine):
            cases = [parse_case(key.case, session.catalogue.masks())] if key.case else _cell_cases(session, kernel, key.mask, stage)
            checks = () if key.case else select_checks(session.options.checks, stage)
            found.update((Run(key.kernel, case if checks else compiled_alike(case), checks), None) for case in cases)
    return list(found)


def _cell_cases(session: "Session", kernel: Kernel, mask: str, stage: str) -> list[Case]:
    """The cases of a cell's probes; of its examples only where each is a compilation of its own."""
    if stage == "probes":
        from pytest_longca.strategies import probe_cases

        return probe_cases(session.catalogue.mask(mask), kernel, session.machine)
    if not kernel.compiles_per_shape:
        return []
    from pytest_longca.search import drawn_cases

    return drawn_cases(session, kernel.name, mask)


def cheapest_of_alike(runs: Sequence[Run], kernel_named: Callable[[str], Kernel]) -> dict[Run, list[Case]]:
    """The runs that are due, each with the cases that need what it compiles: itself alone if it has checks or each shape is compiled."""
    alike: dict[Hashable, list[Run]] = {}
    for run in runs:
        is_alone = run.checks or kernel_named(run.kernel).compiles_per_shape
        alike.setdefault(run if is_alone else (run.kernel, code_of(run.case)), []).append(run)
    return {_cheapest(group): [run.case for run in group] for group in alike.values()}


def _cheapest(runs: Sequence[Run]) -> Run:
    """The run that needs the least memory, which limits the processes; of several the one with the fewest visible pairs."""
    least = min(least_bytes(run.case) for run in runs)
    first, *others = (run for run in runs if least_bytes(run.case) == least)
    return min((first, *others), key=lambda run: run.case.area) if others else first  # a long block mask takes seconds to count


def code_of(case: Case) -> Hashable:
    """What decides the code that a kernel compiles for a case, unless it compiles each shape: equal for cases that need the same code.

    Of lengths that is which powers of two divide them, and whether the operands' strides fit into 32 bits. Where this tells two cases apart
    that the kernel does not, a run is wasted; where it does not and the kernel does, an item compiles.
    """
    case = compiled_alike(case)
    fields = tuple(getattr(case, field.name) for field in dataclasses.fields(case) if field.name != "mask")
    sides = ((case.seqlen_q, case.heads_q), (case.seqlen_kv, case.heads_kv))
    divisors = tuple(math.gcd(seqlen, MOST_DIVISIBLE) for seqlen, _ in sides)
    is_large = tuple(seqlen * heads * dim >= 2**31 for seqlen, heads in sides for dim in (case.head_dim, case.head_dim_v))
    return fields, divisors, is_large, _form_of(case.mask)


@functools.lru_cache(maxsize=256)
def _form_of(mask: Mask) -> Hashable:
    """What of a mask is compiled: its kind, the sizes of its blocks, and which ends of intervals its rows and columns ever use."""
    form = (type(mask), mask.batch, mask.heads, getattr(mask, "blocks_text", ""))
    rows = mask.row_intervals() if Form.ROW_INTERVALS in mask.forms else None
    both = () if rows is None else (rows, columns_of(rows, mask.seqlen_kv))
    return *form, *(x is not None and tuple(x.flatten(0, 2).any(0).flatten().tolist()) for x in both)


def compiled_alike(case: Case) -> Case:
    """The case that stands for all that differ from it in nothing that is compiled: a backward needs its forward."""
    direction = Direction.FWD_BWD if case.direction.needs_backward else Direction.FWD
    return dataclasses.replace(case, direction=direction, values=Values.NORMAL, seed=0)


def num_processes(wanted: int | None, runs: Sequence[Run], machine: Machine) -> int:
    """How many processes: what was asked for, else half of the cores; never more than the cases that fit the device at once."""
    most = wanted or min(MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))
    if machine.memory_bytes:
        most = min(most, machine.memory_bytes // (MEMORY_FACTOR * max(least_bytes(run.case) for run in runs)))
    return max(1, min(most, len(runs)))


def run_all(
    runs: Sequence[Run], sources: "Sequence[Source]", num_processes: int, timeout_s: Callable[[str, Case], float]
) -> Generator[tuple[Run, dict[str, Any]], None, None]:
    """Run each in one of the processes; yields those that are done, with what `run_here` gave: nothing, if it died or hung.

    `timeout_s(kernel, case)` says after how many seconds a run hangs.

    What fails is left to the run that counts. Close it if you leave early (an interrupt does): no process is left then, and no thread.
    """
    idle = SimpleQueue[Worker]()
    workers = [Worker(sources) for _ in range(num_processes)]
    for worker in workers:
        idle.put(worker)

    def run(one: Run) -> tuple[Run, dict[str, Any]]:
        worker, answer = idle.get(), dict[str, Any]()
        request = {"op": "warm", "kernel": one.kernel, "case": one.case.id, "checks": list(one.checks)}
        with contextlib.suppress(LongcaError):
            answer = worker.call(request, timeout_s(one.kernel, one.case))
        idle.put(worker)
        return one, answer

    pool = ThreadPoolExecutor(num_processes)
    futures = [pool.submit(run, one) for one in runs]
    try:
        yield from _in_order_of_their_ends(futures)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):  # again and again: a thread may be about to start its process
            for worker in workers:
                worker.kill()
            time.sleep(0.01)
        pool.shutdown()
        for worker in workers:
            worker.close()


def _in_order_of_their_ends(futures: Iterable[Future[tuple[Run, dict[str, Any]]]]) -> Generator[tuple[Run, dict[str, Any]], None, None]:
    """The results. A signal that comes just before the wait would end none without a time-out, as `processes.wait_for` says."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, LOOK_S, FIRST_COMPLETED)
        yield from (future.result() for future in done)


def run_here(kernel: Kernel, case: Case, machine: Machine, checks: Sequence[str]) -> dict[str, Any]:
    """Run a case in this process and let go of all that it held. Raises DidNotRun if it fails.

    With checks, their `verification`. Without, `compile_ms`: the milliseconds that its first run took more than a second one, which is what
    compiling it cost, beside the other processes.
    """
    from pytest_longca.checks import verify
    from pytest_longca.reference import forget_references

    _compile_in_this_process()
    answer: dict[str, Any]
    if checks:
        answer = {"verification": verify(kernel, case, machine, checks).to_json()}
    else:
        first_ms, again_ms = _run_twice(kernel, case, machine)
        answer = {"compile_ms": max(0.0, first_ms - again_ms)}
    forget_references()
    if machine.device == "cuda":
        import torch

        torch.cuda.empty_cache()
    return answer


def _run_twice(kernel: Kernel, case: Case, machine: Machine) -> tuple[float, float]:
    """The milliseconds of two runs, each bound anew."""
    from pytest_longca.inputs import make_inputs
    from pytest_longca.subject import Subject

    subject, inputs = Subject(kernel, case, machine), make_inputs(case, machine.device)
    times = [time.perf_counter()]
    for _ in range(2):
        subject.run(case, inputs)
        times.append(time.perf_counter())
    return (times[1] - times[0]) * 1e3, (times[2] - times[1]) * 1e3


def _compile_in_this_process() -> None:
    """Keep Inductor from starting compilers of its own: there are as many of these processes as there is room for."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
