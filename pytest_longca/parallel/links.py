"""Links: what a transfer costs, measured where ranks have GPUs of their own, and fitted as latency + bytes / bandwidth."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pytest_longca.parallel.comm import Channel, Wait
from pytest_longca.parallel.lanes import Finish
from pytest_longca.parallel.mechanisms import Mesh
from pytest_longca.parallel.timing import Effort, RankClock
from pytest_longca.parallel.world import World

Launch = Callable[[Channel, torch.Tensor], Finish[object]]
SIZES_BYTES = (2**20, 2**23, 2**25, 2**27)


@dataclass(frozen=True, slots=True)
class Link:
    """One class of transfer: `latency_ms`, and bandwidth for the bytes that a rank sends."""

    latency_ms: float
    gb_per_s: float

    def ms(self, num_bytes: float) -> float:
        """How long a rank's transfer of so many bytes takes; nothing costs nothing."""
        return self.latency_ms + num_bytes / self.gb_per_s / 1e6 if num_bytes else 0.0


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """The least-squares line through (bytes, ms), each point weighted by 1 / ms so that short transfers count; latency at least 0.

    >>> fit([(1e6, 0.02), (1e8, 1.01)])
    Link(latency_ms=0.01, gb_per_s=100.0)
    """
    weights = [1 / ms**2 for _, ms in points]
    total = sum(weights)
    mean_x, mean_y = (sum(w * point[i] for w, point in zip(weights, points, strict=True)) / total for i in (0, 1))
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    return Link(round(max(0.0, mean_y - slope * mean_x), 9), round(1 / slope / 1e6, 6))


def measure_links(world: World, effort: Effort) -> dict[str, list[tuple[float, float]]]:
    """(bytes sent by a rank, median ms of the slowest rank) of each kind of transfer among all ranks. Collective."""
    channel = world.channel(Mesh(inner=world.size), "inner")
    clock = RankClock(world, effort)
    return {
        kind: [
            (size * share(world.size), statistics.median(clock.samples(_transfer(launch, channel, size, world)))) for size in SIZES_BYTES
        ]
        for kind, (launch, share) in _KINDS.items()
    }


def _transfer(launch: Launch, channel: Channel, num_bytes: int, world: World) -> Callable[[], object]:
    rows = torch.zeros(world.size * 64, num_bytes // (world.size * 128), dtype=torch.bfloat16, device=world.device)
    return lambda: launch(channel, rows)()


def _shift(channel: Channel, x: torch.Tensor) -> Wait:
    return channel.shift(x, len(x))


def _gather(channel: Channel, x: torch.Tensor) -> Wait:
    return channel.gather(x, [len(x)] * channel.size)


def _all_to_all(channel: Channel, x: torch.Tensor) -> Finish[None]:
    (wait,) = channel.all_to_all([(x.chunk(channel.size), channel.landing(x, len(x)).chunk(channel.size))])
    return wait


_KINDS: dict[str, tuple[Launch, Callable[[int], float]]] = {
    "shift": (_shift, lambda size: 1.0),
    "gather": (_gather, lambda size: size - 1.0),
    "all_to_all": (_all_to_all, lambda size: (size - 1) / size),
}
"""Kind to how it is launched and the share of the buffer's bytes that a rank sends."""
