"""Times the block-sparse kernels against each other, sweeps vsa_triton's launch table, and times index building: run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_sparse.py --minutes 2 [--do sweep,compare,index] [--kernels vsa,vsa_triton] [--sizes 64,128,1]
        [--shapes 8K,32K] [--json FILE]
    PYTHONPATH=. python tests/gpu/bench_sparse.py --table FILE

Every kernel and every candidate of the sweep is verified on 1024 tokens first, by other processes, which fills the compilers' caches on the
way. A candidate is out from TUNING_GATE times a limit on; a kernel's speed is shown with its error where that is beyond the limit but below
the gate, and never from there on, unless its failure is a known one. Figures are medians with a cold L2, TFLOP/s of the selected pairs,
head_dim 128, bf16, density 0.5. `--json` writes records. What to keep comes last.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pytest_longca import blocks, catalogue, known_failures
from pytest_longca.block_map import BlockMap
from pytest_longca.case import Case, Direction
from pytest_longca.checks import verify
from pytest_longca.conformance import commit, versions
from pytest_longca.errors import DidNotRun
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Kernel
from pytest_longca.kernels import vsa_triton
from pytest_longca.kernels.vsa_triton import CONFIGS, Config, Configs, VsaTriton
from pytest_longca.machine import Machine
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.outcome import KnownWrong, Outcome, Passed, Wrong, outcome_from_json
from pytest_longca.report.record import Record, shape_of
from pytest_longca.subject import Subject
from pytest_longca.timing import Effort, Timing, time_case

KERNELS = ("vsa_triton", "vsa", "vsa_fastvideo_triton", "cudnn_sparse", "flashinfer", "flex")
SHAPES = {"8K": (8192, 16, 16), "32K": (32768, 64, 64), "32K gqa": (32768, 64, 8)}
SHORT_ONLY = ("flex",)
"""Kernels that are timed on the first shape only: a block mask of the others takes them minutes."""
CHECK_SEQLEN, CHECK_HEADS = 1024, 16
CHECKERS = 10
QUICK, CAREFUL = Effort(10, 40, 0.3), Effort(15, 50, 0.7)
TUNING_GATE = 3.0
"""Error over limit from which a candidate computes something else. A wrong tile or a lost register is hundreds of times beyond."""
PROCESS = uuid.uuid4().hex[:12]
MARK = "\x1e"
"""Begins a line that a process tells another; str.splitlines would split there."""

PARTS = ("forward", "dq", "dkdv")
OWN = {"tma": True, "in_registers": True}
CANDIDATES: dict[int, dict[str, list[Config]]] = {
    64: {
        "forward": [
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, **OWN, max_registers=168), Config(64, 32, 4, 3, **OWN, max_registers=168),
            Config(64, 32, 4, 4, **OWN, max_registers=168), Config(64, 32, 4, 3, True), Config(64, 64, 4, 2, True),
        ],
        "dq": [
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, **OWN), Config(64, 64, 4, 2, True, max_registers=168),
            Config(64, 32, 4, 2, True, max_registers=168), Config(64, 32, 4, 3, True),
        ],
        "dkdv": [
            Config(64, 64, 4, 2, True), Config(64, 64, 8, 2, True), Config(32, 64, 4, 3, True), Config(32, 64, 4, 2, True),
            Config(32, 64, 4, 3, False),
        ],
    },
    128: {
        "forward": [
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, **OWN, max_registers=168), Config(128, 64, 8, 2, True, max_registers=128),
            Config(128, 32, 8, 4, True, max_registers=128), Config(128, 64, 8, 3, **OWN), Config(128, 128, 8, 2, True),
        ],
        "dq": [
            Config(128, 64, 8, 2, True), Config(128, 64, 8, 2, **OWN), Config(64, 64, 4, 3, **OWN),
            Config(64, 64, 4, 2, True, max_registers=168), Config(64, 32, 4, 2, True, max_registers=168),
        ],
        "dkdv": [
            Config(64, 128, 8, 2, True), Config(32, 128, 8, 3, True), Config(64, 64, 4, 2, True), Config(64, 64, 8, 2, True),
            Config(32, 64, 4, 3, True), Config(32, 64, 4, 2, True),
        ],
    },
    1: {
        "forward": [
            *(Config(64, 64, 4, stages, False, own) for stages in (2, 3) for own in (True, False)),
            Config(64, 32, 4, 3), Config(64, 128, 8, 2), Config(128, 64, 8, 2),
        ],
        "dq": [*(Config(64, 64, 4, stages) for stages in (2, 3)), Config(64, 32, 4, 3), Config(64, 128, 8, 2), Config(128, 64, 8, 2)],
        "dkdv": [
            *(Config(32, 64, 4, stages) for stages in (2, 3)), Config(64, 64, 4, 2), Config(64, 64, 8, 2),
            Config(32, 128, 8, 2), Config(64, 128, 8, 2),
        ],
    },
}  # fmt: skip
"""What compiles without spilling and lets two or three programs live on a multiprocessor of an H200."""


def case_of(seqlen: int, heads_q: int, heads_kv: int, size: int, direction: Direction) -> Case:
    """Blocks of `size` tokens, or of 64 to 128 where size is 1; the heads of a group share a map."""
    group = heads_q // heads_kv
    mask: UniformBlock | VariableBlock = UniformBlock(seqlen, seqlen, max(size, 64), BlockMap("topk", 0.5, heads_q, group))
    if size == 1:
        mask = VariableBlock.default(seqlen, block_size=128, heads=heads_q, group=group)
    return Case(mask=mask, heads_q=heads_q, heads_kv=heads_kv, head_dim=128, dtype="bf16", direction=direction)


@contextlib.contextmanager
def launched_with(size: int, part: str, config: Config) -> Iterator[None]:
    """The launch table with one of its configurations exchanged."""
    kept = CONFIGS[size]
    CONFIGS[size] = dataclasses.replace(kept, **{part: config})
    try:
        yield
    finally:
        CONFIGS[size] = kept


def direction_of(part: str) -> Direction:
    return Direction.FWD if part == "forward" else Direction.BWD


def candidates(sizes: list[int]) -> list[tuple[int, str, Config]]:
    return [(size, part, config) for size in sizes for part in PARTS for config in CANDIDATES[size][part]]


def error_over_limit(kernel: Kernel, case: Case, machine: Machine) -> float:
    """The worst of a kernel's tensors."""
    subject = Subject(kernel, case, machine)
    return max(verdict.error_over_limit for verdict in subject.judge(subject.result))


