"""Every block-sparse kernel that is installed, on uniform and variable blocks, on the GPU: one table, made by processes that may die.

    PYTHONPATH=.:$SITE python tests/gpu/test_sparse_gpu.py [--kernels vsa,vsa_triton] [--seconds 500] [--maps 0]

Cells: blocks of 64, of 128 and variable, a map for each head, groups that share one or do not, empty rows, popular columns, MHA and GQA,
each judged against the reference. `--maps N` adds N random maps a kernel. Each line is printed as soon as it is known, the table last.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

KERNELS = ("vsa_triton", "vsa_fastvideo_triton", "vsa", "cudnn_sparse", "fa2_sparse", "flashinfer", "sdpa", "flex")
SIZES_Q = (64, 1, 128, 37, 63, 65, 100, 2, 128, 52)
SIZES_KV = (100, 128, 1, 17, 64, 127, 3, 90, 110)
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
COMPILED = ("uniform64 mha", "uniform128 mha", "variable mha")
"""Groups of cells for a kernel that compiles each shape."""


def cells(maps: int) -> list[tuple[str, Any]]:
    """(group, case): the group is the column of the table."""
    from pytest_longca.block_map import BlockMap
    from pytest_longca.case import Case
    from pytest_longca.masks.block import UniformBlock, VariableBlock

    found = []
    for heads, (heads_q, heads_kv) in HEADS.items():
        sizes = {"batch": 2, "heads_q": heads_q, "heads_kv": heads_kv, "dtype": "bf16"}
        drawn = {
            "": BlockMap("topk", 0.5, heads_q, heads_q // heads_kv),
            " one map": BlockMap("topk", 0.3),
            " per head": BlockMap("topk", 0.5, heads_q, 1, seed=2),
            " empty rows": BlockMap("random", 0.2, heads_q, heads_q // heads_kv, seed=3),
        }
        for note, block_map in drawn.items():
            if note == " per head" and heads == "mha":
                continue  # the first one is
            for name, mask in (
                ("uniform64", UniformBlock(1024, 768, 64, block_map)),
                ("uniform128", UniformBlock(1024, 1280, 128, block_map)),
                ("uniform32", UniformBlock(480, 480, 32, block_map)),
                ("variable", VariableBlock(SIZES_Q, SIZES_KV, block_map)),
            ):
                found += [(f"{name} {heads}{note}", Case(mask=mask, head_dim=dim, **sizes)) for dim in (128, 64)]
    return found + [(f"{case.mask.name} drawn", case) for case in random_cases(maps)]


def random_cases(count: int) -> Iterator[Any]:
    """Random masks; the small and the awkward more often than not."""
    from pytest_longca.case import Case
    from pytest_longca.masks.block import UniformBlock, VariableBlock

    for seed in range(count):
        rng = Random(seed)
        group = rng.choice((1, 1, 2, 4))
        heads_kv = rng.choice((1, 2, 3))
        if rng.random() < 0.5:
            block = rng.choice((64, 128))
            lengths = [block * rng.randint(1, 12) for _ in range(2)]
            drawn = UniformBlock.sample(rng, *lengths, heads=heads_kv * group)
            mask: Any = dataclasses.replace(drawn, block_size=block)
        else:
            mask = VariableBlock.sample(rng, rng.randint(1, 1500), rng.randint(1, 1500), heads=heads_kv * group)
        sizes = {"heads_q": heads_kv * group, "heads_kv": heads_kv, "head_dim": rng.choice((64, 128))}
        yield Case(mask=mask, dtype="bf16", seed=seed, **sizes)


def judged(name: str, case: Any, machine: Any) -> tuple[str, str]:
    """(kind, text) of one cell: the forward alone where there is no backward."""
    from pytest_longca.case import Direction
    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.checks import verify

    kernel = load(KERNELS[name])()
    if missing := kernel.missing():
        return "not_installed", str(missing)
    note = ""
    if kernel.supports(case, machine):
        note, case = " (fwd)", dataclasses.replace(case, direction=Direction.FWD)
    verification = verify(kernel, case, machine, ("truth", "repeat") if kernel.deterministic else ("truth",))
    if verification.outcome.kind != "passed":
        return verification.outcome.kind, str(verification.outcome)
    tensor, worst = max(verification.worst.items(), key=lambda item: item[1])
    return "passed", f"{worst:.2f} {tensor}{note}"


def work(kernel: str, maps: int, start: int, seconds: float) -> None:
    """Judge a kernel's cells from number `start` on; a line of JSON before and after each."""
    import torch

    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.jobs import find_machine

    machine, began = find_machine(), time.monotonic()
    for number, (group, case) in enumerate(cells(maps)):
        compiled = load(KERNELS[kernel]).compiles_per_shape
        if number < start or (compiled and group not in COMPILED):
            continue
        tell(number, "started", "")
        if time.monotonic() - began > seconds:
            tell(number, "not_verified", "no time left")
            continue
        try:
            tell(number, *judged(kernel, case, machine))
        except Exception as error:
            tell(number, "crashed", f"{type(error).__name__}: {error}")
        if machine.device == "cuda":
            torch.cuda.synchronize()  # a poisoned context ends this process here, and the next one goes on


