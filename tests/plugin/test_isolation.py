"""Isolation: which process runs a case, what is left when pytest is stopped or killed, and what running out of memory becomes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pytest_longca import warming
from pytest_longca.errors import DidNotRun
from pytest_longca.ids import parse_case
from pytest_longca.outcome import Crashed, OutOfMemory, Passed
from pytest_longca.parallel.pool import Pool
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records, write_records
from pytest_longca.sources import Source
from pytest_longca.subject import kernel_errors
from pytest_longca.workers import Worker
from tests.interrupts import heeding_interrupts
from tests.plugin.conftest import Run
from tests.unit.test_workers import dies_within

KERNELS = """
import os, time
from pathlib import Path

import torch
from pytest_longca.kernels.naive import Naive


class Noting(Naive):
    name = "noting"

    def bind(self, case, inputs):
        with open(Path(__file__).parent / "pids", "a") as file:
            print(self.name, case.id, os.getpid(), file=file)
        return super().bind(case, inputs)


class Other(Noting):
    name = "other"


class Sleeping(Noting):
    name = "sleeping"

    def bind(self, case, inputs):
        super().bind(case, inputs)
        time.sleep(1000)


class SleepingAhead(Sleeping):
    name = "sleeping_ahead"

    def compiles_to_disk(self, machine):
        return True


class Greedy(Naive):
    name = "greedy"

    def bind(self, case, inputs):
        torch.empty(2**50)
        return super().bind(case, inputs)


def pytest_longca_kernels():
    return [Noting(), Other(), Sleeping(), SleepingAhead(), Greedy()]
"""


@pytest.fixture(autouse=True)
def kernels(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNELS)


def noted(path: Path) -> list[tuple[str, str, int]]:
    """(kernel, case, process) of each bind."""
    lines = (line.split() for line in (path / "pids").read_text().splitlines())
    return [(kernel, case, int(pid)) for kernel, case, pid in lines]


@pytest.mark.parametrize("mode", ["auto", "kernel", "case", "off"])
def test_the_mode_says_which_process_runs_a_case(run: Run, pytester: pytest.Pytester, mode: str) -> None:
    chosen = ("--longca-kernels=noting,other", "--longca-masks=causal", "--longca-examples=2", "--longca-dtypes=fp32")
    run("--benchmark-skip", *chosen, "--longca-checks=truth", f"--longca-isolate={mode}", "-k", "examples").assert_outcomes(passed=2)
    calls = noted(pytester.path)
    processes, of_kernels = {pid for _, _, pid in calls}, {(kernel, pid) for kernel, _, pid in calls}
    assert (os.getpid() in processes) == (mode == "off")
    of_cases = {(kernel, case) for kernel, case, _ in calls}
    assert len(processes) == {"auto": 1, "kernel": 2, "off": 1, "case": len(of_cases)}[mode]
    assert len(of_kernels) == {"case": len(of_cases)}.get(mode, 2)


@contextmanager
def sleeping_in_a_kernel(path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """pytest in a process of its own, and the worker in which its second kernel sleeps."""
    chosen = ("--longca-kernels=noting,sleeping", "--longca-masks=causal", "--longca-examples=2", "--longca-dtypes=fp32")
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "--benchmark-skip", "--longca-json=records.jsonl", "-k", "examples")
    with pytest_with_workers(path, 1, *options, *chosen, *more) as (process, (worker,)):
        yield process, worker


@contextmanager
def pytest_with_workers(path: Path, num: int, *args: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """pytest in a process of its own, and the workers, so many, in which a kernel sleeps."""
    with heeding_interrupts():
        process = subprocess.Popen([sys.executable, "-m", "pytest", *args], cwd=path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process, _asleep(process, path, num)
    finally:
        process.kill()
        process.communicate()


def _asleep(process: "subprocess.Popen[bytes]", path: Path, num: int) -> list[int]:
    end = time.perf_counter() + 60
    while time.perf_counter() < end and process.poll() is None:
        asleep = {pid for kernel, _, pid in noted(path) if kernel.startswith("sleeping")} if (path / "pids").exists() else set()
        if len(asleep) == num:
            return list(asleep)
        time.sleep(0.05)
    raise AssertionError(f"the kernel was never called:\n{process.communicate()[0].decode()}")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name, which may have 108 bytes in all."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_file_and_keeps_records_summary_and_page(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, short_path: Path, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    with sleeping_in_a_kernel(pytester.path, "--longca-html=page.html") as (process, worker):
        process.send_signal(number)
        output = process.communicate(timeout=30)[0].decode()
        assert process.returncode == pytest.ExitCode.INTERRUPTED, output
        assert dies_within(worker, 5)
    records = [json.loads(line) for line in (pytester.path / "records.jsonl").read_text().splitlines()]
    assert [(record["kernel"], record["outcome"]["kind"]) for record in records] == [("noting", "passed")]
    assert "records: records.jsonl" in output and "report: page.html" in output
    assert re.search(r"^interrupted: .*^causal +ok\*$", output, re.MULTILINE | re.DOTALL), "above the table; no probe ran"
    assert "noting" in (pytester.path / "page.html").read_text()
    assert not [path for path in short_path.iterdir() if path.name.startswith(("longca-", "pymp-"))]


def test_an_interrupt_while_cases_are_compiled_ahead_is_one_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    earlier = Record(stage="examples", kernel="noting", mask="causal", outcome=Passed().to_json())
    write_records(pytester.path / "records.jsonl", [earlier])
    more = ("--longca-compile-workers=4", "--longca-resume=records.jsonl", "--longca-html=page.html")
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "-k", "probes", "--benchmark-skip")
    chosen = ("--longca-kernels=sleeping_ahead", "--longca-masks=causal,full", "--longca-dtypes=fp32")
    with pytest_with_workers(pytester.path, 4, *options, *chosen, *more) as (process, workers):
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0].decode()
        assert process.returncode == pytest.ExitCode.INTERRUPTED and "INTERNALERROR" not in output and "Traceback" not in output, output
        assert all(dies_within(worker, 5) for worker in workers)
    assert "KeyboardInterrupt" in output and "report: page.html" in output
    assert read_records(pytester.path / "records.jsonl") == [earlier]
    assert not [path for path in short_path.iterdir() if path.name.startswith(("longca-", "pymp-"))]


@contextmanager
def signal_that_ends_no_system_call(seconds: float) -> Iterator[None]:
    """SIGUSR1 raises Noticed some time from now, but lets the main thread's system call go on.

    So does a signal that comes between Python's last look for signals and the call, of a few microseconds; here another thread takes it.
    """

    def raise_noticed(number: int, frame: object) -> None:
        raise Noticed

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        time.sleep(seconds)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    handler = signal.signal(signal.SIGUSR1, raise_noticed)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, handler)


class Noticed(Exception):
    """A signal was."""


ASLEEP = """
import time
from pytest_longca import jobs

