"""The clock: how long one call takes on the device, measured the same way for every kernel.

Protocol, recorded with every result: inputs in their true dtype, drawn normal; the L2 cache flushed before every sample; the queue filled
ahead, so that events measure the device and not the host that launches; forward and backward apart; gradients through
`torch.autograd.grad`, never accumulated; memory measured outside the timed region. On the CPU a host clock, and no flush.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case, Direction
from pytest_longca.inputs import make_inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.telemetry import State, Telemetry

PROTOCOL = "events around single calls, queue filled ahead, cold L2"
CPU_PROTOCOL = "host clock around single calls, caches as they are"
FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
CHUNK = 10  # samples between two looks at the device's state
MOST_RETAKES = 5
AHEAD_CYCLES_PER_MS = 2_000_000  # the clock is at most about 2 GHz, so a sleep lasts at least as long as asked


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop sampling: enough samples and the median known to `confidence` (relative half-width), or the budget spent."""

    min_samples: int = 30
    max_samples: int = 300
    budget_s: float = 3.0
    confidence: float = 0.005

    def is_enough(self, samples: Sequence[float], started: float) -> bool:
        if len(samples) >= self.max_samples:
            return True
        spent = time.perf_counter() - started > self.budget_s
        return len(samples) >= self.min_samples and (spent or half_width(samples) <= self.confidence)


@dataclass(slots=True)
class Timing:
    """What timing a case gave. Samples are single calls in order; `throttled` counts the samples thrown away."""

    samples_ms: list[float]
    plan_ms: float
    compile_ms: float
    launch_ms: float
    peak_bytes: int | None
    throttled: int = 0
    clocks: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


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


def time_case(kernel: Kernel, case: Case, machine: Machine, effort: Effort) -> Timing:
    """Bind, warm up and sample one case. Raises DidNotRun if the backend refuses; the caller verifies the case before and after."""
    inputs = make_inputs(case, machine.device)
    clock = CLOCKS[machine.device]()
    compile_ms, _ = clock.wall(lambda: _once(kernel.bind(case, inputs), inputs.do, case.direction))
    plan_ms, call = clock.wall(lambda: kernel.bind(case, inputs))
    step = _step(call, inputs.do, case.direction)
    warm_ms, _ = clock.wall(step)
    launch_ms = min(clock.launch(step) for _ in range(3))
    samples, throttled, state = clock.samples(step, launch_ms, effort)
    peak = clock.peak_bytes(lambda: _once(kernel.bind(case, inputs), inputs.do, case.direction))
    return Timing(samples, plan_ms, max(0.0, compile_ms - plan_ms - warm_ms), launch_ms, peak, throttled, state, dict(call.facts))


def _once(call: Call, do: Tensor, direction: Direction) -> None:
    call.forward()
    if direction.needs_backward:
        call.backward(do)


def _step(call: Call, do: Tensor, direction: Direction) -> Callable[[], object]:
    """What one sample runs; a backward runs after a forward that is not timed."""
    call.forward()
    steps: dict[Direction, Callable[[], object]] = {
        Direction.FWD: call.forward,
        Direction.BWD: lambda: call.backward(do),
        Direction.FWD_BWD: lambda: _once(call, do, Direction.FWD_BWD),
    }
    return steps[direction]


class HostClock:
    """The CPU's clock."""

    protocol = CPU_PROTOCOL

    def wall(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Milliseconds until the work of `function` is done, and its result."""
        start = time.perf_counter()
        result = function()
        return (time.perf_counter() - start) * 1e3, result

    def launch(self, step: Callable[[], object]) -> float:
        """Milliseconds that the host spends on issuing a call: on the CPU, the call."""
        return self.wall(step)[0]

    def samples(self, step: Callable[[], object], launch_ms: float, effort: Effort) -> tuple[list[float], int, dict[str, Any]]:
        """Times of single calls, the number thrown away, and the device's state around them."""
        started, samples = time.perf_counter(), list[float]()
        gc.collect()
        while not effort.is_enough(samples, started):
            samples.append(self.wall(step)[0])
        return samples, 0, {}

    def peak_bytes(self, function: Callable[[], object]) -> int | None:
        """Memory beyond what was there before; unknown on the CPU."""
        return None


class DeviceClock:
    """CUDA events, a flushed L2 and a queue that is filled ahead."""

    protocol = PROTOCOL

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._telemetry = Telemetry(torch.cuda.current_device())

    def wall(self, function: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, result

    def launch(self, step: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        taken = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return taken

    def samples(self, step: Callable[[], object], launch_ms: float, effort: Effort) -> tuple[list[float], int, dict[str, Any]]:
        started, samples, thrown, states = time.perf_counter(), list[float](), 0, list[State]()
        gc.collect()
        while not effort.is_enough(samples, started):
            taken = self._chunk(step, launch_ms)
            states.append(self._telemetry.read())
            if states[-1].is_throttled and thrown < MOST_RETAKES * CHUNK:
                thrown += len(taken)
                continue
            samples += taken
        return samples, thrown, self._telemetry.summary(states)

    def _chunk(self, step: Callable[[], object], launch_ms: float) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CHUNK)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(AHEAD_CYCLES_PER_MS * (1.5 * launch_ms + 0.05) * CHUNK))
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def peak_bytes(self, function: Callable[[], object]) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


CLOCKS: dict[str, type[HostClock] | type[DeviceClock]] = {"cpu": HostClock, "cuda": DeviceClock}


def device_peaks() -> dict[str, float]:
    """The device's own ceilings, measured now: bf16 matrix product in TFLOP/s (8192 cubed) and copy bandwidth in GB/s (read + written)."""
    clock, effort = DeviceClock(), Effort(min_samples=20, budget_s=1.0)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(clock.samples(lambda: a @ b, 0.05, effort)[0])
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(clock.samples(lambda: target.copy_(source), 0.05, effort)[0])
    return {"matmul_tflop_per_s": 2 * 8192**3 / product / 1e9, "copy_gb_per_s": 2 * source.nbytes / copy / 1e6}
