"""Workers: what a death, a hang and a flood of output become, and that nothing is left behind."""

import contextlib
import itertools
import os
import signal
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_longca.case import Case
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.errors import DidNotRun, LongcaError
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.options import Options
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.session import Session
from pytest_longca.sources import Source
from pytest_longca.warming import Run, run_all
from pytest_longca.workers import COMPILE_TIMEOUT_S, Worker, patience_s

JOBS = """
import ctypes, os, sys, time
from pytest_longca import jobs

def add(name, function):
    jobs.JOBS[name] = lambda shop, request: function(request) or {"pid": os.getpid()}

add("pid", lambda request: None)
add("segfault", lambda request: ctypes.string_at(0))
add("exit", lambda request: os._exit(7))
add("abort", lambda request: os.abort())
add("hang", lambda request: time.sleep(1000))
add("print", lambda request: print("x" * 10_000_000) or sys.stderr.write("y" * 10_000_000) and None)
add("raise", lambda request: 1 / 0)
add("child", lambda request: {"child": os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000"), "pid": os.getpid()})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    path = tmp_path / "extra_jobs.py"
    path.write_text(textwrap.dedent(JOBS))
    worker = Worker([Source("extra_jobs", str(path))])
    yield worker
    worker.close()


def pid(worker: Worker) -> int:
    return int(worker.call({"op": "pid"}, 60)["pid"])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return stat[0] != "Z"


def dies_within(pid: int, seconds: float) -> bool:
    end = time.perf_counter() + seconds
    while is_alive(pid) and time.perf_counter() < end:
        time.sleep(0.01)
    return not is_alive(pid)


@pytest.mark.parametrize(
    ("op", "says"), [("segfault", "killed by SIGSEGV"), ("exit", "exited with status 7"), ("abort", "killed by SIGABRT")]
)
def test_a_death_is_an_outcome_and_the_next_call_gets_a_new_worker(worker: Worker, op: str, says: str) -> None:
    before = pid(worker)
    with pytest.raises(DidNotRun) as stopped:
        worker.call({"op": op}, 60)
    assert isinstance(stopped.value.outcome, Crashed)
    assert says in stopped.value.outcome.reason
    assert pid(worker) != before


def test_a_segfault_leaves_the_place_where_it_happened_in_the_outcome(worker: Worker) -> None:
    with pytest.raises(DidNotRun) as stopped:
        worker.call({"op": "segfault"}, 60)
    assert isinstance(stopped.value.outcome, Crashed)
    assert "Segmentation fault" in stopped.value.outcome.stderr


def test_a_hang_costs_its_time_out_and_its_children_die_with_it(worker: Worker) -> None:
    child = int(worker.call({"op": "child"}, 60)["child"])
    start = time.perf_counter()
    with pytest.raises(DidNotRun) as stopped:
        worker.call({"op": "hang"}, 0.5)
    assert isinstance(stopped.value.outcome, TimedOut)
    assert time.perf_counter() - start < 3
    assert dies_within(child, 2.0)


def test_output_of_a_kernel_neither_blocks_the_worker_nor_reaches_us(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert worker.call({"op": "print"}, 60)["pid"] == worker.pid
    assert capfd.readouterr() == ("", "")


def test_an_error_of_ours_in_a_worker_is_raised_here_and_the_worker_lives(worker: Worker) -> None:
    before = pid(worker)
    with pytest.raises(LongcaError, match="ZeroDivisionError"):
        worker.call({"op": "raise"}, 60)
    assert pid(worker) == before


def test_a_worker_killed_between_calls_is_noticed(worker: Worker) -> None:
    before = pid(worker)
    os.kill(before, signal.SIGKILL)
    with contextlib.suppress(DidNotRun):  # raised if it is still dying when the call comes
        worker.call({"op": "pid"}, 60)
    assert pid(worker) != before


def test_a_source_that_does_not_import_says_which(tmp_path: Path) -> None:
    path = tmp_path / "broken_source.py"
    path.write_text("import no_such_module\n")
    worker = Worker([Source("broken_source", str(path))])
    with pytest.raises(LongcaError, match="no_such_module"):
        worker.call({"op": "machine"}, 60)


def test_a_call_costs_less_than_5_ms(worker: Worker) -> None:
    pid(worker)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        pid(worker)
        times.append(time.perf_counter() - start)
    assert sorted(times)[25] < 0.005


def test_a_worker_that_was_never_started_holds_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers = [Worker([]) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before and len(workers) == 5


AHEAD = """
import os, time
from pathlib import Path
from pytest_longca import jobs

def warm(shop, request):
    name = Path(__file__).with_name(f"{request['kernel']}-{os.getpid()}")
    name.write_text("")
    time.sleep(1000 if request["kernel"] == "long" else 0)
    return {}

jobs.JOBS["warm"] = warm
"""


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Threads that meet at any point of each other's work."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_switching")
@pytest.mark.parametrize("time_to_start", range(5))
def test_what_runs_ahead_may_be_stopped_at_any_moment_and_leaves_no_process(worker: Worker, tmp_path: Path, time_to_start: int) -> None:
    pid(worker)  # the fork server dies with the thread that starts it: this one, as in a session
    path = tmp_path / "ahead_jobs.py"
    path.write_text(textwrap.dedent(AHEAD))
    case = Case(mask=Full(3, 3), heads_q=1, heads_kv=1, head_dim=8, dtype="fp32")
    runs = [Run("short", case), *itertools.repeat(Run("long", case), 20)]
    earlier = set(threading.enumerate())  # other tests, or what they import, may keep a pool of their own in this process
    with contextlib.closing(run_all(runs, [Source("ahead_jobs", str(path))], 8, lambda kernel, case: 10)) as going:
        assert next(going)[0] == runs[0]
        time.sleep(time_to_start * 0.02)
        before = time.perf_counter()
    assert time.perf_counter() - before < 3
    own = [thread for thread in threading.enumerate() if thread not in earlier]
    assert not [thread for thread in own if thread.name.startswith("ThreadPool")], "it may start a process yet"
    assert not [file for file in tmp_path.glob("*-*") if is_alive(int(file.name.rpartition("-")[2]))]


def test_long_case_and_one_that_compiles_have_more_time() -> None:
    long = Case(mask=Causal(512 * 1024, 512 * 1024), heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
    small = Case(mask=Causal(64, 64), heads_q=4, heads_kv=2, head_dim=64)
    assert patience_s(120.0, False, long.flop(), "cuda") > 120 + 20 * long.flop() / 300e12
    assert patience_s(120.0, False, small.flop(), "cpu") == pytest.approx(120.0, abs=0.1)
    assert patience_s(120.0, True, small.flop(), "cuda") == pytest.approx(360.0, abs=0.1)


@pytest.mark.parametrize(
    ("kernel", "machine", "compiles"),
    [("flex", H200, True), ("vsa_triton", H200, True), ("flashinfer", H200, True), ("fa2", H200, False), ("cudnn_sparse", CPU, False)],
)
def test_a_kernel_that_compiles_has_more_time_whatever_it_compiles_for(kernel: str, machine: Machine, compiles: bool) -> None:
    class Here(Session):
        catalogue = types.SimpleNamespace(kernel=lambda name: load(KERNELS[name])())

    here = Here(Options({"timeout": 120.0, "budget": None}), None)
    here.machine = machine
    assert here.timeout_s(kernel, None) == 120.0 + COMPILE_TIMEOUT_S * compiles
