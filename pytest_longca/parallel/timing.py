"""The clock of many ranks: a barrier on the device, events around one call, and of each iteration the slowest rank.

Leaf q, k and v of each rank's share; forward and backward apart, gradients through `torch.autograd.grad`; L2 flushed before every call.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.inputs import TORCH_DTYPES
from pytest_longca.parallel.attend import ContextParallel
from pytest_longca.parallel.kernel import BlockKernel
from pytest_longca.parallel.setup import Shards, Sharing, bind, shards_of
from pytest_longca.parallel.world import World
from pytest_longca.telemetry import State, Telemetry
from pytest_longca.timing import FLUSH_BYTES

STRAY = 2**-4  # of a number and of the root mean square: two partial sums of up to 8 times that, each rounded to bf16's other neighbour
AHEAD_CYCLES = 40_000_000  # about 20 ms, in which the host fills the queue


@dataclass(frozen=True, slots=True)
class Effort:
    """How many calls warm up and how many are sampled; sampling stops early after `budget_s`, on all ranks together."""

    warmup: int = 3
    samples: int = 20
    budget_s: float = 4.0


@dataclass(slots=True)
class Measured:
    """Forward and backward (empty if the kernel has none) of one share: the slowest rank's samples, the fullest one's memory beyond inputs.

    `traffic` counts what this rank sent in one forward and one backward.
    """

    fwd_ms: list[float]
    bwd_ms: list[float]
    peak_bytes: int | None
    traffic: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)

    def median_ms(self, direction: str) -> float:
        """The median of "fwd" or "bwd"."""
        samples: list[float] = getattr(self, f"{direction}_ms")
        return statistics.median(samples)


def _median(samples: list[float]) -> float:
    return statistics.median(samples) if samples else 0.0


def slowest_of(shares: list[Measured]) -> Measured:
    """Of ranks timed one after another: the slowest forward, the slowest backward, the fullest memory."""
    fwd, bwd = (max((getattr(share, f"{d}_ms") for share in shares), key=_median) for d in ("fwd", "bwd"))
    peak = max((share.peak_bytes or 0 for share in shares), default=0) or None
    return Measured(fwd, bwd, peak, shares[0].traffic, shares[0].clocks)


class RankClock:
    """Times one callable on every rank at once."""

    def __init__(self, world: World, effort: Effort) -> None:
        self._world = world
        self._effort = effort
        self._is_cuda = world.device.type == "cuda"
        self._is_shared = world.is_connected and world.size > 1
        self._telemetry = Telemetry(torch.cuda.current_device()) if self._is_cuda else None
        self._states: list[State] = []
        self._flush = torch.zeros(FLUSH_BYTES if self._is_cuda else 1, dtype=torch.int8, device=world.device)

    def samples(self, step: Callable[[], object]) -> list[float]:
        """Milliseconds of single calls, each the slowest rank's."""
        for _ in range(self._effort.warmup):
            step()
        first = self._taken(step, 1)
        count = max(3, min(self._effort.samples, int(self._effort.budget_s * 1e3 / max(*self._world.slowest(first), 1e-3))))
        taken = first + self._taken(step, count - 1)
        if self._telemetry:
            self._states.append(self._telemetry.read())
        return self._world.slowest(taken)

    def state(self) -> dict[str, Any]:
        """This rank's clocks, power and throttling after what was sampled; nothing on the CPU."""
        return self._telemetry.summary(self._states) if self._telemetry else {}

    def _taken(self, step: Callable[[], object], count: int) -> list[float]:
        return self._on_device(step, count) if self._is_cuda else self._on_host(step, count)

    def _on_device(self, step: Callable[[], object], count: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        for start, end in pairs:
            self._flush.zero_()
            if self._is_shared:
                dist.all_reduce(self._flush[:1])  # no rank's call starts before every rank has come here
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def _on_host(self, step: Callable[[], object], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            if self._is_shared:
                dist.barrier()
            start = time.perf_counter()
            step()
            taken.append((time.perf_counter() - start) * 1e3)
        return taken


def measure(world: World, case: Case, sharing: Sharing, kernel: BlockKernel, effort: Effort, shards: Shards | None = None) -> Measured:
    """Time one mechanism on one case. Collective; the caller has verified the mechanism."""
    shards = shards or shards_of(case, sharing)
    bound = bind(case, sharing, world, kernel, shards)
    return measure_bound(world, case, bound, len(shards.of_rank(world.rank)), effort)


def simulate(
    rank: int, case: Case, sharing: Sharing, kernel: BlockKernel, effort: Effort, device: torch.device, shards: Shards | None = None
) -> Measured:
    """The real code of one rank of a world that is not there: what it computes, nothing that it sends."""
    return measure(World(rank, sharing.world, device, is_connected=False), case, sharing, kernel, effort, shards)


def measure_bound(world: World, case: Case, bound: ContextParallel, num_tokens: int, effort: Effort) -> Measured:
    """Time a bound share of `num_tokens` tokens."""
    q, k, v, do = share_inputs(case, num_tokens, world)
    clock = RankClock(world, effort)
    has_backward = bound.kernel.capabilities.backward

    def both() -> object:
        out, _ = bound(q, k, v)
        return torch.autograd.grad(out, (q, k, v), do) if has_backward else out

    before = Counter(world.traffic)
    both()  # plans are made at the first call
    traffic = dict(world.traffic - before)
    fwd_ms = clock.samples(lambda: bound(q, k, v))
    bwd_ms = _backward_ms(clock, bound(q, k, v)[0], (q, k, v), do) if has_backward else []
    return Measured(fwd_ms, bwd_ms, _peak_bytes(world, both), traffic, clock.state())


def strays_from_one_lane(world: World, case: Case, sharing: Sharing, kernel: BlockKernel, shards: Shards) -> str | None:
    """Which tensor of the long case itself is another when kernels take turns than one after another, and by how much, or None.

    Collective. Short cases end before kernels can meet, and a race would not show in them. Sums in no fixed order may differ by a rounding.
    """
    q, k, v, do = share_inputs(case, len(shards.of_rank(world.rank)), world)
    found = []
    for lanes in (1, 2):
        bound = bind(case, replace(sharing, lanes=lanes), world, kernel, shards)
        for _ in range(lanes):  # the first call runs on one
            out, _ = bound(q, k, v)
            found.append([out.detach(), *(torch.autograd.grad(out, (q, k, v), do) if kernel.capabilities.backward else ())])
    one, _, two = found
    worst = world.slowest([_stray(a, b) for a, b in zip(two, one, strict=True)])
    strays = ((name, stray) for name, stray in zip(("out", "dq", "dk", "dv"), worst, strict=False) if stray > STRAY)
    return next((f"{name} (by {stray:.2g} of its root mean square)" for name, stray in strays), None)


def _stray(a: Tensor, b: Tensor) -> float:
    """The largest difference beyond what roundings of a number explain, in root mean squares; infinite where one is not finite."""
    stray = float((a.float() - b.float()).abs().sub(STRAY * b.float().abs()).max() / b.float().square().mean().sqrt())
    return stray if math.isfinite(stray) else math.inf


def _backward_ms(clock: RankClock, out: Tensor, leaves: tuple[Tensor, ...], do: Tensor) -> list[float]:
    return clock.samples(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))


def measure_alone(world: World, case: Case, kernel: BlockKernel, effort: Effort) -> Measured:
    """Time the kernel itself on a whole case, every rank the same: no autograd, no merge, no exchange."""
    from pytest_longca.parallel.plan import make_step

    rows = case.mask.row_intervals()
    assert rows is not None
    step = make_step(rows[0, 0], torch.arange(case.seqlen_kv), world.device)
    assert step is not None, "a mask that hides everything cannot be timed"
    q, k, v, do = (x.detach() for x in share_inputs(case, case.seqlen_q, world))
    q, do, k, v = q[step.rows], do[step.rows], k[step.keys], v[step.keys]
    clock = RankClock(world, effort)
    fwd_ms = clock.samples(lambda: kernel.block_forward(q, k, v, step.segment, case.scale))
    if not kernel.capabilities.backward:
        return Measured(fwd_ms, [], None)
    out, lse = kernel.block_forward(q, k, v, step.segment, case.scale)
    bwd_ms = clock.samples(lambda: kernel.block_backward(do, q, k, v, out, lse, step.segment, case.scale))
    return Measured(fwd_ms, bwd_ms, None, clocks=clock.state())


def share_inputs(case: Case, num_tokens: int, world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal q, k, v (leaves) and do of one rank's tokens, `[tokens, heads, dim]`."""
    generator = torch.Generator(world.device).manual_seed(case.seed + world.rank)
    dtype = TORCH_DTYPES[case.dtype]

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(num_tokens, heads, dim, generator=generator, device=world.device, dtype=dtype)

    q, do = draw(case.heads_q, case.head_dim), draw(case.heads_q, case.head_dim_v)
    k, v = draw(case.heads_kv, case.head_dim), draw(case.heads_kv, case.head_dim_v)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def _peak_bytes(world: World, function: Callable[[], object]) -> int | None:
    if world.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return int(max(world.slowest([float(torch.cuda.max_memory_allocated() - before)])))
