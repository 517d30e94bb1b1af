"""Times the block-sparse kernels against each other, over densities, and index building: run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_sparse.py --minutes 2.5 [--do compare,density,index,sweep] [--kernels vsa,vsa_triton]
        [--sizes 64,128,1] [--shapes 8K,32K] [--lengths 32768,131072] [--densities 0.1,0.5] [--json FILE]
    PYTHONPATH=. python tests/gpu/bench_sparse.py --table FILE | --update docs/block-sparse.md

compare: density 0.5, every kernel, shape and block. density: `--lengths` of 32K to 128K tokens, `--densities` of 0.1 to 1.0, in that order,
and what would not fit into the time is left out. sweep: see sweep_sparse. They run in this order, whatever `--do` says.

Every kernel is verified on 1024 tokens first, by other processes. flashinfer compiles for more than a minute in one that then waits, and
is judged and timed when all others have been. A kernel's speed is shown with its error where that is beyond the limit but below
TUNING_GATE, and never from there on, unless its failure is a known one. Figures are medians with a cold L2, TFLOP/s of the selected
pairs, head_dim 128, bf16; groups of eight query heads share a map, under MHA too. `--json` writes records. What to keep comes last.
"""

import argparse
import contextlib
import itertools
import math
import re
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sparse_cases import SMALL_SEQLEN, TUNING_GATE, Teller, case_of, small_case, small_cases, tell, tflop_per_s, timed
from sweep_sparse import PARTS, sweep

from pytest_longca import blocks, catalogue, known_failures
from pytest_longca.case import Case, Direction
from pytest_longca.checks import verify
from pytest_longca.conformance import commit, versions
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import make_inputs
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Kernel
from pytest_longca.kernels import vsa_triton
from pytest_longca.kernels.vsa_triton import Config, Configs
from pytest_longca.machine import Machine
from pytest_longca.outcome import Crashed, KnownWrong, Outcome, OutOfMemory, Passed, Wrong, outcome_from_json
from pytest_longca.report.record import Record, shape_of
from pytest_longca.timing import Effort, Timing

KERNELS = ("vsa_triton", "vsa", "cudnn_sparse", "fa2_sparse", "vsa_fastvideo_triton", "flex", "flashinfer")
"""Those that start fast first; flex compiles each shape."""
LATE = "flashinfer"
SHORT_ONLY = ("flex",)
"""Kernels that are timed on the first shape only: a block mask of the others takes them minutes."""
SHAPES = {"8K": (8192, 16, 16), "32K": (32768, 64, 64), "32K gqa": (32768, 64, 8)}
LENGTHS = (32768, 65536, 131072)
HEADS = ((64, 64), (64, 8))
DENSITIES = (0.1, 0.2, 0.5, 0.8, 1.0)
PASSES = (Direction.FWD, Direction.BWD)
SHORT, LONG = Effort(10, 20, 0.3, patience_s=0.6), Effort(5, 10, 0.5, patience_s=0.5, fewest=2, warm_up_s=0.02)
CALLS = {Direction.FWD: 4, Direction.BWD: 5}
"""How many calls of its own pass the LONG timing of a long call makes, about, the untimed ones too."""
GUESSED_TFLOP_PER_S = 350.0
PROCESS = uuid.uuid4().hex[:12]


class Cell(NamedTuple):
    """One kernel on one case, with the words of its line."""

    kernel: str
    case: Case
    size: int
    density: float
    label: str

    @property
    def small(self) -> str:
        """The id of the case that was judged for it."""
        return small_case(self.size, self.case.group, self.case.direction, self.density).id


def compared(names: list[str], shapes: list[str], sizes: list[int]) -> list[Cell]:
    """The cells of the comparison: the kernels that start fast first, the late one last."""
    first, rest = [name for name in names if name not in (LATE, *SHORT_ONLY)], [name for name in names if name in (LATE, *SHORT_ONLY)]
    found = []
    for group in (first, *([name] for name in rest)):
        for shape in shapes:
            for size in sizes:
                for name in group:
                    if name in SHORT_ONLY and shape != next(iter(SHAPES)):
                        continue
                    cases = [case_of(*SHAPES[shape], size, direction) for direction in PASSES]
                    found += [Cell(name, case, size, 0.5, f"{shape:8} {block_name(size):9}") for case in cases]
    return found


