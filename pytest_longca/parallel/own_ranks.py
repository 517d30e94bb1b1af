"""The session's own ranks: under torchrun every rank runs the same pytest session, cells run on all of them, and rank 0 reports.

Cells run in the pytest processes themselves: a rank that dies ends the run, which torchrun tells.
"""

import json
from typing import Any

import torch

from pytest_longca.catalogue import load
from pytest_longca.errors import DidNotRun
from pytest_longca.outcome import Crashed
from pytest_longca.parallel.job import gather_all
from pytest_longca.parallel.world import World, session_world
from pytest_longca.processes import choose_triton_mode


class OwnRanks:
    """What `Pool` is to processes that it starts, for the ranks that are already there. Every rank must make the same calls."""

    def __init__(self, options: str = "") -> None:
        """`options`: see `launched.agreement`. Raises InvalidArgument if the ranks do not meet."""
        choose_triton_mode()
        self._world = session_world()
        same = self._world.agrees_on(options)
        self._broken = None if same else "the ranks were started with different options; give every rank the same command line and ini file"

    def call(self, target: str, request: dict[str, Any], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order, on every rank. Raises DidNotRun(Crashed) if one has none; nothing runs after that."""
        if self._broken:
            raise DidNotRun(Crashed(f"not run after: {self._broken}"))
        try:
            answers = _everyones(self._world, self._answer(target, request))
        except RuntimeError as error:  # the others are gone or do not answer
            answers = [{"error": f"is cut off: {error}"}]
        failed = [f"rank {rank} {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            self._broken = failed[0]
            raise DidNotRun(Crashed(failed[0]))
        return answers

    def close(self) -> None:
        """Leave the world."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _answer(self, target: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(load(target)(self._world, request))
        except Exception as error:
            return {"error": f"raised {type(error).__name__}: {error}"}


def _everyones(world: World, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' answers, sent as JSON."""
    on = world.device if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    data = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8).to(on)
    lengths = torch.cat(gather_all(world, torch.tensor([len(data)], device=on), [1] * world.size)).tolist()
    return [json.loads(bytes(part.tolist())) for part in gather_all(world, data, lengths)]
