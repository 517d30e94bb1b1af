"""What bench_sparse and sweep_sparse share: the cases they time, and small cases of the same kind that are judged first, elsewhere."""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from pytest_longca.block_map import BlockMap
from pytest_longca.case import Case, Direction
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.subject import kernel_errors
from pytest_longca.timing import CLOCKS, Effort, Step, Timing, interleave

SHARING = 8
"""At most so many query heads share a map, under MHA too: a map of 128K tokens takes a CPU 50 ms a head, and the times are the same."""
SMALL_SEQLEN, SMALL_HEADS = 1024, 16
TUNING_GATE = 3.0
"""Error over limit from which a kernel or candidate computes something else. A wrong tile is hundreds of times beyond."""
LONG_MS, LONG_LAUNCH_MS = 200.0, 5.0
"""Calls so long are not made before the one whose memory counts, and the queue before them is filled for any launch."""
MARK = "\x1e"
"""Begins a line that a process tells another; str.splitlines would split there."""


def case_of(seqlen: int, heads_q: int, heads_kv: int, size: int, direction: Direction, density: float = 0.5) -> Case:
    """Blocks of `size` tokens, or of 64 to 128 where size is 1; the heads of a group share a map."""
    group = max(heads_q // heads_kv, min(SHARING, heads_q))
    mask: UniformBlock | VariableBlock = UniformBlock(seqlen, seqlen, max(size, 64), BlockMap("topk", density, heads_q, group))
    if size == 1:
        mask = VariableBlock.default(seqlen, block_size=128, density=density, heads=heads_q, group=group)
    return Case(mask=mask, heads_q=heads_q, heads_kv=heads_kv, head_dim=128, dtype="bf16", direction=direction)


def small_case(size: int, group: int, direction: Direction, density: float = 0.5) -> Case:
    """What is judged before cases of such blocks, groups and density are timed."""
    return case_of(SMALL_SEQLEN, SMALL_HEADS, SMALL_HEADS // group, size, direction, density)


def small_cases(sizes: list[int], groups: list[int], densities: list[float], direction: Direction) -> Iterator[Case]:
    for size in sizes:
        for group in groups:
            for density in densities:
                yield small_case(size, group, direction, density)


def tflop_per_s(case: Case, timing: Timing) -> float:
    return case.flop() / statistics.median(timing.samples_ms) / 1e9


def timed(kernel: Kernel, case: Case, machine: Machine, effort: Effort) -> Timing:
    """`time_case` with no more calls than needed, as one of 128K tokens takes seconds: each is made twice, then sampled.

    One that takes LONG_MS is made once, and its launch is not timed, so that what it and its compilation took is not known: NaN.
    """
    inputs, clock = make_inputs(case, machine.device), CLOCKS[machine.device]()

    def bound_and_run() -> tuple[float, float, Call]:
        plan_ms, call = clock.wall(lambda: kernel.bind(case, inputs))
        run_ms, _ = clock.wall(lambda: (call.forward(), case.direction.needs_backward and call.backward(inputs.do)))
        return plan_ms, run_ms, call

    with kernel_errors(kernel.name):
        peak, (plan_ms, run_ms, call) = clock.peak(bound_and_run)
        if run_ms >= LONG_MS:
            plan_ms, compile_ms, launch_ms = clock.wall(lambda: kernel.bind(case, inputs))[0], math.nan, math.nan
        else:
            first_ms = plan_ms + run_ms
            peak, (plan_ms, run_ms, call) = clock.peak(bound_and_run)
            compile_ms, launch_ms = max(0.0, first_ms - plan_ms - run_ms), clock.launch(_step(call, case, inputs))
        ahead_ms = LONG_LAUNCH_MS if math.isnan(launch_ms) else launch_ms
        samples = interleave(clock, [_step(call, case, inputs)], effort, run_ms, ahead_ms)
    return Timing(samples.of_steps[0], plan_ms, compile_ms, launch_ms, peak, samples.thrown, samples.late, samples.clocks, dict(call.facts))


def _step(call: Call, case: Case, inputs: Inputs) -> Step:
    return (lambda: call.backward(inputs.do)) if case.direction.needs_backward else call.forward


def tell(*fields: object) -> None:
    print(MARK + json.dumps(fields), flush=True)


class Teller:
    """A process of a script that tells its findings. `told` writes it a line, for which it may wait."""

    def __init__(self, script: str, arguments: list[str]) -> None:
        command = [sys.executable, script, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def told(self, deadline: float) -> list[list[Any]]:
        """What it told until its end or the deadline."""
        try:
            text, _ = self.process.communicate("\n", timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            self.process.kill()
            text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return [json.loads(line[1:]) for line in text.split("\n") if line.startswith(MARK) and line.endswith("]")]