def sleep(world, request):
    time.sleep(request["seconds"])
    return {}

jobs.JOBS["sleep"] = lambda shop, request: sleep(None, request)
"""


@pytest.mark.parametrize("kind", ["worker", "ranks"])
def test_an_interrupt_that_comes_just_before_the_wait_for_an_answer_is_noticed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "asleep_jobs.py"
    path.write_text(ASLEEP)
    worker, pool = Worker([Source("asleep_jobs", str(path))]), Pool(1, path=[str(tmp_path)])

    def sleep(seconds: float) -> None:
        if kind == "worker":
            worker.call({"op": "sleep", "seconds": seconds}, 60)
        else:
            pool.call("asleep_jobs:sleep", {"seconds": seconds}, 60)

    with contextlib.closing(worker), pool:
        sleep(0)  # it is started
        before = time.perf_counter()
        with signal_that_ends_no_system_call(0.5), pytest.raises(Noticed):
            sleep(20)
        assert time.perf_counter() - before < 10


def test_an_interrupt_that_comes_just_before_the_wait_for_what_is_compiled_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "asleep_jobs.py"
    path.write_text(ASLEEP + "jobs.JOBS['warm'] = lambda shop, request: time.sleep(20) or {}\n")
    run = warming.Run("naive", parse_case("full(seqlen_q=1,seqlen_kv=1)/b1/h1:1/d8/fp32/fwd/s0"))
    before = time.perf_counter()
    going = warming.run_all([run], [Source("asleep_jobs", str(path))], 1, lambda kernel, case: 60)
    with contextlib.closing(going), signal_that_ends_no_system_call(0.5), pytest.raises(Noticed):
        next(going)
    assert time.perf_counter() - before < 10


def test_an_interrupt_while_a_worker_starts_leaves_no_file(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_longca.workers.start", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    worker = Worker([])
    with pytest.raises(KeyboardInterrupt):
        worker.call({"op": "machine"}, 60)
    worker.close()
    assert not list(short_path.iterdir())


def test_the_old_handler_of_sigterm_is_back_after_a_session(run: Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run("--longca-kernels=noting", "--longca-masks=causal", "--collect-only")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_pytest_leaves_no_process_and_keeps_the_records(pytester: pytest.Pytester) -> None:
    with sleeping_in_a_kernel(pytester.path) as (process, worker):
        process.kill()
        assert dies_within(worker, 5)
    records = (pytester.path / "records.jsonl").read_text().splitlines()
    assert [json.loads(record)["kernel"] for record in records] == ["noting"]


def test_a_kernel_that_wants_more_memory_than_there_is_is_no_crash(run: Run) -> None:
    case = "causal(seqlen_q=3,seqlen_kv=3)/b1/h1:1/d8/fp32/fwd/s0"
    result = run("--longca-kernels=greedy", f"--longca-case={case}", "--longca-isolate=off", "-rx")
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL*out of memory:*DefaultCPUAllocator*"])


def refuse_host_memory() -> None:
    torch.empty(2**50)


def raise_(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (refuse_host_memory, OutOfMemory),
        (raise_(MemoryError()), OutOfMemory),
        (raise_(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")), OutOfMemory),
        (raise_(RuntimeError("CUDA out of memory, says a kernel of its own")), Crashed),
        (raise_(ZeroDivisionError("division by zero")), Crashed),
    ],
)
def test_what_a_kernel_raises_is_told_by_its_type(call: Callable[[], None], kind: type) -> None:
    with pytest.raises(DidNotRun) as stopped, kernel_errors("mine"):
        call()
    assert isinstance(stopped.value.outcome, kind)