def check_candidates(sizes: list[int], first: int, machine: Machine) -> None:
    """Judge every CHECKERS-th candidate from number `first` on; prints a line for each."""
    for number, (size, part, config) in list(enumerate(candidates(sizes)))[first::CHECKERS]:
        case = case_of(CHECK_SEQLEN, CHECK_HEADS, CHECK_HEADS, size, direction_of(part))
        with launched_with(size, part, config):
            try:
                tell(number, error_over_limit(VsaTriton(), case, machine))
            except Exception as error:
                tell(number, f"{type(error).__name__}: {str(error)[:200]}")


def check_kernel(name: str, sizes: list[int], machine: Machine) -> None:
    """Verify a kernel on a small case for each of the sizes, heads and passes of the comparison; prints a line for each."""
    kernel = catalogue.load(catalogue.KERNELS[name])()
    if kernel.missing():
        return
    for case in small_cases(sizes):
        if kernel.supports(case, machine):
            continue
        verification = verify(kernel, case, machine, ("truth",))
        outcome = verification.outcome
        if isinstance(outcome, Wrong) and (entry := known_failures.find(kernel, case, machine, outcome)):
            outcome = KnownWrong(outcome.reason, entry.name)
        tell(case.id, outcome.to_json(), max(verification.worst.values(), default=0.0))


