"""How often the gate is wrong on this machine: alarms on equal builds, and planted slowdowns caught. Run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_gate.py --minutes 3 --out gate.json
    PYTHONPATH=. python tests/gpu/bench_gate.py --minutes 5 --limit 10% --in-turns     # on a CPU: other cases, work planted by a loop

Fresh processes, one after another, time the same short cases, each as it is and with work planted after it that makes it 5 % slower; one
process first verifies each kernel and mask at its shortest and longest length, and finds out for each case how much work that is. Then the
gate's own code compares 5 processes with 2 others: 300 times, drawn at random, and as often as there are 5 neighbours and 2 later
neighbours. A process takes some seconds: at least 20 are due. The next ones import meanwhile, and touch the GPU when it is their turn.
With --in-turns each sample has one of the same kernel beside it, as with --longca-anchor, and the gate compares the ratios.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pytest_longca import catalogue
from pytest_longca.case import Case, Direction
from pytest_longca.checks import verify
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.options import percent
from pytest_longca.outcome import Passed
from pytest_longca.report.compare import compare, spread
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import Comparison, Limits, Verdict
from pytest_longca.timing import CLOCKS, Clock, Effort, Samples, interleave

K = 1024
TIMED: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("fa2", ("causal", "causal_document"), (K, 2 * K, 4 * K)),
    ("sdpa_flash", ("full",), (K, 2 * K)),
    ("sdpa_flash", ("causal",), (K, 2 * K, 4 * K)),
    ("flashmask", ("causal", "causal_document", "prefix_lm_document"), (K, 2 * K, 4 * K)),
)
"""40 cases, each forward and backward; 28 without the flash-attn package. On an H200 one call of each takes 23 ms together.

Not among them: cuDNN, which builds a graph for each shape anew in every process.
"""
ON_CPU = tuple(
    (name, ("full", "causal", "causal_sliding_window", "causal_document", "prefix_lm_causal"), (128, 192)) for name in ("naive", "sdpa")
)
LEAST_PROCESSES = 20
NUM_COMPARISONS = 300
BASELINE, LOOKS = Limits().processes, 2
WARM_UP_S = 0.01
"""Short, as one case follows another and the device is hardly ever idle."""
WAITING = 2
"""Processes that import ahead: that takes about as long as a process times, longer on busy cores."""
EFFORTS = {
    "cuda": Effort(min_samples=Limits().samples, max_samples=Limits().samples, patience_s=10.0, warm_up_s=WARM_UP_S),
    "cpu": Effort(min_samples=Limits().samples, max_samples=300, budget_s=0.15),
}
"""As few samples as the gate takes on a GPU; on a CPU, which other programs disturb, as many as the time has room for, as in a run."""
TRIAL = Effort(min_samples=10, max_samples=10, patience_s=10.0, warm_up_s=WARM_UP_S)
ANCHOR = "the same kernel"
UNITS_PER_MS = {"cuda": 1.8e6, "cpu": 1e6}
"""Units of planted work in a millisecond, about: cycles of the GPU's clock, or nanoseconds."""
TOLERANCE = 0.1
"""How far from the limit a planted slowdown may be, as a share of it, in the process that finds it, for its case to count."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One case of one kernel."""

    kernel: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.case.id}"

    @property
    def pair(self) -> tuple[str, str]:
        return self.kernel, self.case.mask.name


def cells(machine: Machine) -> Iterator[Cell]:
    """What is timed here."""
    on_gpu = machine.device == "cuda"
    sizes: dict[str, Any] = {"heads_q": 64, "heads_kv": 8, "head_dim": 128, "dtype": "bf16"}
    for name, masks, seqlens in TIMED if on_gpu else ON_CPU:
        kernel = kernel_named(name)
        for mask in masks if kernel.missing() is None else ():
            for seqlen in seqlens:
                for direction in (Direction.FWD, Direction.BWD):
                    value = catalogue.load(catalogue.MASKS[mask]).default(seqlen)
                    yield Cell(name, Case(mask=value, direction=direction, **sizes if on_gpu else {}))


@functools.cache
def kernel_named(name: str) -> Kernel:
    kernel: Kernel = catalogue.load(catalogue.KERNELS[name])()
    return kernel


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------------- one process


def spin(nanoseconds: int) -> None:
    """Work for a CPU."""
    end = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < end:
        pass


