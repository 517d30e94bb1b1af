"""The clock: how long one call takes on the device, measured the same way for every kernel.

Protocol, recorded with every result: inputs in their true dtype, drawn normal; the L2 cache flushed before every sample; the queue filled
ahead, so that events measure the device and not the host that launches; forward and backward apart; gradients through
`torch.autograd.grad`, never accumulated; memory measured outside the timed region. On the CPU a host clock, and no flush.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pytest_longca.case import Case, Direction
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.outcome import OutOfMemory
from pytest_longca.spent import KERNELS, spend, spending
from pytest_longca.telemetry import State, Telemetry

PROTOCOL = "events around single calls, queue filled ahead, cold L2, state read amid a chunk"
CPU_PROTOCOL = "host clock around single calls, caches as they are"
FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
LEAST_CHUNK_MS = (
    100.0  # about how long a chunk of samples lasts at least: between two of them the device idles, and gains speed for the next
)
MOST_CHUNK_MS = 500.0  # and at most: a throttled one is thrown away whole
CHUNK = 10  # samples of a step that a chunk has at least, unless they take longer than that
LAUNCHES = 3  # of which the fastest counts, as the host may be late
MOST_RETAKES = 5  # chunks that are thrown away before throttled ones are kept, and told
MOST_LATE = 2  # chunks, each behind a queue twice as long, before those are kept in which the host was late, and told
AHEAD_CYCLES_PER_MS = 2_000_000  # the clock is at most about 2 GHz, so a sleep lasts at least as long as asked
MOST_AHEAD_MS = 500.0  # a call that keeps the host longer waits for the device: no queue helps there

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop sampling: enough samples and the median known to `confidence` (relative half-width), or the budget spent.

    Calls so long that `min_samples` of them would exceed `patience_s` get fewer, at least `fewest`. Before all, `warm_up_s` of calls are
    thrown away: a GPU that was idle runs faster than its power allows for long.
    """

    min_samples: int = 30
    max_samples: int = 300
    budget_s: float = 3.0
    confidence: float = 0.005
    patience_s: float = 30.0
    fewest: int = 5
    warm_up_s: float = 0.1

    def is_enough(self, samples: Sequence[float], spent_s: float) -> bool:
        num = len(samples)
        if num >= self.max_samples or (num >= self.fewest and spent_s > self.patience_s):
            return True
        return num >= self.min_samples and (spent_s > self.budget_s or half_width(samples) <= self.confidence)


@dataclass(slots=True)
class Samples:
    """Single calls of one or two steps, in order; `thrown` counts those of throttled chunks, `clocks` is the state of the kept ones.

    `late` counts kept ones in chunks in which the device may have waited for the host.
    """

    of_steps: list[list[float]]
    thrown: int = 0
    late: int = 0
    clocks: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Timing:
    """What timing a case gave. Samples are single calls in order; `throttled` counts the samples thrown away.

    `late` counts the kept ones for which the device may have waited for the host.
    `anchor_ms` are the samples of the anchor kernel that took turns with it.
    """

    samples_ms: list[float]
    plan_ms: float
    compile_ms: float
    launch_ms: float
    peak_bytes: int | None
    throttled: int = 0
    late: int = 0
    clocks: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    anchor_ms: list[float] | None = None