def small_cases(sizes: list[int]) -> Iterator[Case]:
    for group in sorted({heads_q // heads_kv for _, heads_q, heads_kv in SHAPES.values()}):
        for size in sizes:
            for direction in (Direction.FWD, Direction.BWD):
                yield case_of(CHECK_SEQLEN, CHECK_HEADS, CHECK_HEADS // group, size, direction)


def tell(*fields: object) -> None:
    print(MARK + json.dumps(fields), flush=True)


def told(arguments: list[str], seconds: float) -> list[list[Any]]:
    """What another process of this script told until its end or the deadline."""
    command = [sys.executable, __file__, *arguments]
    try:
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(1.0, seconds)).stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    return [json.loads(line[1:]) for line in text.split("\n") if line.startswith(MARK) and line.endswith("]")]


class Checks:
    """What other processes found on small cases: candidates by number, kernels by name and case; started all at once."""

    def __init__(self, names: list[str], sizes: list[int], sweep: bool, seconds: float) -> None:
        listed = ",".join(map(str, sizes))
        with ThreadPoolExecutor(CHECKERS + len(names)) as pool:
            rest = [pool.submit(told, ["--check", str(first), "--sizes", listed], seconds) for first in range(CHECKERS * sweep)]
            kernels = {name: pool.submit(told, ["--check-kernel", name, "--sizes", listed], seconds) for name in names}
            self.candidates = {number: found for job in rest for number, found in job.result()}
            self.kernels: dict[str, dict[str, tuple[Outcome, float]]] = {
                name: {case: (outcome_from_json(outcome), worst) for case, outcome, worst in job.result()} for name, job in kernels.items()
            }


def sweep(sizes: list[int], checks: Checks, machine: Machine, deadline: float) -> list[str]:
    """The best configurations, which the launch table then holds for the comparison."""
    found: dict[tuple[int, str], list[tuple[float, Config]]] = {}
    for number, (size, part, config) in enumerate(candidates(sizes)):
        error = checks.candidates.get(number, "not checked in time")
        if isinstance(error, str) or error >= TUNING_GATE or time.monotonic() > deadline:
            reason = error if isinstance(error, str) else f"error {error:.3g} times its limit" if error >= TUNING_GATE else "no time left"
            print(f"{size} {part} {short(config)}: {reason}", flush=True)
            continue
        with launched_with(size, part, config):
            case = case_of(8192, 16, 16, size, direction_of(part))
            speed = tflop_per_s(case, time_case(VsaTriton(), case, machine, QUICK))
        print(f"{size} {part} {short(config)}: {speed:.0f} (error {error:.2f})", flush=True)
        found.setdefault((size, part), []).append((speed, config))
    for (size, part), results in found.items():
        CONFIGS[size] = dataclasses.replace(CONFIGS[size], **{part: max(results, key=lambda x: x[0])[1]})
    lines = []
    for (size, part), results in found.items():
        best = sorted(results, key=lambda x: -x[0])[:4]
        lines.append(f"{size} {part}: " + "; ".join(f"{speed:.0f} {short(config)}" for speed, config in best))
    return lines


def short(config: Config) -> str:
    flags = f"{' tma' if config.tma else ''}{' reg' if config.in_registers else ''}"
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}{flags} r{config.max_registers or 'any'}"


def tflop_per_s(case: Case, timing: Timing) -> float:
    return case.flop() / statistics.median(timing.samples_ms) / 1e9


class Comparison:
    """Times kernels on the shapes, one record and one cell of the table each."""

    def __init__(self, checks: Checks, machine: Machine, deadline: float, write: Callable[[Record], None]) -> None:
        self.checks, self.machine, self.deadline, self.write = checks, machine, deadline, write

    def lines(self, names: list[str], shapes: list[str], sizes: list[int]) -> list[str]:
        """A line for each kernel, size and shape: TFLOP/s forward and backward."""
        lines = []
        for shape in shapes:
            for size in sizes:
                for name in names:
                    if name in SHORT_ONLY and shape != next(iter(SHAPES)):
                        continue
                    cases = [case_of(*SHAPES[shape], size, direction) for direction in (Direction.FWD, Direction.BWD)]
                    cells = [self.cell(catalogue.load(catalogue.KERNELS[name])(), case, size) for case in cases]
                    block = f"block {size}" if size > 1 else "variable"
                    lines.append(f"{shape:8} {block:9} {name:22} {cells[0]:>18} {cells[1]:>18}")
                    print(lines[-1], flush=True)
        return lines

    def cell(self, kernel: Kernel, case: Case, size: int) -> str:
        """TFLOP/s, or why there are none."""
        if kernel.missing() or kernel.supports(case, self.machine):
            return "not installed" if kernel.missing() else "unsupported"
        small = case_of(CHECK_SEQLEN, CHECK_HEADS, CHECK_HEADS // case.group, size, case.direction)
        if small.id not in self.checks.kernels[kernel.name]:
            return "not verified"
        outcome, worst = self.checks.kernels[kernel.name][small.id]
        if not isinstance(outcome, Passed | KnownWrong) and not 0 < worst < TUNING_GATE:
            print(f"{kernel.name}: {outcome}"[:300], flush=True)
            return outcome.kind
        if time.monotonic() > self.deadline:
            return "no time"
        speed = self._timed(kernel, case, outcome, worst)
        return speed if isinstance(outcome, Passed) else f"{speed} (error {worst:.1f})"

    def _timed(self, kernel: Kernel, case: Case, outcome: Outcome, worst: float) -> str:
        try:
            timing = time_case(kernel, case, self.machine, CAREFUL)
        except (torch.OutOfMemoryError, DidNotRun) as error:
            return "out of memory" if isinstance(error, torch.OutOfMemoryError) else error.outcome.kind
        except Exception as error:
            print(f"{kernel.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return "crashed"
        finally:
            torch.cuda.empty_cache()
        self.write(record_of(kernel, case, self.machine, outcome, worst, timing))
        return f"{tflop_per_s(case, timing):.0f}"


def record_of(kernel: Kernel, case: Case, machine: Machine, outcome: Outcome, worst: float, timing: Timing) -> Record:
    """The record of a timed case; its outcome and worst error are those of the same kernel on 1024 tokens."""
    facts = {**timing.facts, "throttled_samples": timing.throttled, "verified_on": f"{CHECK_SEQLEN} tokens", "error_over_limit": worst}
    return Record(
        stage="timing", kernel=kernel.name, mask=case.mask.name, outcome=outcome.to_json(), case=case.id, shape=shape_of(case),
        direction=str(case.direction), samples_ms=timing.samples_ms, process=PROCESS, plan_ms=timing.plan_ms, compile_ms=timing.compile_ms,
        launch_ms=timing.launch_ms, peak_bytes=timing.peak_bytes, area=case.area, flop=case.flop(), device=machine.name, facts=facts,
        clocks=timing.clocks, versions=versions(kernel), commit=commit(),
    )  # fmt: skip


def markdown(file: Path) -> str:
    """The records of a file as a table: TFLOP/s of each kernel, block and heads, forward and backward, in the order of the file."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in map(Record.from_line, file.read_text(encoding="utf-8").splitlines()):
        assert record.samples_ms and record.flop is not None
        size = record.shape["blocks"].partition(" ")[0]
        key = (f"{record.shape['seqlen_q']:,}", f"{record.shape['heads_q']}:{record.shape['heads_kv']}", size, f"`{record.kernel}`")
        note = "" if record.kind == "passed" else f" ({record.kind}, {record.facts['error_over_limit']:.1f} times the limit)"
        speed = record.flop / statistics.median(record.samples_ms) / 1e9
        rows.setdefault(key, {})[str(record.direction)] = f"{speed:.0f}{note}"
    head = ["| tokens | heads | block | kernel | fwd | bwd |", "|---|---|---|---|---|---|"]
    lines = [f"| {' | '.join(key)} | {cells.get('fwd', '')} | {cells.get('bwd', '')} |" for key, cells in rows.items()]
    return "\n".join(head + lines)


def time_indices() -> list[str]:
    """Milliseconds for the index forms of a map of 128K tokens, 64 heads, blocks of 64, half of it selected."""
    block_map = torch.rand(64, 2048, 2048, device="cuda") < 0.5
    sizes = (64,) * 2048
    config = Config(64, 64)
    jobs = {
        "q2k lists": lambda: blocks.padded_lists(block_map),
        "k2q lists": lambda: blocks.padded_lists(blocks.transposed(block_map)),
        "q2k csr": lambda: blocks.csr(block_map),
        "plan fwd": lambda: vsa_triton.make_plan(block_map, sizes, sizes, 64, 64, Configs(config, config, config), backward=False),
        "plan fwd+bwd": lambda: vsa_triton.make_plan(block_map, sizes, sizes, 64, 64, Configs(config, config, config)),
    }
    return [f"{name:12} {milliseconds(job):8.1f} ms" for name, job in jobs.items()]


def milliseconds(job: object) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = job()  # type: ignore[operator]  # a function without arguments
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        del kept
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--do", default="sweep,index,compare")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--sizes", default="64,128,1")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="a file that gets the records of the comparison")
    parser.add_argument("--table", type=Path, help="only print the table of a file of records, as Markdown")
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--check-kernel", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.table:
        print(markdown(options.table))
    elif options.check is not None:
        check_candidates(sizes, options.check, find_machine())
    elif options.check_kernel:
        check_kernel(options.check_kernel, sizes, find_machine())
    else:
        print("\n".join(["", *bench(options, sizes)]))


def bench(options: argparse.Namespace, sizes: list[int]) -> list[str]:
    """Everything that was asked for; the lines to keep."""
    started, steps, names = time.monotonic(), options.do.split(","), options.kernels.split(",")
    seconds = 60 * options.minutes
    compares = "compare" in steps
    checks = Checks(names if compares else [], sizes, "sweep" in steps, 0.4 * seconds)
    print(f"checks took {time.monotonic() - started:.0f} s", flush=True)
    machine = find_machine()
    summary = [f"{machine.name}, torch {torch.__version__}"]
    if "sweep" in steps:
        summary += sweep(sizes, checks, machine, started + (0.65 if compares else 1.0) * seconds)
    if "index" in steps:
        summary += time_indices()
        torch.cuda.empty_cache()
    if compares:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(options.json.open("w", encoding="utf-8")) if options.json else None

            def write(record: Record) -> None:
                if file:
                    print(record.to_line(), file=file, flush=True)

            summary += Comparison(checks, machine, started + seconds, write).lines(names, options.shapes.split(","), sizes)
    return summary


if __name__ == "__main__":
    main()
