"""Pool: a persistent world of ranks in processes of their own. A rank that dies or hangs is an outcome; nothing is left behind."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pytest_longca.errors import DidNotRun, InvalidArgument
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.workers import _bare_main, _cause, _head_and_tail, _kill_group, _python_path, _redirect, _send, choose_triton_mode

GRACE_S = 1.0  # between the first failure and the end of the others, which wait for it in a collective


class Pool:
    """`size` ranks over gloo (NCCL where each has a GPU of its own), started at the first call and again after a failure.

    `device` is "cpu" or "cuda"; ranks share GPUs where there are fewer. A call names a function `module:attribute` of
    `(World, request) -> dict` that every rank runs; `path` is where such modules are found besides sys.path.
    """

    def __init__(self, size: int, device: str = "cpu", path: Sequence[str] = ()) -> None:
        if size < 1:
            raise InvalidArgument(f"a world of {size} ranks: it must have at least 1")
        self.size = size
        self._device = device
        self._path = [*path, *sys.path]
        self._folder: Path | None = None
        self._ranks: list[tuple[Any, Connection]] = []

    def call(self, target: str, request: dict[str, Any], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order. Raises DidNotRun(Crashed | TimedOut) if one has none; the next call starts a new world."""
        self._start(timeout_s)
        message = json.dumps({"target": target, "request": request}).encode()
        try:
            for _, connection in self._ranks:
                connection.send_bytes(message)
        except OSError:
            raise self._failed(0, None) from None
        return self._answers(time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Kill every rank and whatever it started."""
        for process, connection in self._ranks:
            _kill_group(process)
            connection.close()
        self._ranks = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, while they live."""
        return [process.pid for process, _ in self._ranks]

    def _start(self, timeout_s: float) -> None:
        if self._ranks and all(process.is_alive() for process, _ in self._ranks):
            return
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="longca-ranks-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest_longca.preload"])
        with _bare_main(), _python_path():
            for rank in range(self.size):
                ours, theirs = multiprocessing.Pipe()
                arguments = (theirs, rank, self.size, self._device, str(self._folder), self._path, timeout_s)
                process = context.Process(target=serve_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))

    def _answers(self, deadline: float, timeout_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = ", ".join(map(str, sorted(waiting.values())))
                raise DidNotRun(TimedOut(f"no answer of rank {late} of {self.size} within {timeout_s:g} s; all ranks were killed"))
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]  # wait returns what it was given
                answers[rank] = self._received(rank)
        return [answers[rank] for rank in range(self.size)]

    def _received(self, rank: int) -> dict[str, Any]:
        try:
            answer = dict(json.loads(self._ranks[rank][1].recv_bytes()))
        except (EOFError, OSError):
            raise self._failed(rank, None) from None
        if "error" in answer:
            raise self._failed(rank, answer["error"])
        return answer

    def _failed(self, rank: int, error: str | None) -> DidNotRun:
        """What to raise for a rank that died or raised: the others get a moment to end, then the world is gone."""
        assert self._folder is not None
        process = self._ranks[rank][0]
        process.join(GRACE_S)
        reason = error or _cause(process.exitcode)
        stderr = _head_and_tail(self._folder / f"rank{rank}.log")
        self.close()
        return DidNotRun(Crashed(f"rank {rank} of {self.size} {'raised ' if error else ''}{reason}", stderr))


def serve_rank(connection: Connection, rank: int, size: int, device: str, folder: str, path: list[str], timeout_s: float) -> None:
    """A rank's life: join the world, then answer requests until the parent is gone."""
    from pytest_longca.preload import die_with_parent

    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = Path(folder) / f"rank{rank}.log"
    log.touch()
    _redirect(str(log))
    sys.path[:] = path
    choose_triton_mode()
    try:
        world = _join(rank, size, device, folder, timeout_s)
        while True:
            message = json.loads(connection.recv_bytes())
            _send(connection, _function(message["target"])(world, message["request"]))
    except (EOFError, OSError):
        return
    except Exception as error:
        _send(connection, {"error": f"{type(error).__name__}: {error}"})


def _join(rank: int, size: int, device: str, folder: str, timeout_s: float) -> Any:
    import torch
    import torch.distributed as dist

    from pytest_longca.parallel.world import World

    torch.set_num_threads(1)
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    has_own_gpu = place.type == "cuda" and size <= torch.cuda.device_count()
    method, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("nccl" if has_own_gpu else "gloo", method, timeout, world_size=size, rank=rank)
    return World(rank, size, place)


def _function(target: str) -> Callable[..., dict[str, Any]]:
    from pytest_longca.catalogue import load

    return load(target)  # type: ignore[no-any-return]  # load gives whatever the name names
