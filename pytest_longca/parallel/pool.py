"""Pool: a persistent world of ranks in processes of their own. A rank that dies or hangs is an outcome; nothing is left behind."""

import contextlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from pytest_longca.errors import DidNotRun, InvalidArgument
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.processes import head_and_tail, how_it_ended, kill_group, send, settle, start, wait_for

GRACE_S = 1.0  # between the first failure and the end of the others, which wait for it in a collective


class Ranks(Protocol):
    """A world of ranks that runs functions `(World, request) -> dict`."""

    def call(self, target: str, request: dict[str, Any], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order. Raises DidNotRun if one has none."""

    def close(self) -> None:
        """End the world."""


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
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):  # a rank that has died is seen when its answer is awaited
                connection.send_bytes(message)
        return self._answers(time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Kill every rank and whatever it started."""
        for process, connection in self._ranks:
            kill_group(process)
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
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            process = start(serve_rank, (theirs, rank, self.size, self._device, str(self._folder), self._path, timeout_s))
            theirs.close()
            self._ranks.append((process, ours))

    def _answers(self, deadline: float, timeout_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.size:
            arrived = self._arrived(answers, deadline)
            if not arrived:
                self.close()
                late = ", ".join(str(rank) for rank in range(self.size) if rank not in answers)
                raise DidNotRun(TimedOut(f"no answer of rank {late} of {self.size} within {timeout_s:g} s; all ranks were killed"))
            answers |= arrived
            if any("error" in answer for answer in arrived.values()):
                raise self._failed(answers)
        return [answers[rank] for rank in range(self.size)]

    def _arrived(self, answers: dict[int, dict[str, Any]], deadline: float) -> dict[int, dict[str, Any]]:
        """The next answers of ranks that have none yet. A rank that died answers with an error, as of the beginning of time."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks) if rank not in answers}
        arrived = {}
        for connection in wait_for(list(waiting), deadline - time.monotonic()):
            rank = waiting[connection]
            try:
                arrived[rank] = dict(json.loads(self._ranks[rank][1].recv_bytes()))
            except (EOFError, OSError):
                self._ranks[rank][0].join(GRACE_S)
                arrived[rank] = {"error": how_it_ended(self._ranks[rank][0].exitcode), "at": 0.0}
        return arrived

    def _failed(self, answers: dict[int, dict[str, Any]]) -> DidNotRun:
        """What to raise after a failure: the others get a moment to fail too, and the first to have failed is the cause."""
        deadline = time.monotonic() + GRACE_S
        while len(answers) < self.size and (arrived := self._arrived(answers, deadline)):
            answers |= arrived
        rank = min((rank for rank, answer in answers.items() if "error" in answer), key=lambda rank: answers[rank]["at"])
        assert self._folder is not None
        stderr = head_and_tail(self._folder / f"rank{rank}.log")
        self.close()
        return DidNotRun(Crashed(f"rank {rank} of {self.size} {answers[rank]['error']}", stderr))


def serve_rank(connection: Connection, rank: int, size: int, device: str, folder: str, path: list[str], timeout_s: float) -> None:
    """A rank's life: join the world, then answer requests until the parent is gone."""
    settle(f"{folder}/rank{rank}.log", path)
    try:
        world = _join(rank, size, device, folder, timeout_s)
        for message in _requests(connection):
            send(connection, _function(message["target"])(world, message["request"]))
    except Exception as error:
        send(connection, {"error": f"raised {type(error).__name__}: {error}", "at": time.monotonic()})


def _requests(connection: Connection) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield json.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the parent is gone
            return


def _join(rank: int, size: int, device: str, folder: str, timeout_s: float) -> Any:
    import torch
    import torch.distributed as dist

    from pytest_longca.parallel.world import World

    torch.set_num_threads(1)
    place = torch.device(device)
    if place.type == "cuda":
        if not torch.cuda.device_count():
            raise InvalidArgument("no GPU is visible to the ranks: give the pool the device cpu")
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    has_own_gpu = place.type == "cuda" and size <= torch.cuda.device_count()
    method, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("nccl" if has_own_gpu else "gloo", method, timeout, world_size=size, rank=rank)
    return World(rank, size, place)


def _function(target: str) -> Callable[..., dict[str, Any]]:
    from pytest_longca.catalogue import load

    return load(target)  # type: ignore[no-any-return]  # load gives whatever the name names
