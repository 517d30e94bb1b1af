"""Times the block-sparse kernels against each other, sweeps vsa_triton's launch table, and times index building: run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_sparse.py --minutes 9 [--do sweep,compare,index] [--kernels vsa,vsa_triton] [--sizes 64,128,1]

Every kernel and every candidate of the sweep is verified on 1024 tokens first, candidates by other processes, which fills the compilers'
caches on the way. Figures are medians with a cold L2, TFLOP/s of the selected pairs, head_dim 128, bf16, density 0.5. What to keep comes
last.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from pytest_longca import blocks, catalogue
from pytest_longca.block_map import BlockMap
from pytest_longca.case import Case, Direction
from pytest_longca.checks import verify
from pytest_longca.jobs import find_machine
from pytest_longca.kernels import vsa_triton
from pytest_longca.kernels.vsa_triton import CONFIGS, Config, Configs, VsaTriton
from pytest_longca.machine import Machine
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.outcome import Passed
from pytest_longca.timing import Effort, time_case

KERNELS = ("vsa_triton", "vsa", "vsa_fastvideo_triton", "cudnn_sparse", "flex", "flashinfer", "fa2_sparse")
SHAPES = {"8K 16h": (8192, 16, 16), "32K 64h": (32768, 64, 64), "32K 64:8h": (32768, 64, 8)}
CHECK_SEQLEN, CHECK_HEADS = 1024, 16
CHECKERS = 8
QUICK, CAREFUL = Effort(10, 40, 0.4), Effort(15, 60, 2.0)

PARTS = ("forward", "dq", "dkdv")
CANDIDATES: dict[int, dict[str, list[Config]]] = {
    64: {
        "forward": [
            *(Config(64, 64, 4, stages, tma, own) for stages in (2, 3, 4) for tma in (True, False) for own in (True, False)),
            Config(64, 64, 8, 3, True, False), Config(64, 32, 4, 4, True, True), Config(64, 32, 4, 3, True, False),
        ],
        "dq": [
            *(Config(64, 64, 4, stages, tma, own) for stages in (2, 3) for tma in (True, False) for own in (True, False)),
            Config(64, 32, 4, 3, True, True), Config(64, 32, 4, 3, True, False), Config(64, 64, 8, 3, True, False),
        ],
        "dkdv": [
            *(Config(64, 64, warps, stages, True) for warps in (4, 8) for stages in (2, 3)),
            *(Config(32, 64, 4, stages, True) for stages in (2, 3, 4)),
            Config(64, 64, 4, 2, False), Config(32, 64, 4, 3, False),
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
    128: {
        "forward": [
            *(Config(128, 128, 8, stages, True, own) for stages in (2, 3) for own in (True, False)),
            *(Config(128, 64, 8, stages, True, own) for stages in (2, 3, 4) for own in (True, False)),
            *(Config(64, 128, 4, 2, True, own) for own in (True, False)),
            Config(128, 128, 8, 2, False), Config(64, 64, 4, 3, True, True),
        ],
        "dq": [
            *(Config(128, 64, 8, stages, True, own) for stages in (2, 3) for own in (True, False)),
            *(Config(128, 128, 8, 2, True, own) for own in (True, False)),
            Config(64, 128, 4, 2, True, False), Config(64, 128, 4, 2, True, True), Config(64, 64, 4, 3, True, True),
        ],
        "dkdv": [
            *(Config(64, 128, 8, stages, tma) for stages in (2, 3) for tma in (True, False)),
            Config(32, 128, 8, 3, True), Config(64, 64, 4, 2, True), Config(32, 64, 4, 3, True),
        ],
    },
}  # fmt: skip


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


def check(sizes: list[int], first: int, machine: Machine) -> None:
    """Verify every CHECKERS-th candidate from number `first` on; prints a line for each that is right."""
    for number, (size, part, config) in list(enumerate(candidates(sizes)))[first::CHECKERS]:
        case = case_of(CHECK_SEQLEN, CHECK_HEADS, CHECK_HEADS, size, direction_of(part))
        with launched_with(size, part, config):
            try:
                outcome = verify(VsaTriton(), case, machine, ("truth",)).outcome
            except Exception as error:
                print(f"{size} {part} {short(config)}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                continue
        print(f"\x1e{json.dumps([number, isinstance(outcome, Passed), str(outcome)])}", flush=True)


def verified(sizes: list[int], seconds: float) -> set[int]:
    """The numbers of the candidates that other processes found right."""

    def run(first: int) -> str:
        command = [sys.executable, __file__, "--check", str(first), "--sizes", ",".join(map(str, sizes))]
        try:
            return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds).stdout
        except subprocess.TimeoutExpired as late:
            return late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""

    with ThreadPoolExecutor(CHECKERS) as pool:
        lines = [json.loads(line[1:]) for text in pool.map(run, range(CHECKERS)) for line in text.splitlines() if line.startswith("\x1e")]
    for number, right, says in lines:
        if not right:
            print(f"candidate {candidates(sizes)[number]}: {says[:300]}", flush=True)
    return {number for number, right, _ in lines if right}


def tflop_per_s(kernel: object, case: Case, machine: Machine, effort: Effort) -> float:
    timing = time_case(kernel, case, machine, effort)  # type: ignore[arg-type]  # an instance of a kernel
    return case.flop() / statistics.median(timing.samples_ms) / 1e9


def sweep(sizes: list[int], machine: Machine, deadline: float) -> list[str]:
    """The best configurations, which the launch table then holds for the comparison."""
    right = verified(sizes, 0.5 * (deadline - time.monotonic()))
    print(f"{len(right)} of {len(candidates(sizes))} candidates verified", flush=True)
    found: dict[tuple[int, str], list[tuple[float, Config]]] = {}
    for number, (size, part, config) in enumerate(candidates(sizes)):
        if number not in right or time.monotonic() > deadline:
            print(f"{size} {part} {short(config)}: {'no time left' if number in right else 'not verified'}", flush=True)
            continue
        with launched_with(size, part, config):
            speed = tflop_per_s(VsaTriton(), case_of(8192, 16, 16, size, direction_of(part)), machine, QUICK)
        print(f"{size} {part} {short(config)}: {speed:.0f}", flush=True)
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
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}{flags}"


def compare(names: list[str], sizes: list[int], machine: Machine, deadline: float) -> list[str]:
    """A line for each kernel, size and shape: TFLOP/s forward and backward."""
    lines = []
    for shape, (seqlen, heads_q, heads_kv) in SHAPES.items():
        for size in sizes:
            for name in names:
                speeds = [
                    speed_or_reason(name, case_of(seqlen, heads_q, heads_kv, size, direction), machine, deadline)
                    for direction in (Direction.FWD, Direction.BWD)
                ]
                lines.append(f"{shape:10} {f'block {size}' if size > 1 else 'variable':9} {name:22} {speeds[0]:>14} {speeds[1]:>14}")
                print(lines[-1], flush=True)
    return lines


def speed_or_reason(name: str, case: Case, machine: Machine, deadline: float) -> str:
    kernel = catalogue.load(catalogue.KERNELS[name])()
    if time.monotonic() > deadline:
        return "no time"
    if kernel.missing() or kernel.supports(case, machine):
        return "not installed" if kernel.missing() else "unsupported"
    size = case.mask.block_size if isinstance(case.mask, UniformBlock) else 1
    small = case_of(CHECK_SEQLEN, CHECK_HEADS, CHECK_HEADS // case.group, size, case.direction)
    try:
        outcome = verify(kernel, small, machine, ("truth",)).outcome
        if not isinstance(outcome, Passed):
            print(f"{name}: {outcome}"[:400], flush=True)
            return outcome.kind
        return f"{tflop_per_s(kernel, case, machine, CAREFUL):.0f}"
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return "crashed"
    finally:
        torch.cuda.empty_cache()


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
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    machine = find_machine()
    if options.check is not None:
        check(sizes, options.check, machine)
        return
    started, steps = time.monotonic(), options.do.split(",")
    deadline = started + 60 * options.minutes
    summary = [f"{machine.name}, torch {torch.__version__}"]
    if "sweep" in steps:
        share = 0.6 if "compare" in steps else 1.0
        summary += sweep(sizes, machine, started + share * 60 * options.minutes)
    if "index" in steps:
        summary += time_indices()
        torch.cuda.empty_cache()
    if "compare" in steps:
        summary += compare(options.kernels.split(","), sizes, machine, deadline)
    print("\n".join(["", *summary]))


if __name__ == "__main__":
    main()
