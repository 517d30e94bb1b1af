"""World: the ranks that run one attention, and the process groups along the axes of a mesh."""

import os
import zlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pytest_longca.errors import InvalidArgument
from pytest_longca.machine import CPU, Machine
from pytest_longca.parallel.comm import Channel
from pytest_longca.parallel.mechanisms import Mesh


@dataclass(eq=False)
class World:
    """One rank's view: its number, the world size and its device. `is_connected` False switches communication off (`simulate`)."""

    rank: int
    size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_connected: bool = True
    traffic: Counter[str] = field(default_factory=Counter)
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        """The machine that this rank computes on."""
        if self.device.type != "cuda":
            return CPU
        return Machine("cuda", torch.cuda.get_device_capability(self.device), torch.cuda.get_device_name(self.device))

    @property
    def is_staged(self) -> bool:
        """Whether CUDA ranks communicate through the host, since they share GPUs: for checking, never for timing."""
        return self.is_connected and self.size > 1 and self.device.type == "cuda" and dist.get_backend() == "gloo"

    def channel(self, mesh: Mesh, axis: str) -> Channel:
        """The channel along one axis of a mesh. Collective: every rank must ask for the same axes in the same order."""
        members = mesh.members(self.rank, axis)
        group = self._group(mesh, axis) if self.is_connected and len(members) > 1 else None
        return Channel(len(members), members.index(self.rank), group, self.is_staged, self.traffic)

    def _group(self, mesh: Mesh, axis: str) -> dist.ProcessGroup:
        everyone = {mesh.members(rank, axis) for rank in range(self.size)}
        for members in sorted(everyone - self._groups.keys()):
            self._groups[members] = dist.new_group(list(members), pg_options=_urgent())
        return self._groups[mesh.members(self.rank, axis)]

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of every rank's values, element by element. Collective."""
        if not self.is_connected or self.size == 1:
            return values
        on = self.device if dist.get_backend() == "nccl" else torch.device("cpu")
        tensor = torch.tensor(values, dtype=torch.float64, device=on)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return list(tensor.tolist())

    def agrees_on(self, text: str) -> bool:
        """Whether every rank has the same text. Collective."""
        digest = float(zlib.crc32(text.encode()))
        largest, least = self.slowest([digest, -digest])
        return largest == -least


def _urgent() -> Any:
    """NCCL's streams at high priority, or a transfer would wait until all blocks of a running attention have started; None for gloo."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if dist.get_backend() == "nccl" else None


def session_world() -> World:
    """This process as a rank of the world that torchrun started, NCCL where each rank has a GPU, else gloo; alone without torchrun.

    Raises InvalidArgument if the ranks do not meet.
    """
    size, rank, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % num_gpus) if num_gpus else torch.device("cpu")
    if num_gpus:
        torch.cuda.set_device(device)
    if size == 1:
        return World(0, 1, device)
    has_own_gpu = num_gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    timeout = timedelta(minutes=3)
    try:
        dist.init_process_group("nccl" if has_own_gpu else "gloo", timeout=timeout, device_id=device if has_own_gpu else None)
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InvalidArgument(
            f"the ranks did not meet at {place} (is the port in use? give another): {str(error).splitlines()[0]}"
        ) from None
    return World(rank, size, device)