def step_of(call: Call, inputs: Inputs, direction: Direction) -> Callable[[], object]:
    call.forward()
    return call.forward if direction is Direction.FWD else functools.partial(call.backward, inputs.do)


def with_work(step: Callable[[], object], device: str, units: int) -> Callable[[], None]:
    """The step, then planted work."""
    work = torch.cuda._sleep if device == "cuda" else spin

    def run() -> None:
        step()
        work(units)

    return run


class Bench:
    """A process's clock, and what it makes of cells."""

    def __init__(self, limit: float, in_turns: bool) -> None:
        self.limit, self.in_turns = limit, in_turns
        self.seconds: Counter[str] = Counter()
        with self.spending("device"):
            self.machine = find_machine()
            self.clock: Clock = CLOCKS[self.machine.device]()

    @contextlib.contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the time under a name."""
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began

    def work(self) -> dict[str, int]:
        """The work to plant in each cell of the kernels and masks that are right."""
        timed = list(cells(self.machine))
        with self.spending("verification"):
            wrong = self.wrong(timed)
        for pair in wrong:
            say(f"not timed: {' on '.join(pair)}")
        return {cell.name: self.work_of_limit(self.step(cell)[0]) for cell in timed if cell.pair not in wrong}

    def wrong(self, timed: Sequence[Cell]) -> set[tuple[str, str]]:
        """The kernels and masks that are wrong, or fail, at the shortest or the longest length of theirs that is timed."""
        of_pairs: dict[tuple[str, str], dict[int, Case]] = {}
        for cell in timed:
            both_ways = dataclasses.replace(cell.case, direction=Direction.FWD_BWD)
            of_pairs.setdefault(cell.pair, {})[cell.case.seqlen_q] = both_ways
        ends = [(cases[seqlen], pair) for pair, cases in of_pairs.items() for seqlen in {min(cases), max(cases)}]
        ends.sort(key=lambda end: end[0].id)  # kernels share the reference of a case
        return {
            pair for case, pair in ends if not isinstance(verify(kernel_named(pair[0]), case, self.machine, ("truth",)).outcome, Passed)
        }

    def samples_of_all(self, units: dict[str, int]) -> dict[str, Any]:
        """Samples of every cell, plain and with its planted work."""
        return {cell.name: self.both(self.step(cell), units[cell.name]) for cell in cells(self.machine) if cell.name in units}

    def step(self, cell: Cell) -> list[Callable[[], object]]:
        """The cell's step, and where samples are taken in turns another like it; each ran once."""
        with self.spending("preparation"):
            inputs = make_inputs(cell.case, self.machine.device)
            steps = [
                step_of(kernel_named(cell.kernel).bind(cell.case, inputs), inputs, cell.case.direction) for _ in range(1 + self.in_turns)
            ]
            for step in steps:
                step()
        return steps

    def samples(self, steps: Sequence[Callable[[], object]], effort: Effort) -> Samples:
        with self.spending("samples"):
            call_ms, launch_ms = (max(map(measure, steps)) for measure in (lambda step: self.clock.wall(step)[0], self.clock.launch))
            return interleave(self.clock, steps, effort, call_ms, launch_ms)

    def both(self, steps: Sequence[Callable[[], object]], units: int) -> dict[str, Any]:
        step, *beside = steps
        found: dict[str, Any] = {}
        for name, run in {"plain": step, **({"planted": with_work(step, self.machine.device, units)} if units else {})}.items():
            taken = self.samples([run, *beside], EFFORTS[self.machine.device])
            found[name] = {"samples": taken.of_steps, "clocks": taken.clocks}
        return found

    def work_of_limit(self, step: Callable[[], object]) -> int:
        """The work that makes the step as much slower as the gate must catch; 0 where a launch alone costs more."""
        (plain,) = self.medians(step)
        guess = UNITS_PER_MS[self.machine.device] * self.limit * plain
        if self.machine.device == "cpu":  # a loop lasts as long as it says
            return int(guess)
        plain, few, many = self.medians(step, *(with_work(step, self.machine.device, int(guess * share)) for share in (0.5, 1.5)))
        units = int(guess * (0.5 + (plain * (1 + self.limit) - few) / (many - few))) if many > few else 0
        if units < 1:
            return 0
        plain, planted = self.medians(step, with_work(step, self.machine.device, units))
        return units if abs(planted / plain - 1 - self.limit) <= TOLERANCE * self.limit else 0

    def medians(self, *steps: Callable[[], object]) -> list[float]:
        return [statistics.median(samples) for samples in self.samples(steps, TRIAL).of_steps]


