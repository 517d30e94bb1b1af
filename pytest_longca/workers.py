"""Workers: processes that run cases and may die. A crash or a hang is an outcome of the case, and costs the others nothing."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from pytest_longca.errors import DidNotRun, LongcaError
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.sources import Source

HEAD_AND_TAIL = 2000
START_TIMEOUT_S = 120.0


class Executor(Protocol):
    """What runs requests: a worker process, or this process."""

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer. Raises DidNotRun(Crashed | TimedOut) if there was none."""

    def close(self) -> None:
        """End whatever process there is."""


class InProcess:
    """No isolation, for a debugger: requests run in the pytest process."""

    def __init__(self, sources: Sequence[Source], pluginmanager: Any) -> None:
        from pytest_longca.jobs import Workshop
        from pytest_longca.sources import catalogue_of

        choose_triton_mode()
        self._workshop = Workshop(catalogue_of(pluginmanager))

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return self._workshop.perform(request)

    def close(self) -> None:
        return


class Worker:
    """One worker process, started at the first request and again after it died."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = [source.to_json() for source in sources]
        self._process: Any = None
        self._connection: Connection | None = None
        self._stderr = Path(tempfile.mkstemp(prefix="longca-worker-", suffix=".log")[1])

    @property
    def pid(self) -> int | None:
        """The process id while a worker lives."""
        return self._process.pid if self._process else None

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's answer. Raises DidNotRun if it died or took longer than `timeout_s`; the next call starts a new one."""
        connection = self._started()
        try:
            connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise DidNotRun(self._post_mortem()) from None
        answer = self._answer(connection, timeout_s)
        if "error" in answer:
            raise LongcaError(answer["error"])
        if answer.pop("spent", False):  # the device's context is unusable after an error
            self.close()
        return answer

    def close(self) -> None:
        """Kill the worker and whatever it started."""
        if self._process is None:
            return
        _kill_group(self._process)
        if self._connection:
            self._connection.close()
        self._process = self._connection = None

    def __del__(self) -> None:
        self._stderr.unlink(missing_ok=True)

    def _answer(self, connection: Connection, timeout_s: float) -> dict[str, Any]:
        ready = wait([connection, self._process.sentinel], timeout_s)
        if not ready:
            self.close()
            raise DidNotRun(TimedOut(f"no answer within {timeout_s:g} s; the worker was killed"))
        try:
            if connection not in ready and not connection.poll():
                raise EOFError
            return dict(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            raise DidNotRun(self._post_mortem()) from None

    def _post_mortem(self) -> Crashed:
        self._process.join(5)
        code = self._process.exitcode
        self.close()
        return Crashed(f"the worker {_cause(code)}", _head_and_tail(self._stderr))

    def _started(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._connection:
            return self._connection
        self.close()
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest_longca.preload"])
        with _bare_main(), _python_path():
            self._process = context.Process(target=serve, args=(theirs, self._sources, list(sys.path), str(self._stderr)), daemon=True)
            self._process.start()
        theirs.close()
        self._connection = ours
        hello = self._answer(ours, START_TIMEOUT_S)
        if "error" in hello:
            self.close()
            raise LongcaError(hello["error"])
        return ours


def serve(connection: Connection, sources: list[list[Any]], path: list[str], stderr: str) -> None:
    """A worker's life: greet, then answer requests until the parent is gone."""
    from pytest_longca.preload import die_with_parent

    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(stderr)
    sys.path[:] = path
    choose_triton_mode()
    try:
        from pytest_longca.jobs import Workshop
        from pytest_longca.sources import load_catalogue

        workshop = Workshop(load_catalogue(Source(*source) for source in sources))
    except Exception as error:
        _send(connection, {"error": f"a worker could not start: {type(error).__name__}: {error}"})
        return
    _send(connection, {"hello": True})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        os.ftruncate(2, 0)
        try:
            _send(connection, workshop.perform(request))
        except Exception as error:
            _send(connection, {"error": f"{type(error).__name__}: {error}"})


def choose_triton_mode() -> None:
    """Make Triton interpret its kernels where there is no GPU; must come before `import triton`."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _send(connection: Connection, answer: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _redirect(stderr: str) -> None:
    """Point stdin at nothing, stdout and stderr at the worker's own log: a kernel's prints must not reach the terminal or the pipe."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import faulthandler

    faulthandler.enable(file=2, all_threads=False)


def _kill_group(process: Any) -> None:
    for kill in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
        try:
            kill()
        except (ProcessLookupError, PermissionError):
            continue
    process.join(5)


def _cause(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _head_and_tail(path: Path) -> str:
    text = path.read_text(errors="replace")
    return text if len(text) <= 2 * HEAD_AND_TAIL else f"{text[:HEAD_AND_TAIL]}\n[...]\n{text[-HEAD_AND_TAIL:]}"


_main_lock = threading.Lock()


@contextmanager
def _bare_main() -> Iterator[None]:
    """Hide `__main__` while a worker starts: multiprocessing would import pytest's entry script again in the worker."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _python_path() -> Iterator[None]:
    """Let the fork server find what this process finds: before Python 3.12 its preload ignores sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
