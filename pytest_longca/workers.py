"""Workers: processes that run cases and may die. A crash or a hang is an outcome of the case, and costs the others nothing."""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from pytest_longca.errors import DidNotRun, InvalidArgument, LongcaError
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.processes import choose_triton_mode, head_and_tail, how_it_ended, kill_group, send, settle, signal_group, start, wait_for
from pytest_longca.sources import Source

START_TIMEOUT_S = 120.0
COMPILE_TIMEOUT_S = 240.0
"""What a case of a kernel that compiles has beyond --longca-timeout, for up to ten graphs of seconds each or a module of minutes."""


PATIENCE_FLOP_PER_S = {"cpu": 1e9, "cuda": 1e13}
"""A case has a second beyond --longca-timeout for so much work: twenty calls of a fast kernel, or its reference and a few calls."""


def patience_s(usual: float, compiles: bool, flop: int, device: str) -> float:
    """How many seconds a case may take before it counts as a hang, where `usual` is what a small one has."""
    return usual + COMPILE_TIMEOUT_S * compiles + flop / PATIENCE_FLOP_PER_S[device]


class Executor(Protocol):
    """What runs requests: a worker process, or this process."""

    ran: tuple[str, ...]
    """The kernels that the process has run, in order; none in a new one."""

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer. Raises DidNotRun(Crashed | TimedOut) if there was none, InvalidArgument if nothing can be done with the request."""

    def close(self) -> None:
        """End whatever process there is."""


def _with_kernels(ran: tuple[str, ...], request: dict[str, Any]) -> tuple[str, ...]:
    """What a process has run once it was sent the request."""
    return tuple(dict.fromkeys([*ran, *(name for key in ("kernel", "anchor") if (name := request.get(key)))]))


class InProcess:
    """No isolation, for a debugger: requests run in the pytest process."""

    def __init__(self, sources: Sequence[Source], pluginmanager: Any) -> None:
        from pytest_longca.jobs import Workshop
        from pytest_longca.sources import catalogue_of

        choose_triton_mode()
        self._workshop = Workshop(catalogue_of(pluginmanager))
        self.ran: tuple[str, ...] = ()

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.ran = _with_kernels(self.ran, request)
        return self._workshop.perform(request)

    def close(self) -> None:
        return


class Worker:
    """One worker process, started at the first request and again after it died."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = [source.to_json() for source in sources]
        self._process: Any = None
        self._connection: Connection | None = None
        self._stderr: Path | None = None
        self.ran: tuple[str, ...] = ()

    @property
    def pid(self) -> int | None:
        """The process id while a worker lives."""
        return self._process.pid if self._process else None

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's answer. Raises DidNotRun if it died or took longer than `timeout_s`; the next call starts a new one."""
        connection = self._started()
        self.ran = _with_kernels(self.ran, request)
        try:
            connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise DidNotRun(self._post_mortem()) from None
        answer = self._answer(connection, timeout_s)
        if "error" in answer:
            raise LongcaError(answer["error"])
        if "invalid" in answer:
            raise InvalidArgument(answer["invalid"])
        if answer.pop("spent", False):  # the device's context is unusable after an error
            self.close()
        return answer

    def close(self) -> None:
        """Kill the worker and whatever it started; its log goes with it."""
        if self._process is not None:  # else its start was interrupted, perhaps, and there is a log already
            kill_group(self._process)
        if self._connection:
            self._connection.close()
        if self._stderr:
            self._stderr.unlink(missing_ok=True)
        self._process = self._connection = self._stderr = None
        self.ran = ()

    def kill(self) -> None:
        """Kill the process of a call that another thread waits for: the call raises as if the worker had died, and closes what it opened.

        Closing here too would close the pipe twice, or under the feet of that thread.
        """
        if (process := self._process) is not None:
            signal_group(process)

    def _answer(self, connection: Connection, timeout_s: float) -> dict[str, Any]:
        ready = wait_for([connection, self._process.sentinel], timeout_s)
        if not ready:
            self.close()
            raise DidNotRun(TimedOut(f"no answer within {round(timeout_s, 1):g} s; the worker was killed"))
        try:
            if connection not in ready and not connection.poll():
                raise EOFError
            return dict(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            raise DidNotRun(self._post_mortem()) from None

    def _post_mortem(self) -> Crashed:
        self._process.join(5)
        assert self._stderr is not None, "a process has its log"
        found = Crashed(f"the worker {how_it_ended(self._process.exitcode)}", head_and_tail(self._stderr))
        self.close()
        return found

    def _started(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._connection:
            return self._connection
        self.close()
        descriptor, name = tempfile.mkstemp(prefix="longca-worker-", suffix=".log")
        os.close(descriptor)
        self._stderr = Path(name)
        ours, theirs = multiprocessing.Pipe()
        self._process = start(serve, (theirs, self._sources, list(sys.path), str(self._stderr)))
        theirs.close()
        self._connection = ours
        hello = self._answer(ours, START_TIMEOUT_S)
        if "error" in hello:
            self.close()
            raise LongcaError(hello["error"])
        return ours


def serve(connection: Connection, sources: list[list[Any]], path: list[str], stderr: str) -> None:
    """A worker's life: greet, then answer requests until the parent is gone."""
    settle(stderr, path)
    try:
        from pytest_longca.jobs import Workshop
        from pytest_longca.sources import load_catalogue

        workshop = Workshop(load_catalogue(Source(*source) for source in sources))
    except Exception as error:
        send(connection, {"error": f"a worker could not start: {type(error).__name__}: {error}"})
        return
    send(connection, {"hello": True})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        os.ftruncate(2, 0)
        try:
            send(connection, workshop.perform(request))
        except InvalidArgument as error:
            send(connection, {"invalid": str(error)})
        except Exception as error:
            send(connection, {"error": f"{type(error).__name__}: {error}"})
