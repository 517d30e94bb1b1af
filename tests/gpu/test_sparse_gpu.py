"""Every block-sparse kernel that is installed, on every kind of block map, on the GPU: one table, made by processes that may die.

    PYTHONPATH=.:$SITE python tests/gpu/test_sparse_gpu.py [--kernels vsa,vsa_triton] [--seconds 140] [--maps 0] [--json FILE]

Cells: blocks of 64, 128, 32 and variable, a map for each head, groups that share one or do not, one map for all, popular columns, empty
rows, padded blocks under several batches and numbers of heads, MHA and GQA, each judged against the reference. `--maps N` adds N random
maps a kernel; `pytest --longca-kernels=vsa_triton --longca-masks=block --longca-examples=200 -k examples` draws them with Hypothesis.

All kernels run at once, each in its own processes and up to its own limit of `--seconds`: one that compiles for long, as flashinfer does
with nvcc, keeps nobody waiting. What is not right is printed as soon as it is known; the table comes last, also after SIGINT or SIGTERM.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

KERNELS = {
    "flashinfer": 2,
    "flex": 4,
    "fa4": 2,
    "cudnn_sparse": 2,
    "vsa_fastvideo_triton": 2,
    "vsa_triton": 2,
    "vsa": 1,
    "fa2_sparse": 1,
    "sdpa": 1,
}
"""Processes of each kernel, 17 for 16 cores. Those that compile for long have more, and start first. flashinfer builds a module for each
head dim, behind a lock: as cells take the two head dims in turns, each of its two processes builds one."""
SIZES_Q = (64, 1, 128, 37, 63, 65, 100, 2, 128, 52)
SIZES_KV = (100, 128, 1, 17, 64, 127, 3, 90, 110)
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
HEAD_DIMS = (128, 64)
PADDED = ((1, 1), (1, 4), (1, 16), (2, 1), (2, 4), (2, 16))
"""Batches and heads of the cells that vary nothing else: blocks that some kernels pad, and say so by a size for each. The smallest of them
have one block a side, half of it padding on the key side or on the query side: keys of zeros that count would scale out by about 0.6."""
QUIET = ("passed", "unsupported", "not_installed", "known_wrong")
COLUMNS = ("64", "128", "32", "variable", "mha", "gqa", "one_map", "per_head", "popular", "empty_rows", "padded", "drawn")
SEVERITY = ("crashed", "wrong", "timed_out", "out_of_memory", "not_verified", "known_wrong", "passed", "unsupported", "not_installed")
SHORT = {"not_verified": "no time", "known_wrong": "known", "unsupported": "-", "not_installed": "absent", "out_of_memory": "memory"}
MARK = "\x1e"


class Found(NamedTuple):
    """A cell's outcome: `group` says what kind of map it has, `worst` is its largest error over the limit, 0 where there is none."""

    kernel: str
    group: str
    case: str
    kind: str
    worst: float
    text: str