def half_width(samples: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the median, as a fraction of the median, from order statistics.

    >>> half_width([1.0] * 30)
    0.0
    """
    ordered = sorted(samples)
    reach = 0.98 * math.sqrt(len(ordered))
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))]
    return (high - low) / 2 / statistics.median(ordered)


def time_case(
    kernel: Kernel, case: Case, machine: Machine, effort: Effort, anchor: Kernel | None = None, limit_bytes: int | None = None
) -> Timing:
    """Bind, warm up and sample one case, in turns with the anchor if there is one.

    Compilation, planning and the memory that the case needs are measured before, outside the samples. Raises DidNotRun if a backend
    refuses or fails, or if the case needs more than `limit_bytes`. Whoever calls verifies the case before and after.
    """
    from pytest_longca.subject import kernel_errors

    inputs, clock = make_inputs(case, machine.device), CLOCKS[machine.device]()
    with spending(KERNELS), kernel_errors(kernel.name):
        first_ms, _ = clock.wall(lambda: _once(kernel.bind(case, inputs), inputs.do, case.direction))
        peak, (again_ms, _) = clock.peak(lambda: clock.wall(lambda: _once(kernel.bind(case, inputs), inputs.do, case.direction)))
        _check_memory(inputs, peak, limit_bytes)
        plan_ms, call = clock.wall(lambda: kernel.bind(case, inputs))
        steps = [_step(call, inputs.do, case.direction)]
    if anchor:
        with kernel_errors(anchor.name):
            steps.append(_step(anchor.bind(case, inputs), inputs.do, case.direction))
    with kernel_errors(kernel.name):
        call_ms = max(clock.wall(step)[0] for step in steps)
        times = LAUNCHES if call_ms < LEAST_CHUNK_MS else 1  # beside such a call a late host does not count
        launches_ms = [min(clock.launch(step) for _ in range(times)) for step in steps]
        samples = interleave(clock, steps, effort, call_ms, max(launches_ms))
    spend(KERNELS, sum(map(sum, samples.of_steps)) / 1e3)
    return Timing(
        samples.of_steps[0],
        plan_ms,
        max(0.0, first_ms - again_ms),
        launches_ms[0],
        peak,
        samples.thrown,
        samples.late,
        samples.clocks,
        dict(call.facts),
        samples.of_steps[1] if anchor else None,
    )


def _once(call: Call, do: Tensor, direction: Direction) -> None:
    call.forward()
    if direction.needs_backward:
        call.backward(do)


def _step(call: Call, do: Tensor, direction: Direction) -> Step:
    """What one sample runs; a backward runs after a forward that is not timed."""
    call.forward()
    steps: dict[Direction, Step] = {
        Direction.FWD: call.forward,
        Direction.BWD: lambda: call.backward(do),
        Direction.FWD_BWD: lambda: _once(call, do, Direction.FWD_BWD),
    }
    return steps[direction]


def _check_memory(inputs: Inputs, peak: int | None, limit: int | None) -> None:
    """Raise DidNotRun(OutOfMemory) if operands and peak together exceed the limit; what was not measured does not."""
    if limit is None or peak is None:
        return
    needed = peak + sum(x.untyped_storage().nbytes() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    if needed > limit:
        raise DidNotRun(OutOfMemory.above_limit(needed, limit))


class Clock(Protocol):
    """What times steps on one kind of device."""

    protocol: str

    def wall(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Milliseconds until the work of `function` is done, and its result."""

    def launch(self, step: Step) -> float:
        """Milliseconds that the host spends on issuing a call."""

    def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
        """The time of each call in milliseconds, and the device's state amid them; the queue is filled so far ahead."""

    def warm_up(self, steps: Sequence[Step], launch_ms: float, seconds: float) -> float:
        """Chunks that nobody reads, for about so long, where the device's speed depends on what it did just before.

        Returns the milliseconds of the shortest call, 0 where there was none.
        """

    def summary(self, states: Sequence[State]) -> dict[str, Any]:
        """Readings as JSON values."""

    def peak(self, function: Callable[[], Any]) -> tuple[int | None, Any]:
        """The most memory that `function` takes beyond what was there before, None where it is unknown; and its result."""


def interleave(
    clock: Clock, steps: Sequence[Step], effort: Effort, call_ms: float, launch_ms: float, now: Callable[[], float] = time.perf_counter
) -> Samples:
    """Sample steps in turns (ABBA), so that a drift falls on all alike, until there are enough samples of each.

    A chunk amid which the device says that it is throttled, or in which the host came late, is thrown away and taken again, a few times.
    """
    turn_ms = call_ms * len(steps)
    each = chunk_size(effort.min_samples, turn_ms)
    few = max(1, min(each, math.ceil(1e3 * effort.warm_up_s / max(turn_ms, 1e-3))))
    shortest_ms = clock.warm_up([steps[i] for i in turns(len(steps), few)], launch_ms, effort.warm_up_s)
    found, states, late, started = Samples([[] for _ in steps]), list[State](), 0, now()
    while not all(effort.is_enough(samples, now() - started) for samples in found.of_steps):
        order = turns(len(steps), min(each, effort.max_samples - len(found.of_steps[0])))
        taken, state = clock.chunk([steps[i] for i in order], ahead_ms(len(order), launch_ms, shortest_ms))
        if state.is_throttled and found.thrown < MOST_RETAKES * each * len(steps):
            found.thrown += len(taken)
            continue
        if state.is_late and late < MOST_LATE:
            late, launch_ms = late + 1, 2 * launch_ms
            continue
        found.late += len(taken) if state.is_late else 0
        states.append(state)
        for i, sample in zip(order, taken, strict=True):
            found.of_steps[i].append(sample)
    found.clocks = clock.summary(states)
    return found


def chunk_size(min_samples: int, turn_ms: float) -> int:
    """Samples of each step in a chunk whose steps take so long together: as many as fill it, but no more than are due.

    >>> [chunk_size(30, turn_ms) for turn_ms in (0.1, 3.0, 6.0, 20.0, 100.0, 8000.0)]
    [30, 30, 17, 10, 5, 1]
    """
    fills, fits = math.ceil(LEAST_CHUNK_MS / max(turn_ms, 1e-3)), int(MOST_CHUNK_MS / max(turn_ms, 1e-3))
    return max(1, min(max(CHUNK, min(fills, min_samples)), fits))


def ahead_ms(num_calls: int, launch_ms: float, call_ms: float) -> float:
    """How long the device must be kept busy first, so that it never waits for a host that launches calls of `call_ms` or longer.

    It idles meanwhile, as far as its power is concerned, so that the time should be short.

    >>> round(ahead_ms(10, 0.1, call_ms=0.0), 3), round(ahead_ms(10, 0.1, call_ms=3.0), 3)
    (2.0, 0.2)
    """
    each = 1.5 * launch_ms + 0.05
    return min(each + (num_calls - 1) * max(0.0, each - call_ms), MOST_AHEAD_MS)


def turns(num_steps: int, each: int) -> list[int]:
    """The order of a chunk: forwards, then backwards, until each step has had `each` turns.

    >>> turns(2, 3)
    [0, 1, 1, 0, 0, 1]
    """
    return [step for turn in range(each) for step in (range(num_steps) if turn % 2 == 0 else reversed(range(num_steps)))]


class HostClock:
    """The CPU's clock."""

    protocol = CPU_PROTOCOL

    def wall(self, function: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        result = function()
        return (time.perf_counter() - start) * 1e3, result

    def launch(self, step: Step) -> float:
        return self.wall(step)[0]

    def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
        return [self.wall(step)[0] for step in steps], State()

    def warm_up(self, steps: Sequence[Step], launch_ms: float, seconds: float) -> float:
        return 0.0

    def summary(self, states: Sequence[State]) -> dict[str, Any]:
        return {}

    def peak(self, function: Callable[[], Any]) -> tuple[int | None, Any]:
        return None, function()


class DeviceClock:
    """CUDA events, a flushed L2 and a queue that is filled ahead."""

    protocol = PROTOCOL

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._telemetry = Telemetry(torch.cuda.current_device())
        self.summary = self._telemetry.summary

    def wall(self, function: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, result

    def launch(self, step: Step) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        taken = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return taken

    def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in steps]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(AHEAD_CYCLES_PER_MS * ahead_ms))
        is_late = False
        for (start, end), step in zip(pairs, steps, strict=True):
            self._flush.zero_()
            start.record()
            step()
            is_late |= start.query()
            end.record()
        pairs[len(pairs) // 2][0].synchronize()
        state = replace(self._telemetry.read(), is_late=is_late)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs], state

    def warm_up(self, steps: Sequence[Step], launch_ms: float, seconds: float) -> float:
        samples = list[float]()
        while sum(samples) < seconds * 1e3:
            samples += self.chunk(steps, ahead_ms(len(steps), launch_ms, call_ms=0.0))[0]
        return min(samples, default=0.0)

    def peak(self, function: Callable[[], Any]) -> tuple[int | None, Any]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result


CLOCKS: dict[str, type[HostClock] | type[DeviceClock]] = {"cpu": HostClock, "cuda": DeviceClock}


def device_peaks() -> dict[str, float]:
    """The device's own ceilings, measured now: bf16 matrix product in TFLOP/s (8192 cubed) and copy bandwidth in GB/s (read + written)."""
    clock, effort = DeviceClock(), Effort(min_samples=20, budget_s=1.0)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(interleave(clock, [lambda: a @ b], effort, 2.0, 0.05).of_steps[0])
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(interleave(clock, [lambda: target.copy_(source)], effort, 2.0, 0.05).of_steps[0])
    return {"matmul_tflop_per_s": 2 * 8192**3 / product / 1e9, "copy_gb_per_s": 2 * source.nbytes / copy / 1e6}