def by_density(names: list[str], sizes: list[int], lengths: list[int], densities: list[float]) -> list[Cell]:
    """The cells of the table of densities."""
    return [
        Cell(name, case_of(seqlen, heads_q, heads_kv, size, direction, density), size, density, label)
        for seqlen in lengths
        for density in densities
        for size in sizes
        for heads_q, heads_kv in HEADS
        for label in [f"{seqlen // 1024:3}K {heads_q}:{heads_kv:<2} {block_name(size):9} {density}"]
        for name in names
        for direction in PASSES
    ]


def block_name(size: int) -> str:
    return f"block {size}" if size > 1 else "variable"


def check_kernel(name: str, sizes: list[int], densities: list[float], groups: list[int], machine: Machine) -> None:
    """Judge a kernel on small cases; tells a line for each pass. A backward that is right shows that the forward is."""
    kernel = catalogue.load(catalogue.KERNELS[name])()
    if kernel.missing():
        return
    both = list(zip(*(small_cases(sizes, groups, densities, direction) for direction in PASSES), strict=True))
    taken = [case for cases in both for case in cases if not kernel.supports(case, machine)]
    if name == LATE and taken:
        kernel.bind(taken[0], make_inputs(taken[0], machine.device))
        sys.stdin.readline()
    for forward, backward in both:
        right = False
        for case in (backward, forward):
            if case not in taken:
                continue
            if not right:
                outcome, worst = judged(kernel, case, machine)
            tell(case.id, outcome.to_json(), worst)
            right = isinstance(outcome, Passed)


def judged(kernel: Kernel, case: Case, machine: Machine) -> tuple[Outcome, float]:
    verification = verify(kernel, case, machine, ("truth",))
    outcome = verification.outcome
    if isinstance(outcome, Wrong) and (entry := known_failures.find(kernel, case, machine, outcome)):
        outcome = KnownWrong(outcome.reason, entry.name)
    return outcome, max(verification.worst.values(), default=0.0)