def child() -> None:
    """A process of the run: everything is imported when the word comes, and the GPU was not touched."""
    for name, _, _ in TIMED:
        with contextlib.suppress(ImportError):
            catalogue.load(catalogue.KERNELS[name])
    request = json.loads(sys.stdin.readline())
    bench = Bench(request["limit"], request["in_turns"])
    units = request["units"]
    found = bench.work() if units is None else bench.samples_of_all(units)
    print("\x1e" + json.dumps({"device": bench.machine.name, "found": found, "seconds": bench.seconds}), flush=True)
    os._exit(0)  # without the second that torch takes to clean up


class Child:
    """A process that waits for its word."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **request: Any) -> dict[str, Any]:
        output, _ = self._process.communicate(json.dumps(request) + "\n")
        lines = [line for line in output.split("\n") if line.startswith("\x1e")]
        if self._process.returncode or not lines:
            raise SystemExit(f"a process ended with {self._process.returncode}:\n{output[-2000:]}")
        return dict(json.loads(lines[0][1:]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------------------------------------------------------- the gate


@dataclasses.dataclass(frozen=True)
class Runs:
    """Records of each process, in the order in which they ran, as they were and with planted work."""

    limits: Limits
    anchor: str | None
    plain: list[list[Record]] = dataclasses.field(default_factory=list)
    planted: list[list[Record]] = dataclasses.field(default_factory=list)

    def comparison(self, old: Sequence[int], new: Sequence[int], planted: bool = False) -> Comparison:
        """The gate on some processes against others."""
        later = self.planted if planted else self.plain
        known = {(record.kernel, record.case) for record in later[0]} if planted else None
        was, now = ([record for number in numbers for record in source[number]] for numbers, source in ((old, self.plain), (new, later)))
        return compare([record for record in was if known is None or (record.kernel, record.case) in known], now, self.limits, self.anchor)


def records_of(found: dict[str, Any], kind: str, process: int, device: str) -> list[Record]:
    """A process's samples as the plugin would record them."""
    records = []
    for name, taken in found.items():
        kernel, case = name.split(" ", 1)
        if kind in taken:
            samples, *beside = taken[kind]["samples"]
            about: dict[str, Any] = {"kernel": kernel, "mask": case.partition("(")[0], "case": case, "device": device}
            about |= {"facts": {"anchor": ANCHOR, "anchor_samples_ms": beside[0]} if beside else {}, "clocks": taken[kind]["clocks"]}
            records.append(Record(stage="timing", outcome=Passed().to_json(), samples_ms=samples, process=f"p{process}", **about))
    return records


def draws(num: int) -> Iterator[tuple[list[int], list[int]]]:
    """300 times 5 processes and 2 others, each in the order in which they ran; the same every time."""
    rng = random.Random(1)
    for _ in range(NUM_COMPARISONS):
        drawn = rng.sample(range(num), BASELINE + LOOKS)
        yield sorted(drawn[:BASELINE]), sorted(drawn[BASELINE:])


def neighbours(num: int) -> Iterator[tuple[list[int], list[int]]]:
    """5 processes in a row, and 2 in a row that came later: what drifts between a baseline and a run shows here."""
    for first in range(num - BASELINE - LOOKS + 1):
        for later in range(first + BASELINE, num - LOOKS + 1):
            yield list(range(first, first + BASELINE)), list(range(later, later + LOOKS))


