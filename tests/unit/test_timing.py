"""The sampling loop against a clock that is made up: when it stops, what it throws away, and what never gets into a sample."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_longca import timing
from pytest_longca.case import Case, Direction
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Call, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.machine import CPU
from pytest_longca.masks.regular import Causal
from pytest_longca.nominal import above_nominal
from pytest_longca.outcome import OutOfMemory
from pytest_longca.telemetry import State
from pytest_longca.timing import (
    CHUNK,
    MOST_LATE,
    MOST_RETAKES,
    DeviceClock,
    Effort,
    HostClock,
    Samples,
    Step,
    ahead_ms,
    interleave,
    time_case,
    turns,
)

COOL, HOT, LATE = State(sm_mhz=1980), State(sm_mhz=900, reasons=0x40), State(sm_mhz=1980, is_late=True)


class FakeClock(HostClock):
    """A device whose calls take the milliseconds that the steps return, and whose time is theirs."""

    def __init__(self, states: Iterator[State] | None = None) -> None:
        self.now_s = 0.0
        self.states = states or itertools.repeat(COOL)
        self.chunks: list[int] = []

    def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
        self.chunks.append(len(steps))
        taken = [float(step()) for step in steps]  # type: ignore[arg-type]  # the steps here return their time
        self.now_s += sum(taken) / 1e3
        return taken, next(self.states)

    def summary(self, states: Sequence[State]) -> dict[str, Any]:
        return {"kept": list(states)}


def sample(clock: FakeClock, effort: Effort, *steps: Callable[[], float], call_ms: float = 1.0) -> Samples:
    return interleave(clock, steps, effort, call_ms, 0.01, lambda: clock.now_s)


def noisy() -> Callable[[], float]:
    """1 ms and 3 ms in turns: the median is never known."""
    return itertools.cycle([1.0, 3.0]).__next__


def test_steady_samples_end_at_the_least_number() -> None:
    assert len(sample(FakeClock(), Effort(min_samples=30), lambda: 1.0).of_steps[0]) == 30


def test_noisy_samples_go_on_until_the_budget_ends_and_no_longer() -> None:
    clock = FakeClock()
    found = sample(clock, Effort(min_samples=30, max_samples=10_000, budget_s=1.0), noisy())
    assert 1.0 < clock.now_s <= 1.0 + 3e-3 * 30
    assert len(found.of_steps[0]) > 30


def test_noisy_samples_end_at_the_most() -> None:
    assert len(sample(FakeClock(), Effort(max_samples=100, budget_s=1e9), noisy()).of_steps[0]) == 100


def test_calls_of_seconds_get_few_samples_one_at_a_time() -> None:
    clock = FakeClock()
    found = sample(clock, Effort(min_samples=30, patience_s=30.0, fewest=5), lambda: 8000.0, call_ms=8000.0)
    assert len(found.of_steps[0]) == 5
    assert set(clock.chunks) == {1}


def test_a_throttled_chunk_is_thrown_away_and_taken_again() -> None:
    times = itertools.chain([9.0] * 10, itertools.repeat(1.0))
    clock = FakeClock(itertools.chain([HOT], itertools.repeat(COOL)))
    found = sample(clock, Effort(min_samples=30), times.__next__, call_ms=10.0)
    assert found.of_steps[0] == [1.0] * 30
    assert found.thrown == 10
    assert found.clocks == {"kept": [COOL] * 3}


def test_a_device_that_never_recovers_is_sampled_and_told() -> None:
    found = sample(FakeClock(itertools.repeat(HOT)), Effort(min_samples=30), lambda: 10.0, call_ms=10.0)
    assert (len(found.of_steps[0]), found.thrown) == (30, MOST_RETAKES * 10)
    assert found.clocks == {"kept": [HOT] * 3}


def test_a_chunk_in_which_the_host_came_late_is_taken_again_behind_a_longer_queue() -> None:
    times, queues = itertools.chain([9.0] * 10, itertools.repeat(1.0)), list[float]()

    class Device(FakeClock):
        def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
            queues.append(ahead_ms)
            return super().chunk(steps, ahead_ms)

    found = sample(Device(itertools.chain([LATE], itertools.repeat(COOL))), Effort(min_samples=30), times.__next__, call_ms=10.0)
    assert (found.of_steps[0], found.thrown, found.late) == ([1.0] * 30, 0, 0)
    assert queues == [ahead_ms(10, 0.01, 0.0)] + [ahead_ms(10, 0.02, 0.0)] * 3


def test_a_host_that_is_always_late_is_told() -> None:
    clock = FakeClock(itertools.repeat(LATE))
    found = sample(clock, Effort(min_samples=30), lambda: 10.0, call_ms=10.0)
    assert (len(found.of_steps[0]), found.late, len(clock.chunks)) == (30, 30, 3 + MOST_LATE)


@pytest.mark.parametrize(("call_ms", "num"), [(0.05, 30), (3.0, 30), (9.0, 12), (20.0, 10), (60.0, 8), (400.0, 1)])
def test_a_chunk_lasts_long_enough_for_its_pauses_not_to_count_and_not_so_long_that_much_is_thrown_away(call_ms: float, num: int) -> None:
    clock = FakeClock()
    found = sample(clock, Effort(min_samples=30, fewest=1), lambda: call_ms, call_ms=call_ms)
    assert set(clock.chunks[:-1]) <= {num} and clock.chunks[0] == num
    assert num * call_ms <= 500
    assert num == 30 or num * call_ms >= 100
    assert len(found.of_steps[0]) >= 30


def test_a_chunk_takes_as_long_with_two_steps() -> None:
    clock = FakeClock()
    sample(clock, Effort(min_samples=30), lambda: 9.0, lambda: 9.0, call_ms=9.0)
    assert set(clock.chunks) == {2 * CHUNK}, "20 times 9 ms: ten of each are the least"


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30), st.floats(0.01, 5.0))
def test_the_queue_is_filled_so_far_ahead_that_the_device_never_waits_for_the_host(calls_ms: list[float], launch_ms: float) -> None:
    """The host begins to launch when the device begins to idle, and takes a fifth longer than it was measured to."""
    free_at, launched_at = ahead_ms(len(calls_ms), launch_ms, min(calls_ms)), 0.0
    for call_ms in calls_ms:
        launched_at += 1.2 * launch_ms
        assert launched_at <= free_at
        free_at += call_ms


def test_long_calls_need_no_more_than_one_launch_ahead() -> None:
    assert ahead_ms(30, 0.1, call_ms=3.0) == ahead_ms(1, 0.1, call_ms=0.0) < ahead_ms(30, 0.1, call_ms=0.0) / 20


def test_a_short_warm_up_is_no_longer_than_it_says() -> None:
    class Device(FakeClock):
        warm_up = DeviceClock.warm_up  # type: ignore[assignment]  # it needs a chunk and nothing else

    clock = Device()
    sample(clock, Effort(min_samples=30, max_samples=30, warm_up_s=0.01), lambda: 4.0, call_ms=4.0)
    assert clock.chunks == [3, 25, 5]


def test_turns_cancel_a_drift() -> None:
    clock = FakeClock()
    heat = itertools.count()
    found = sample(clock, Effort(min_samples=40, max_samples=40), *(lambda: 100.0 + next(heat) for _ in range(2)))
    assert statistics.fmean(found.of_steps[0]) == statistics.fmean(found.of_steps[1])


@given(st.integers(1, 3), st.integers(1, 20))
def test_each_step_has_as_many_turns(num_steps: int, each: int) -> None:
    order = turns(num_steps, each)
    assert [order.count(step) for step in range(num_steps)] == [each] * num_steps


class Compiled(Naive):
    """Its first call costs ten seconds of a made-up time, later ones 2 ms or what is asked for, and a plan 5 ms."""

    name = "compiled"

    def __init__(self, clock: SimpleNamespace, call_s: float = 0.002) -> None:
        self.clock, self.call_s, self.calls, self.is_compiled = clock, call_s, 0, False

    def bind(self, case: Case, inputs: Inputs) -> Call:
        self.clock.now += 0.005
        call = super().bind(case, inputs)
        assert isinstance(call, AutogradCall)
        function = call.function

        def attention(*qkv: torch.Tensor) -> Any:
            self.clock.now += self.call_s if self.is_compiled else 10.0
            self.is_compiled, self.calls = True, self.calls + 1
            return function(*qkv)

        call.function = attention
        return call


CASE = Case(mask=Causal(8, 8), head_dim=8, direction=Direction.FWD)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that timing reads."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.mark.parametrize(("call_s", "untimed"), [(0.002, 7), (0.2, 5)])
def test_a_long_call_is_made_less_often_before_it_is_sampled(clock: SimpleNamespace, call_s: float, untimed: int) -> None:
    kernel = Compiled(clock, call_s)
    samples = time_case(kernel, CASE, CPU, Effort(min_samples=10)).samples_ms
    assert kernel.calls == untimed + len(samples)


def test_compilation_and_plan_are_apart_and_in_no_sample(clock: SimpleNamespace) -> None:
    found = time_case(Compiled(clock), CASE, CPU, Effort(min_samples=10))
    assert found.samples_ms == pytest.approx([2.0] * 10)
    assert found.compile_ms == pytest.approx(9998.0)
    assert found.plan_ms == pytest.approx(5.0)


@pytest.mark.parametrize("direction", list(Direction))
def test_an_anchor_takes_turns_and_has_as_many_samples(direction: Direction) -> None:
    case = Case(mask=Causal(8, 8), head_dim=8, direction=direction)
    found = time_case(Naive(), case, CPU, Effort(min_samples=10, max_samples=20), anchor=Naive())
    assert found.anchor_ms is not None
    assert len(found.anchor_ms) == len(found.samples_ms) >= 10


class MemoryClock(HostClock):
    """A device on which every call takes a gigabyte."""

    def peak(self, function: Callable[[], Any]) -> tuple[int | None, Any]:
        return 10**9, function()


def test_a_case_whose_peak_exceeds_the_limit_is_out_of_memory_and_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.CLOCKS, "cpu", MemoryClock)
    operands = 4 * 8 * 8 * 4
    assert time_case(Naive(), CASE, CPU, Effort(10, 10), limit_bytes=10**9 + operands).peak_bytes == 10**9
    with pytest.raises(DidNotRun) as stopped:
        time_case(Naive(), CASE, CPU, Effort(10, 10), limit_bytes=10**9 + operands - 1)
    assert stopped.value.outcome == OutOfMemory.above_limit(10**9 + operands, 10**9 + operands - 1)


class Failing(Kernel):
    name = "failing"

    def bind(self, case: Case, inputs: Inputs) -> Call:
        raise RuntimeError("no such luck")


def test_a_kernel_or_an_anchor_that_raises_is_an_outcome_with_its_name() -> None:
    for kernel, anchor in ((Failing(), None), (Naive(), Failing())):
        with pytest.raises(DidNotRun, match="failing raised RuntimeError: no such luck"):
            time_case(kernel, CASE, CPU, Effort(10, 10), anchor=anchor)


def test_a_figure_above_the_nominal_peak_is_a_fault_and_one_below_it_is_none() -> None:
    assert above_nominal(990 * 10**9, 1.0, "bf16", "NVIDIA H200") is not None
    assert above_nominal(988 * 10**9, 1.0, "bf16", "NVIDIA H200") is None
    assert above_nominal(500 * 10**9, 1.0, "fp32", "NVIDIA H100 80GB HBM3") is not None
    assert above_nominal(10**15, 1.0, "bf16", "CPU") is None


def test_a_device_is_warmed_up_before_the_first_sample_and_what_it_did_then_is_not_kept() -> None:
    class Device(FakeClock):
        """Slows down in its first 100 ms of work, as a GPU does that was idle."""

        worked_ms, ahead_ms = 0.0, list[float]()

        def chunk(self, steps: Sequence[Step], ahead_ms: float) -> tuple[list[float], State]:
            taken = [1.0 if self.worked_ms < 100 else 1.04 for _ in steps]
            self.worked_ms += sum(taken)
            self.ahead_ms.append(ahead_ms)
            return taken, COOL

        warm_up = DeviceClock.warm_up  # type: ignore[assignment]  # it needs a chunk and nothing else

    clock = Device()
    found = interleave(clock, [lambda: None], Effort(min_samples=30, max_samples=30), 1.0, 0.01, lambda: 0.0)
    assert set(found.of_steps[0]) == {1.04}
    assert clock.worked_ms == pytest.approx(4 * 30 + 30 * 1.04)
    assert clock.ahead_ms == [ahead_ms(30, 0.01, 0.0)] * 4 + [ahead_ms(30, 0.01, 1.0)], "what a call takes is known when it was warmed up"