class Checks:
    """What other processes find on small cases: one process for each kernel and block size, all at once; the late kernel's waits."""

    def __init__(self, names: list[str], sizes: list[int], densities: list[float]) -> None:
        self._tellers = []
        for name, some in [(name, [size]) for name in names if name != LATE for size in sizes] + [(LATE, sizes)] * (LATE in names):
            groups = [1] if name in SHORT_ONLY else sorted({heads_q // heads_kv for heads_q, heads_kv in HEADS})
            asked = {"--check-kernel": name, "--sizes": words(some), "--densities": words(densities), "--groups": words(groups)}
            self._tellers.append((name, Teller(__file__, [word for option in asked.items() for word in option])))
        self._found: dict[tuple[str, str], tuple[Outcome, float]] = {}

    def collect(self, late: bool, deadline: float) -> None:
        """Wait for all but the late kernel, or for that one."""
        ready = [item for item in self._tellers if (item[0] == LATE) == late]
        self._tellers = [item for item in self._tellers if item not in ready]
        for name, teller in ready:
            for case, outcome, worst in teller.told(deadline):
                self._found[name, case] = outcome_from_json(outcome), worst

    def find(self, kernel: str, case: str) -> tuple[Outcome, float] | None:
        return self._found.get((kernel, case))


def words(values: list[int] | list[float]) -> str:
    return ",".join(map(str, values))


class Bench:
    """Times cells, one record and one line each, until the deadline."""

    def __init__(self, checks: Checks, machine: Machine, deadline: float, write: Callable[[Record], None]) -> None:
        self.checks, self.machine, self.deadline, self.write = checks, machine, deadline, write

    def lines(self, cells: list[Cell], effort: Effort) -> list[str]:
        """A line for each label and kernel: TFLOP/s and plan forward and backward. The next map is drawn while one is worked on."""
        by_mask = [(mask, list(group)) for mask, group in itertools.groupby(cells, lambda cell: cell.case.mask)]
        drawings = [threading.Thread(target=mask.area, daemon=True) for mask, _ in by_mask]
        for drawing in drawings[:1]:
            drawing.start()
        rows: dict[tuple[str, str], list[str]] = {}
        for number, (_, group) in enumerate(by_mask):
            drawings[number].join()
            for drawing in drawings[number + 1 : number + 2]:
                drawing.start()
            for cell in group:
                row = rows.setdefault((cell.label, cell.kernel), [f"{cell.label} {cell.kernel:22}"])
                row.append(f"{self.cell(cell, effort):>26}")
                if cell.case.direction is PASSES[-1]:
                    print(" ".join(row), flush=True)
        labels = [label for label, _ in rows]
        return [" ".join(row) for _, row in sorted(rows.items(), key=lambda item: labels.index(item[0][0]))]

    def cell(self, cell: Cell, effort: Effort) -> str:
        """TFLOP/s, or why there are none."""
        kernel = catalogue.load(catalogue.KERNELS[cell.kernel])()
        if kernel.missing() or kernel.supports(cell.case, self.machine):
            return "not installed" if kernel.missing() else "-"
        if cell.kernel == LATE:
            self.checks.collect(True, self.deadline)
        if (found := self.checks.find(cell.kernel, cell.small)) is None:
            return "not verified"
        outcome, worst = found
        if not isinstance(outcome, Passed | KnownWrong) and not 0 < worst < TUNING_GATE:
            print(f"{kernel.name}: {outcome}"[:300], flush=True)
            return outcome.kind
        guess = cell.case.flop() / GUESSED_TFLOP_PER_S / 1e12 * CALLS[cell.case.direction] if effort is LONG else 0.0
        if time.monotonic() + guess > self.deadline:
            return "no time"
        speed = self._timed(kernel, cell.case, outcome, worst, effort)
        return speed if isinstance(outcome, Passed) else f"{speed} (error {worst:.1f})"

    def _timed(self, kernel: Kernel, case: Case, outcome: Outcome, worst: float, effort: Effort) -> str:
        timing = None
        try:
            timing = timed(kernel, case, self.machine, effort)
        except torch.OutOfMemoryError as error:
            outcome = OutOfMemory(str(error).splitlines()[0])
        except DidNotRun as error:
            outcome = error.outcome
        except Exception as error:
            outcome = Crashed(f"{type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
        self.write(record_of(kernel, case, self.machine, outcome, worst, timing))
        if timing is None:
            print(f"{kernel.name}: {outcome}"[:300], flush=True)
            return outcome.kind.replace("_", " ")
        return f"{tflop_per_s(case, timing):.0f}, plan {timing.plan_ms:.0f} ms"


def record_of(kernel: Kernel, case: Case, machine: Machine, outcome: Outcome, worst: float, timing: Timing | None) -> Record:
    """The record of a case; the outcome of one that was timed, and its worst error, are those of the same kernel on 1024 tokens."""
    about = {
        "stage": "timing", "kernel": kernel.name, "mask": case.mask.name, "outcome": outcome.to_json(), "case": case.id,
        "shape": shape_of(case), "direction": str(case.direction), "process": PROCESS, "area": case.area, "flop": case.flop(),
        "device": machine.name, "versions": versions(kernel), "commit": commit(), "command": command(),
    }  # fmt: skip
    facts = {"verified_on": f"{SMALL_SEQLEN} tokens", "error_over_limit": worst}
    if timing is None:
        return Record(**about, facts=facts)
    return Record(
        **about, samples_ms=timing.samples_ms, plan_ms=timing.plan_ms, launch_ms=known(timing.launch_ms),
        compile_ms=known(timing.compile_ms), peak_bytes=timing.peak_bytes, clocks=timing.clocks,
        facts={**timing.facts, "throttled_samples": timing.throttled, "late_samples": timing.late, **facts},
    )  # fmt: skip


def known(ms: float) -> float | None:
    return None if math.isnan(ms) else ms


def command() -> str:
    """The command line without the folders of this machine."""
    return " ".join(["python tests/gpu/bench_sparse.py", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


def markdown(file: Path) -> str:
    """The records of a file as a table: kernels in columns, TFLOP/s forward, then backward, then the milliseconds of the plan.

    That is the plan of the backward, which serves both, where there is one.
    """
    records = [Record.from_line(line) for line in file.read_text(encoding="utf-8").splitlines()]
    kernels = list(dict.fromkeys(record.kernel for record in records))
    lines = [f"| tokens | heads | block | density | {' | '.join(f'`{name}`' for name in kernels)} |", "|---" * (4 + len(kernels)) + "|"]
    sections = {
        "forward": [(record, speed_of(record)) for record in records if record.direction == "fwd"],
        "backward": [(record, speed_of(record)) for record in records if record.direction == "bwd"],
        "plan, ms": [
            (record, f"{record.plan_ms:.1f}")
            for direction in ("fwd", "bwd")
            for record in records
            if record.direction == direction and record.plan_ms is not None
        ],
    }
    for name, found in sections.items():
        lines.append(f"| {name} |" + " |" * (3 + len(kernels)))
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        for record, text in found:
            size, _, density = record.shape["blocks"].partition(" at ")
            heads = f"{record.shape['heads_q']}:{record.shape['heads_kv']}"
            key = (f"{record.shape['seqlen_q']:,}", heads, "64 to 128" if size.startswith("variable") else size, density)
            rows.setdefault(key, {})[record.kernel] = text
        lines += [
            f"| {' | '.join(key)} | {' | '.join(row.get(name, '') for name in kernels)} |"
            for key, row in sorted(rows.items(), key=in_order)
        ]
    return "\n".join(lines)


def updated(page: str, root: Path) -> str:
    """The page with its tables made anew: each stands between a comment with the command that prints it and one that says end."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{markdown(root / found[2])}\n<!-- end -->"

    return re.sub(r"(<!-- python tests/gpu/bench_sparse.py --table (\S+) -->)\n.*?<!-- end -->", table, page, flags=re.S)


def in_order(row: tuple[tuple[str, ...], object]) -> tuple[object, ...]:
    tokens, heads, block, density = row[0]
    return int(tokens.replace(",", "")), -int(heads.partition(":")[2]), block == "64 to 128", int(block.split()[0]), float(density)


def speed_of(record: Record) -> str:
    if not record.samples_ms or record.flop is None:
        return record.kind.replace("_", " ")
    note = "" if record.kind == "passed" else f" ({record.facts['error_over_limit']:.1f} times the limit)"
    return f"{record.flop / statistics.median(record.samples_ms) / 1e9:.0f}{note}"


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


def numbers(text: str) -> list[float]:
    """The numbers of "0.2,0.8"."""
    return [float(x) for x in text.split(",")]


def integers(text: str) -> list[int]:
    """The numbers of "64,128"."""
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--do", default="compare,index,sweep")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--sizes", type=integers, default=[64, 128, 1], help="of blocks; 1: 64 to 128 (default: 64,128,1)")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="a file that gets the records")
    parser.add_argument("--table", type=Path, help="only print the table of a file of records, as Markdown")
    parser.add_argument("--update", type=Path, help="only make the tables of a page anew, from the files that it names")
    parser.add_argument("--lengths", type=integers, default=LENGTHS, help="tokens of the table of densities, in this order (default: all)")
    parser.add_argument("--densities", type=numbers, default=DENSITIES, help="which of the table, in this order (default: all)")
    parser.add_argument("--groups", type=integers, help=argparse.SUPPRESS)
    parser.add_argument("--check-kernel", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(markdown(options.table))
    elif options.update:
        options.update.write_text(updated(options.update.read_text(encoding="utf-8"), Path(__file__).parents[2]), encoding="utf-8")
    elif options.check_kernel:
        check_kernel(options.check_kernel, options.sizes, options.densities, options.groups, find_machine())
    else:
        print("\n".join(["", *bench(options)]))


def bench(options: argparse.Namespace) -> list[str]:
    """Everything that was asked for; the lines to keep."""
    started, steps, names, sizes = time.monotonic(), options.do.split(","), options.kernels.split(","), options.sizes
    deadline = started + 60 * options.minutes
    uniform, many = [size for size in sizes if size > 1], [name for name in names if name not in SHORT_ONLY]
    cells = {
        "compare": (compared(names, options.shapes.split(","), sizes) if "compare" in steps else [], SHORT),
        "density": (by_density(many, uniform, options.lengths, options.densities) if "density" in steps else [], LONG),
    }
    judged_names = [name for name in names if any(name == cell.kernel for some, _ in cells.values() for cell in some)]
    checks = Checks(judged_names, sizes if "compare" in steps else uniform, options.densities if "density" in steps else [0.5])
    checks.collect(False, started + 0.35 * (deadline - started))
    print(f"checks took {time.monotonic() - started:.0f} s", flush=True)
    machine = find_machine()
    summary = [f"{machine.name}, torch {torch.__version__}"]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.json.open("w", encoding="utf-8")) if options.json else None

        def write(record: Record) -> None:
            if file:
                print(record.to_line(), file=file, flush=True)

        timing = Bench(checks, machine, deadline, write)
        for some, effort in cells.values():
            summary += timing.lines(some, effort)
    print(f"timings ended after {time.monotonic() - started:.0f} s", flush=True)
    if "index" in steps:
        summary += time_indices()
        torch.cuda.empty_cache()
    if "sweep" in steps:
        summary += sweep(sizes, list(PARTS), machine, deadline)
    return summary


if __name__ == "__main__":
    main()