def cells(maps: int) -> list[tuple[str, Any]]:
    """(group, case): a group's words are the columns of the table that it counts in. Head dims take turns."""
    from pytest_longca.block_map import BlockMap
    from pytest_longca.case import Case
    from pytest_longca.masks.block import UniformBlock, VariableBlock

    found = []
    for heads, (heads_q, heads_kv) in HEADS.items():
        sizes = {"batch": 2, "heads_q": heads_q, "heads_kv": heads_kv, "dtype": "bf16"}
        for name, mask_of, blocks in (
            ("64", partial(UniformBlock, 1024, 768, 64), (16, 12)),
            ("128", partial(UniformBlock, 1024, 1280, 128), (8, 10)),
            ("32", partial(UniformBlock, 480, 480, 32), (15, 15)),
            ("variable", partial(VariableBlock, SIZES_Q, SIZES_KV), (len(SIZES_Q), len(SIZES_KV))),
        ):
            for note, block_map in maps_of(heads_q, heads_q // heads_kv, *blocks).items():
                found += [(f"{name} {heads} {note}".strip(), Case(mask=mask_of(block_map), head_dim=dim, **sizes)) for dim in HEAD_DIMS]
    for batch, count in PADDED:
        sizes = {"batch": batch, "heads_q": count, "heads_kv": count, "head_dim": 128, "dtype": "bf16"}
        for mask in (
            UniformBlock(480, 480, 32, BlockMap("topk", 0.5, count)),
            VariableBlock((64,), (32,), BlockMap("topk", 1.0)),
            VariableBlock((32,), (64,), BlockMap("topk", 1.0)),
        ):
            found.append(("padded", Case(mask=mask, **sizes)))
    return found + [("drawn", case) for case in random_cases(maps)]


def maps_of(heads: int, group: int, blocks_q: int, blocks_kv: int) -> dict[str, Any]:
    """The maps of one set of blocks; popular: every query block selects key block 1 and one more, and none selects the last."""
    from pytest_longca.block_map import BlockMap, ExplicitMap

    rows = [[{1, (5 * row + head // group) % (blocks_kv - 1)} for row in range(blocks_q)] for head in range(heads)]
    found = {
        "": BlockMap("topk", 0.5, heads, group),
        "one_map": BlockMap("topk", 0.3),
        "empty_rows": BlockMap("random", 0.2, heads, group, seed=3),
        "popular": ExplicitMap.of([[[column in row for column in range(blocks_kv)] for row in head] for head in rows]),
    }
    return found if group == 1 else found | {"per_head": BlockMap("topk", 0.5, heads, 1, seed=2)}


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


def numbers(kernel: str, maps: int, part: int) -> list[int]:
    """The cells of one of a kernel's processes. One that compiles every shape takes one head dim: the other shows nothing new of a map."""
    from pytest_longca.catalogue import KERNELS as BUILT_IN
    from pytest_longca.catalogue import load

    every = list(range(part, len(cells(maps)), KERNELS[kernel]))
    if not load(BUILT_IN[kernel]).compiles_per_shape:
        return every
    taken = [number for number, (_, case) in enumerate(cells(maps)) if case.head_dim == HEAD_DIMS[0]]
    return taken[part :: KERNELS[kernel]]


def judged(name: str, case: Any, machine: Any) -> tuple[str, float, str]:
    """(kind, worst, text) of one cell: the forward alone where there is no backward."""
    from pytest_longca.case import Direction
    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.checks import verify
    from pytest_longca.known_failures import find

    kernel = load(KERNELS[name])()
    if missing := kernel.missing():
        return "not_installed", 0.0, str(missing)
    note = ""
    if kernel.supports(case, machine):
        note, case = " (fwd)", dataclasses.replace(case, direction=Direction.FWD)
    verification = verify(kernel, case, machine, ("truth", "repeat") if kernel.deterministic else ("truth",))
    tensor, worst = max(verification.worst.items(), key=lambda item: item[1], default=("", 0.0))
    if verification.outcome.kind == "passed":
        return "passed", worst, f"{worst:.2f} {tensor}{note}"
    if entry := find(kernel, case, machine, verification.outcome):
        return "known_wrong", worst, f"known: {entry.name}"
    return verification.outcome.kind, worst, str(verification.outcome)


def work(kernel: str, chosen: list[int], maps: int) -> None:
    """Judge these cells; a line of JSON before and after each."""
    import torch

    from pytest_longca.jobs import find_machine

    machine, known = find_machine(), cells(maps)
    for number in chosen:
        tell(number, "started", 0.0, "")
        try:
            tell(number, *judged(kernel, known[number][1], machine))
        except Exception as error:
            tell(number, "crashed", 0.0, f"{type(error).__name__}: {error}")
        if machine.device == "cuda":
            torch.cuda.synchronize()  # a poisoned context ends this process here, and the next one goes on


def tell(*fields: Any) -> None:
    print(MARK + json.dumps(fields), flush=True)


def run(kernel: str, maps: int, part: int, deadline: float, running: set[int]) -> Iterator[tuple[int, str, float, str]]:
    """(number, kind, worst, text) of a part of a kernel's cells, from as many processes as it takes, one after the other.

    `running` has the process groups that are alive.
    """
    left = numbers(kernel, maps, part)
    while left and time.monotonic() < deadline:
        command = [sys.executable, "-u", __file__, "--kernels", kernel, "--maps", str(maps), "--work", ",".join(map(str, left))]
        begun: int | None = None
        before, since = len(left), time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as worker:
            running.add(worker.pid)
            timer = threading.Timer(deadline - time.monotonic(), end, [worker.pid])
            timer.start()
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith(MARK):
                    continue
                number, kind, worst, text = json.loads(line[1:])
                begun, since = number if kind == "started" else None, time.monotonic()
                if kind != "started":
                    left.remove(number)
                    yield number, kind, worst, text
            timer.cancel()
        running.discard(worker.pid)
        if begun is None and len(left) == before and time.monotonic() < deadline:
            yield from ((number, "crashed", 0.0, f"no process starts: {worker.returncode}") for number in left)
            return
        if begun is not None and time.monotonic() < deadline:
            left.remove(begun)
            yield begun, "crashed", 0.0, f"the process ended with {worker.returncode}"
        elif begun is not None:
            left.remove(begun)
            yield begun, "not_verified", 0.0, f"cut off after {time.monotonic() - since:.0f} s"
    for number in left:
        yield number, "not_verified", 0.0, "no time left"


def end(group: int) -> None:
    """Kill a worker and what it started, compilers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def judge_all(kernels: tuple[str, ...], maps: int, seconds: float, show: Callable[[Found], None] = lambda line: None) -> list[Found]:
    """Every cell of every kernel, all of them at once. What was found so far, if interrupted."""
    known = [(group, case.id) for group, case in cells(maps)]
    found: list[Found] = []
    lines: queue.SimpleQueue[Found | str] = queue.SimpleQueue()
    running: set[int] = set()
    began = time.monotonic()

    def judge_part(kernel: str, part: int) -> None:
        for number, *outcome in run(kernel, maps, part, began + seconds, running):
            lines.put(Found(kernel, *known[number], *outcome))
        lines.put(kernel)

    parts = [(kernel, part) for kernel in kernels for part in range(KERNELS[kernel])]
    for kernel, part in parts:
        threading.Thread(target=judge_part, args=(kernel, part), daemon=True).start()
    ended: list[str] = []
    try:
        while len(ended) < len(parts):
            line = lines.get()
            if isinstance(line, Found):
                found.append(line)
                show(line)
                continue
            ended.append(line)
            if ended.count(line) == KERNELS[line]:
                print(f"{line:22} ended after {time.monotonic() - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what is known so far", flush=True)
    finally:
        for group in list(running):
            end(group)
    return found


def table(found: list[Found]) -> str:
    """Kernels by kinds of map: the worst error over its limit, or the worst outcome; then every reason, with one of its cells."""
    columns = [column for column in COLUMNS if any(column in line.group.split() for line in found)]
    rows = [f"{'':22}" + "".join(f"{column:>12}" for column in columns)]
    for kernel in dict.fromkeys(line.kernel for line in found):
        of_kind = [[line for line in found if line.kernel == kernel and column in line.group.split()] for column in columns]
        rows.append(f"{kernel:22}" + "".join(f"{shown(lines):>12}" for lines in of_kind))
    reasons: dict[tuple[str, str, str], list[Found]] = {}
    for line in found:
        if line.kind != "passed":
            reasons.setdefault((line.kernel, line.kind, line.text[:140]), []).append(line)
    rows += [f"{kernel}: {len(lines)} cells {kind}, first {lines[0].group}: {text}" for (kernel, kind, text), lines in reasons.items()]
    return "\n".join(rows)


def shown(lines: list[Found]) -> str:
    """One kernel on one kind of map; with how many cells that is, if there was no time for all."""
    passed = [line.worst for line in lines if line.kind == "passed"]
    kind = min((line.kind for line in lines), key=SEVERITY.index, default="")
    if kind == "passed":
        return f"{max(passed):.2f}"
    return f"{max(passed):.2f} {len(passed)}/{len(lines)}" if passed and kind == "not_verified" else SHORT.get(kind, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cell_that_the_kernel_takes_is_right(kernel: str) -> None:
    found = judge_all((kernel,), 0, 300.0)
    if all(line.kind == "not_installed" for line in found):
        pytest.skip(found[0].text if found else "nothing ran")
    assert any(line.kind in ("passed", "known_wrong") for line in found)
    assert not [line for line in found if line.kind not in QUIET]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--seconds", type=float, default=140.0, help="each kernel's limit")
    parser.add_argument("--maps", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file that gets a line of JSON for each cell, as soon as it is known")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = tuple(options.kernels.split(","))
    if options.work:
        work(kernels[0], [int(number) for number in options.work.split(",")], options.maps)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.json.open("w", encoding="utf-8")) if options.json else None

        def show(line: Found) -> None:
            if line.kind not in (*QUIET, "not_verified"):
                print(f"{line.kernel:22} {line.group:24} {line.kind:12} {line.text[:400]} {line.case[:200]}", flush=True)
            if file:
                print(json.dumps(line._asdict()), file=file, flush=True)

        found = judge_all(kernels, options.maps, options.seconds, show)
    print(table(found), flush=True)


if __name__ == "__main__":
    main()