def tell(*fields: Any) -> None:
    print("\x1e" + json.dumps(fields), flush=True)


def run(kernel: str, maps: int, seconds: float) -> Iterator[tuple[int, str, str]]:
    """(number, kind, text) of a kernel's cells, from as many processes as it takes."""
    start, deadline, deaths = 0, time.monotonic() + seconds, 0
    while deaths < 5:
        command = [sys.executable, "-u", __file__, "--work", str(start), "--kernels", kernel, "--maps", str(maps)]
        begun = -1
        with subprocess.Popen([*command, "--seconds", str(deadline - time.monotonic())], stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("\x1e"):
                    continue
                number, kind, text = json.loads(line[1:])
                begun = number if kind == "started" else -1
                start = number + 1
                if kind != "started":
                    yield number, kind, text
        if worker.returncode == 0:
            return
        deaths += 1
        if begun >= 0:
            yield begun, "crashed", f"the process ended with {worker.returncode}"
    print(f"{kernel}: gave up after {deaths} dead processes", flush=True)


def table(found: list[tuple[str, str, str, str]]) -> str:
    """For each kernel: passed cells by kind of block, with the worst error over its limit; every other outcome, with one of its cells."""
    lines = []
    for kernel in dict.fromkeys(line[0] for line in found):
        mine = [line[1:] for line in found if line[0] == kernel]
        passed = {group.split()[0] for group, kind, _ in mine if kind == "passed"}
        for family in sorted(passed):
            texts = [text for group, kind, text in mine if kind == "passed" and group.split()[0] == family]
            lines.append(f"{kernel:22} {family:14} passed {len(texts):3}  worst {max(texts, key=lambda text: float(text.split()[0]))}")
        for reason in dict.fromkeys(
            (kind, text.split(":")[1][:90] if ":" in text else text[:90]) for _, kind, text in mine if kind != "passed"
        ):
            groups = [group for group, kind, text in mine if kind == reason[0] and reason[1] in text]
            lines.append(f"{kernel:22} {reason[0]:14} {len(groups):3} cells{reason[1]}, first {groups[0]}")
    return "\n".join(lines)


def judge_all(kernels: tuple[str, ...], maps: int, seconds: float) -> list[tuple[str, str, str, str]]:
    deadline = time.monotonic() + seconds
    groups = [group for group, _ in cells(maps)]
    found = []
    for position, kernel in enumerate(kernels):
        share = (deadline - time.monotonic()) / (len(kernels) - position)
        for number, kind, text in run(kernel, maps, share):
            found.append((kernel, groups[number], kind, text))
            if kind not in ("passed", "unsupported", "not_installed"):
                print(f"{kernel:22} {groups[number]:28} {kind:12} {text[:400]}", flush=True)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cell_that_the_kernel_takes_is_right(kernel: str) -> None:
    found = judge_all((kernel,), 0, 300.0)
    if all(kind == "not_installed" for _, _, kind, _ in found):
        pytest.skip(found[0][3] if found else "nothing ran")
    assert any(kind == "passed" for _, _, kind, _ in found)
    assert not [line for line in found if line[2] not in ("passed", "unsupported")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--maps", type=int, default=0)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = tuple(options.kernels.split(","))
    if options.work is not None:
        work(kernels[0], options.maps, options.work, options.seconds)
        return
    print(table(judge_all(kernels, options.maps, options.seconds)))


if __name__ == "__main__":
    main()
