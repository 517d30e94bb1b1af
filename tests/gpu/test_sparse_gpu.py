"""Every block-sparse kernel that is installed, on uniform and variable blocks, on the GPU: one table, made by processes that may die.

    PYTHONPATH=.:$SITE python tests/gpu/test_sparse_gpu.py [--kernels vsa,vsa_triton] [--seconds 500] [--parts 2] [--maps 0] [--json FILE]

Cells: blocks of 64, of 128 and variable, a map for each head, groups that share one or do not, empty rows, padded blocks under several
batches and numbers of heads, MHA and GQA, each judged against the reference. `--maps N` adds N random maps a kernel. All kernels run at
once, each in `--parts` processes that share its cells. Each line is printed as soon as it is known, the table last.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

KERNELS = ("vsa_triton", "vsa_fastvideo_triton", "vsa", "cudnn_sparse", "fa2_sparse", "flashinfer", "sdpa", "flex")
SIZES_Q = (64, 1, 128, 37, 63, 65, 100, 2, 128, 52)
SIZES_KV = (100, 128, 1, 17, 64, 127, 3, 90, 110)
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
PADDED = ((1, 4), (1, 16), (2, 4), (2, 16))
"""Batches and heads of the cells that vary nothing else: blocks that some kernels pad, and say so by a size for each."""
QUIET = ("passed", "unsupported", "not_installed", "known_wrong")
COMPILED = ("uniform64 mha", "uniform128 mha", "variable mha")
"""Groups of cells for a kernel that compiles each shape."""

Found = tuple[str, str, str, str, str]
"""Kernel, group of cells, case, kind of outcome, text."""


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
    for batch, count in PADDED:
        mask = UniformBlock(480, 480, 32, BlockMap("topk", 0.5, count))
        found.append((f"padded b{batch} h{count}", Case(mask=mask, batch=batch, heads_q=count, heads_kv=count, head_dim=128, dtype="bf16")))
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
    from pytest_longca.known_failures import find

    kernel = load(KERNELS[name])()
    if missing := kernel.missing():
        return "not_installed", str(missing)
    note = ""
    if kernel.supports(case, machine):
        note, case = " (fwd)", dataclasses.replace(case, direction=Direction.FWD)
    verification = verify(kernel, case, machine, ("truth", "repeat") if kernel.deterministic else ("truth",))
    if verification.outcome.kind != "passed":
        entry = find(kernel, case, machine, verification.outcome)
        return ("known_wrong", f"known: {entry.name}") if entry else (verification.outcome.kind, str(verification.outcome))
    tensor, worst = max(verification.worst.items(), key=lambda item: item[1])
    return "passed", f"{worst:.2f} {tensor}{note}"


def work(kernel: str, maps: int, start: int, parts: int, seconds: float) -> None:
    """Judge every `parts`-th of a kernel's cells from number `start` on; a line of JSON before and after each."""
    import torch

    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.jobs import find_machine

    machine, began = find_machine(), time.monotonic()
    compiled = load(KERNELS[kernel]).compiles_per_shape
    for number, (group, case) in list(enumerate(cells(maps)))[start::parts]:
        if compiled and group not in COMPILED:
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


def run(kernel: str, maps: int, seconds: float, part: int, parts: int) -> Iterator[tuple[int, str, str]]:
    """(number, kind, text) of a part of a kernel's cells, from as many processes as it takes, one after the other."""
    start, deadline, deaths = part, time.monotonic() + seconds, 0
    while deaths < 5:
        command = [sys.executable, "-u", __file__, "--work", str(start), "--kernels", kernel, "--maps", str(maps), "--parts", str(parts)]
        begun = -1
        with subprocess.Popen([*command, "--seconds", str(deadline - time.monotonic())], stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("\x1e"):
                    continue
                number, kind, text = json.loads(line[1:])
                begun = number if kind == "started" else -1
                start = number + parts
                if kind != "started":
                    yield number, kind, text
        if worker.returncode == 0:
            return
        deaths += 1
        if begun >= 0:
            yield begun, "crashed", f"the process ended with {worker.returncode}"
    print(f"{kernel}: gave up after {deaths} dead processes", flush=True)


def table(found: list[Found]) -> str:
    """For each kernel: passed cells by kind of block, with the worst error over its limit; every other outcome, with one of its cells."""
    lines = []
    for kernel in dict.fromkeys(line[0] for line in found):
        mine = [(group, kind, text) for name, group, _, kind, text in found if name == kernel]
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


def judge_all(kernels: tuple[str, ...], maps: int, seconds: float, parts: int) -> list[Found]:
    """Every cell of every kernel, all of them at once; what is not right is printed when it is known."""
    known = [(group, case.id) for group, case in cells(maps)]

    def judge_part(kernel: str, part: int) -> list[Found]:
        found: list[Found] = []
        for number, kind, text in run(kernel, maps, seconds, part, parts):
            found.append((kernel, *known[number], kind, text))
            if kind not in QUIET:
                print(f"{kernel:22} {known[number][0]:28} {kind:12} {text[:400]}", flush=True)
        return found

    with ThreadPoolExecutor(len(kernels) * parts) as pool:
        jobs = [pool.submit(judge_part, kernel, part) for kernel in kernels for part in range(parts)]
        return [line for job in jobs for line in job.result()]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cell_that_the_kernel_takes_is_right(kernel: str) -> None:
    found = judge_all((kernel,), 0, 300.0, 2)
    if all(line[3] == "not_installed" for line in found):
        pytest.skip(found[0][4] if found else "nothing ran")
    assert any(line[3] in ("passed", "known_wrong") for line in found)
    assert not [line for line in found if line[3] not in QUIET]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--maps", type=int, default=0)
    parser.add_argument("--parts", type=int, default=2, help="processes for each kernel")
    parser.add_argument("--json", type=Path, help="a file that gets a line of JSON for each cell")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = tuple(options.kernels.split(","))
    if options.work is not None:
        work(kernels[0], options.maps, options.work, options.parts, options.seconds)
        return
    found = judge_all(kernels, options.maps, options.seconds, options.parts)
    if options.json:
        lines = (json.dumps(dict(zip(("kernel", "group", "case", "kind", "text"), line, strict=True))) + "\n" for line in found)
        options.json.write_text("".join(lines), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