def tally(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What the gate said: how many comparisons had an alarm, and each verdict on times."""
    verdicts = Counter(str(row.verdict) for comparison in comparisons for row in comparison.rows)
    rows = sum(verdicts.values())
    judged = rows - verdicts[Verdict.TOO_NOISY] - verdicts[Verdict.THROTTLED]
    return {
        "comparisons": len(comparisons),
        "with an alarm": sum(any(row.verdict is Verdict.SLOWER for row in c.rows) for c in comparisons),
        "slower, of those that are not too noisy": verdicts[Verdict.SLOWER] / judged if judged else None,
        "too noisy": verdicts[Verdict.TOO_NOISY] / rows,
        "verdicts": dict(verdicts),
    }


def figures(runs: Runs) -> dict[str, Any]:
    """All that is to be known of the gate, from the runs."""
    num = len(runs.plain)
    noise = {name: spread([medians]) for name, medians in medians_of(runs.plain).items()}
    ways: dict[str, Callable[[int], Iterator[tuple[list[int], list[int]]]]] = {"drawn": draws, "neighbours": neighbours}
    found: dict[str, Any] = {"processes": num, "cases": len(noise), "planted cases": len(runs.planted[0])}
    for name, pairs in ways.items():
        found[f"equal builds, {name}"] = tally([runs.comparison(old, new) for old, new in pairs(num)])
        if runs.planted[0]:
            found[f"planted, {name}"] = tally([runs.comparison(old, new, planted=True) for old, new in pairs(num)])
    assert runs.limits.slower
    found["cases noisier than an eighth of the limit, over all processes"] = sum(value > runs.limits.slower / 8 for value in noise.values())
    found["noisiest"] = sorted(((round(value, 5), name) for name, value in noise.items()), reverse=True)[:8]
    found["planted slowdowns"] = sorted(round(slowdown, 4) for slowdown in slowdowns(runs))
    return found


def slowdowns(runs: Runs) -> list[float]:
    """What was planted in truth: each case's median over all processes, over the plain one's."""
    plain, planted = medians_of(runs.plain), medians_of(runs.planted)
    return [statistics.median(medians) / statistics.median(plain[name]) - 1 for name, medians in planted.items()]


def medians_of(processes: list[list[Record]]) -> dict[str, list[float]]:
    """The medians of each case, in the order of the processes: in milliseconds, or over the anchor's beside them."""
    found: dict[str, list[float]] = {}
    for record in itertools.chain.from_iterable(processes):
        assert record.samples_ms
        beside = record.facts.get("anchor_samples_ms")
        median = statistics.median(record.samples_ms) / (statistics.median(beside) if beside else 1.0)
        found.setdefault(f"{record.kernel} {record.case}", []).append(median)
    return found


def collect(args: argparse.Namespace) -> Runs:
    """As many processes as the time has room for. The next ones import while one is timing."""
    deadline, last = time.monotonic() + 60 * args.minutes, 0.0
    runs = Runs(Limits(slower=args.limit), ANCHOR if args.in_turns else None)
    ask = {"limit": args.limit, "in_turns": args.in_turns}
    waiting = deque(Child() for _ in range(1 + WAITING))
    try:
        answer = waiting.popleft().run(units=None, **ask)
        units: dict[str, int] = answer["found"]
        left = deadline - time.monotonic()
        say(f"{len(units)} cases are right, {sum(map(bool, units.values()))} of them can be planted, {left:.0f} s are left")
        say(f"seconds to find that out: {shown(answer['seconds'])}")
        while len(runs.plain) < args.processes and time.monotonic() + last < deadline:
            began, number = time.monotonic(), len(runs.plain)
            waiting.append(Child())
            answer = waiting.popleft().run(units=units, **ask)
            for into, kind in ((runs.plain, "plain"), (runs.planted, "planted")):
                into.append(records_of(answer["found"], kind, number, answer["device"]))
            last = time.monotonic() - began
            say(f"process {number + 1}: {last:.1f} s: {shown(answer['seconds'])}")
            save(args.out, runs, None)
    finally:
        for one in waiting:
            one.close()
    return runs


def shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{what} {taken:.1f}" for what, taken in seconds.items())


def save(out: Path | None, runs: Runs, found: dict[str, Any] | None) -> None:
    """Medians of each process and case, and what became of them."""
    if out is None:
        return
    medians = {"plain": medians_of(runs.plain), "planted": medians_of(runs.planted)}
    data = {"device": runs.plain[0][0].device, "torch": torch.__version__, "figures": found, "in_turns": runs.anchor is not None}
    data["medians_ms_or_ratios"] = medians
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=40, help="no more than these")
    parser.add_argument("--out", type=Path, help="a JSON file for the medians and the figures")
    parser.add_argument("--limit", type=percent, default="5%", help="the slowdown that must be caught, and is planted")
    parser.add_argument("--in-turns", action="store_true", help="compare ratios to the same kernel, sampled in turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    runs = collect(args)
    if len(runs.plain) < BASELINE + LOOKS:
        say(f"{len(runs.plain)} processes are too few to compare")
        return 1
    found = figures(runs)
    save(args.out, runs, found)
    say("\n".join(f"{name}: {json.dumps(value)}" for name, value in found.items()))
    say(f"{runs.plain[0][0].device}, torch {torch.__version__}")
    return int(len(runs.plain) < LEAST_PROCESSES)


if __name__ == "__main__":
    sys.exit(main())
