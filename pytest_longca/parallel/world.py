"""World: the ranks that run one attention, and the process groups along the axes of a mesh."""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

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

    def channel(self, mesh: Mesh, axis: str) -> Channel:
        """The channel along one axis of a mesh. Collective: every rank must ask for the same axes in the same order."""
        members = mesh.members(self.rank, axis)
        group = self._group(mesh, axis) if self.is_connected and len(members) > 1 else None
        is_staged = group is not None and self.device.type == "cuda" and dist.get_backend(group) == "gloo"
        return Channel(len(members), members.index(self.rank), group, is_staged, self.traffic)

    def _group(self, mesh: Mesh, axis: str) -> dist.ProcessGroup:
        everyone = {mesh.members(rank, axis) for rank in range(self.size)}
        for members in sorted(everyone - self._groups.keys()):
            self._groups[members] = dist.new_group(list(members))
        return self._groups[mesh.members(self.rank, axis)]
