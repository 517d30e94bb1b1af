"""Sweeps vsa_triton's launch table: run on a GPU, as a script, or as a step of bench_sparse.

    PYTHONPATH=. python tests/gpu/sweep_sparse.py --minutes 2 [--sizes 64,128,1] [--parts forward,dq,dkdv]

Every candidate is judged on 1024 tokens first, by other processes, which fills the compiler's cache on the way; it is out from TUNING_GATE
times a limit on. Then each is timed on 8,192 tokens, 16 heads, density 0.5, head_dim 128, bf16. The best four of each part come last.
"""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from sparse_cases import TUNING_GATE, Teller, case_of, small_case, tell, tflop_per_s, timed

from pytest_longca.case import Case, Direction
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Kernel
from pytest_longca.kernels.vsa_triton import CONFIGS, Config, VsaTriton
from pytest_longca.machine import Machine
from pytest_longca.subject import Subject
from pytest_longca.timing import Effort

CHECKERS = 14
QUICK = Effort(10, 40, 0.3)
PARTS = ("forward", "dq", "dkdv")
OWN: dict[str, Any] = {"tma": True, "in_registers": True}
CANDIDATES: dict[int, dict[str, list[Config]]] = {
    64: {
        "forward": [
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, **OWN, max_registers=168),
            Config(64, 64, 4, 3, True),
        ],
        "dq": [Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, **OWN), Config(64, 64, 4, 2, True, max_registers=168)],
        "dkdv": [Config(64, 64, 4, 2, True), Config(32, 64, 4, 3, True)],
    },
    128: {
        "forward": [
            Config(128, 64, 4, 2, True), Config(128, 32, 4, 3, True), Config(64, 128, 4, 1, True, max_registers=168),
            Config(128, 64, 8, 2, True, max_registers=128), Config(64, 64, 4, 3, **OWN), Config(128, 128, 8, 2, True),
        ],
        "dq": [
            Config(128, 32, 8, 2, True, max_registers=128), Config(128, 32, 4, 2, True), Config(128, 32, 4, 3, True),
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, True, max_registers=168),
        ],
        "dkdv": [Config(64, 64, 4, 2, True), Config(32, 64, 4, 3, True)],
    },
    1: {
        "forward": [
            Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, **OWN, max_registers=168), Config(64, 64, 4, 3),
            Config(128, 64, 8, 2, True, max_registers=128),
        ],
        "dq": [
            Config(64, 64, 4, 2, True), Config(64, 32, 4, 3, True), Config(64, 64, 4, 3, **OWN), Config(64, 64, 4, 2),
            Config(128, 64, 8, 2, True),
        ],
        "dkdv": [Config(32, 64, 4, 3, True), Config(64, 64, 4, 2, True), Config(32, 64, 4, 3), Config(32, 64, 4, 2, True)],
    },
}  # fmt: skip
"""What compiles for an H200 with few spills, the likeliest first. At 500 TFLOP/s tiles of 64 x 64 read 4 TB/s from L2 forward and nearly 6
backward, which is about all it gives. Blocks of 128 can halve that: tiles of 128 queries read each key once, by eight warps or by four with
two products each, with so few registers and keys at a time that two programs still live on a multiprocessor."""


@contextlib.contextmanager
def launched_with(size: int, part: str, config: Config) -> Iterator[None]:
    """The launch table with one of its configurations exchanged."""
    kept = CONFIGS[size]
    CONFIGS[size] = dataclasses.replace(kept, **{part: config})
    try:
        yield
    finally:
        CONFIGS[size] = kept


def candidates(sizes: list[int], parts: list[str]) -> list[tuple[int, str, Config]]:
    return [(size, part, config) for size in sizes for part in parts for config in CANDIDATES[size][part]]


def direction_of(part: str) -> Direction:
    return Direction.FWD if part == "forward" else Direction.BWD


def error_over_limit(kernel: Kernel, case: Case, machine: Machine) -> float:
    """The worst of a kernel's tensors."""
    subject = Subject(kernel, case, machine)
    return max(verdict.error_over_limit for verdict in subject.judge(subject.result))


def check_candidates(numbered: list[tuple[int, tuple[int, str, Config]]], machine: Machine) -> None:
    """Judge these candidates; tells a line for each."""
    for number, (size, part, config) in numbered:
        with launched_with(size, part, config):
            try:
                tell(number, error_over_limit(VsaTriton(), small_case(size, 1, direction_of(part)), machine))
            except Exception as error:
                tell(number, f"{type(error).__name__}: {str(error)[:200]}")


def sweep(sizes: list[int], parts: list[str], machine: Machine, deadline: float) -> list[str]:
    """The best four of each part; the launch table then holds the best."""
    asked = ["--sizes", ",".join(map(str, sizes)), "--parts", ",".join(parts)]
    checkers = [Teller(__file__, ["--check", str(first), *asked]) for first in range(CHECKERS)]
    limit = time.monotonic() + 0.5 * (deadline - time.monotonic())
    errors = {number: error for checker in checkers for number, error in checker.told(limit)}
    found: dict[tuple[int, str], list[tuple[float, Config]]] = {}
    for number, (size, part, config) in enumerate(candidates(sizes, parts)):
        error = errors.get(number, "not checked in time")
        if isinstance(error, str) or error >= TUNING_GATE or time.monotonic() > deadline:
            reason = error if isinstance(error, str) else f"error {error:.3g} times its limit" if error >= TUNING_GATE else "no time left"
            print(f"{size} {part} {short(config)}: {reason}", flush=True)
            continue
        with launched_with(size, part, config):
            case = case_of(8192, 16, 16, size, direction_of(part))
            speed = tflop_per_s(case, timed(VsaTriton(), case, machine, QUICK))
        print(f"{size} {part} {short(config)}: {speed:.0f} (error {error:.2f})", flush=True)
        found.setdefault((size, part), []).append((speed, config))
        CONFIGS[size] = dataclasses.replace(CONFIGS[size], **{part: max(found[size, part], key=lambda x: x[0])[1]})
    lines = []
    for (size, part), results in found.items():
        best = sorted(results, key=lambda x: -x[0])[:4]
        lines.append(f"{size} {part}: " + "; ".join(f"{speed:.0f} {short(config)}" for speed, config in best))
    return lines


def short(config: Config) -> str:
    flags = "".join(f" {word}" for word, on in (("tma", config.tma), ("reg", config.in_registers)) if on)
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}{flags} r{config.max_registers or 'any'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--sizes", default="64,128,1")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    deadline, machine = time.monotonic() + 60 * options.minutes, find_machine()
    sizes, parts = [int(size) for size in options.sizes.split(",")], options.parts.split(",")
    if options.check is not None:
        check_candidates(list(enumerate(candidates(sizes, parts)))[options.check :: CHECKERS], machine)
        return
    print("\n".join(["", f"{machine.name}", *sweep(sizes, parts, machine, deadline)]))


if __name__ == "__main__":
    main()
