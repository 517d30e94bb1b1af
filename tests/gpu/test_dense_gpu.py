"""Every dense kernel that is installed, on every static mask, on the GPU: one table, made by processes that are replaced when they die.

    PYTHONPATH=.:$SITE python tests/gpu/test_dense_gpu.py [--kernels fa2,fa4] [--shapes gqa64,gqa128] [--seconds 500] [--json FILE]

Each cell is printed as soon as it is known: the worst error over its limit, or why there is none. Nothing stops at the first failure.
With --known the entries of the known-failures file are tried instead, each on its case and on smaller ones.
"""

import argparse
import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KERNELS = (
    "naive", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "fa2", "fa3", "flashmask", "cudnn",
    "cudnn_flex", "fa4", "flex",
)  # fmt: skip
"""Those that compile for long come last."""
COMPILED_SHAPES = ("gqa64", "uneven")
"""For a kernel that compiles each shape: the others cost seconds each and show it nothing new."""
PARTS = 12
"""Processes at once, as many as there are masks: backends compile for seconds, on one core each."""
DOCUMENTS, DOCUMENTS_KV = (300, 0, 1, 130, 569), (310, 7, 1, 0, 482)
SHAPES: dict[str, dict[str, Any]] = {
    "gqa64": {"lengths": (1000, 1000), "sizes": {"heads_q": 8, "heads_kv": 2, "head_dim": 64, "dtype": "bf16"}},
    "gqa128": {"lengths": (1000, 1000), "sizes": {"batch": 2, "heads_q": 8, "heads_kv": 2, "head_dim": 128, "dtype": "bf16"}},
    "mha72": {"lengths": (1000, 1000), "sizes": {"heads_q": 3, "heads_kv": 3, "head_dim": 72, "dtype": "fp16"}},
    "short": {"lengths": (1000, 800), "sizes": {"heads_q": 8, "heads_kv": 2, "head_dim": 128, "dtype": "bf16"}},
    "uneven": {"lengths": (800, 1000), "sizes": {"batch": 2, "heads_q": 6, "heads_kv": 3, "head_dim": 128, "dtype": "fp16"}},
}


def masks(seqlen_q: int, seqlen_kv: int) -> Iterator[Any]:
    """The 12 static masks with awkward parameters; the regular ones alone where the lengths differ."""
    from pytest_longca.masks import document, prefix, regular, window

    unequal_docs = (DOCUMENTS, DOCUMENTS_KV) if seqlen_q == 1000 else (tuple(reversed(DOCUMENTS_KV)), tuple(reversed(DOCUMENTS)))
    documents = (DOCUMENTS,) if seqlen_q == seqlen_kv else unequal_docs
    yield regular.Full(seqlen_q, seqlen_kv)
    yield regular.Causal(seqlen_q, seqlen_kv)
    yield regular.FullSlidingWindow(seqlen_q, seqlen_kv, 77)
    yield regular.CausalSlidingWindow(seqlen_q, seqlen_kv, 200)
    yield document.FullDocument(*documents)
    yield document.CausalDocument(*documents)
    if seqlen_q == seqlen_kv:
        yield document.SharedQuestion(DOCUMENTS)
        yield window.GlobalSlidingWindow(seqlen_q, seqlen_kv, 77, 130)
        yield document.CausalBlockwise(DOCUMENTS)
        yield prefix.PrefixLmCausal(seqlen_q, seqlen_kv, 333)
        yield prefix.PrefixLmDocument(DOCUMENTS, (128, 0, 1, 129, 5))
        yield document.BlockCausalDocument(DOCUMENTS, 100)


def cells(kernels: tuple[str, ...], shapes: tuple[str, ...], part: int, parts: int) -> list[tuple[str, str, Any]]:
    """(kernel, shape, case) of one part's masks, in a fixed order, so that a new process can go on where the last one died."""
    from pytest_longca.case import Case
    from pytest_longca.catalogue import KERNELS, load

    found = []
    for kernel in kernels:
        compiled = load(KERNELS[kernel]).compiles_per_shape
        for shape in shapes:
            if compiled and shape not in COMPILED_SHAPES:
                continue
            spec = SHAPES[shape]
            found += [(kernel, shape, Case(mask=mask, **spec["sizes"])) for mask in list(masks(*spec["lengths"]))[part::parts]]
    return found


def judged(name: str, case: Any, machine: Any) -> dict[str, Any]:
    """One cell, judged: the forward alone where there is no backward."""
    from pytest_longca.case import Direction
    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.checks import verify
    from pytest_longca.known_failures import find

    kernel = load(KERNELS[name])()
    if missing := kernel.missing():
        return {"kind": "not_installed", "text": str(missing)}
    refused = ""
    if (reason := kernel.supports(case, machine)) and case.direction is not Direction.FWD:
        refused, case = f" (forward; {reason.reason})", dataclasses.replace(case, direction=Direction.FWD)
    verification = verify(kernel, case, machine, ("truth",))
    kind, text = verification.outcome.kind, str(verification.outcome)
    if kind == "passed":
        tensor, worst = max(verification.worst.items(), key=lambda item: item[1])
        text = f"{worst:.2f} {tensor}{refused}"
    elif kind == "unsupported" and kernel.supports(case, machine) is None:
        kind = "refused"  # by the backend, after the adapter had declared it
    elif entry := find(kernel, case, machine, verification.outcome):
        kind, text = "known_wrong", f"{entry.name}: {text}"
    return {"kind": kind, "text": text, "worst": verification.worst, "facts": verification.facts, "case": case.id}


def ran(name: str, case: Any, machine: Any) -> dict[str, Any]:
    """The device kernels of a cell, and whether they are the promised ones."""
    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.device_kernels import device_kernels, silent_fallback

    kernel = load(KERNELS[name])()
    names = device_kernels(kernel, case, machine)
    return {"device_kernels": names, "fallback": silent_fallback(kernel, names)}


def work(kernels: tuple[str, ...], shapes: tuple[str, ...], part: int, parts: int, start: int, deadline: float) -> None:
    """Judge a part's cells from number `start` on; a line of JSON before and after each."""
    from pytest_longca.ids import parse_case
    from pytest_longca.jobs import find_machine

    machine = find_machine()
    profiled: set[str] = set()
    for number, (name, shape, case) in enumerate(cells(kernels, shapes, part, parts)):
        if number < start:
            continue
        about = {"number": number, "kernel": name, "shape": shape, "mask": case.mask.name}
        tell(about | {"kind": "started"})
        began = time.monotonic()
        if began > deadline:
            tell(about | {"kind": "not_verified", "text": "no time left"})
            continue
        try:
            found = judged(name, case, machine)
            if found["kind"] == "passed" and name not in profiled:
                profiled.add(name)
                found |= ran(name, parse_case(found["case"]), machine)
        except Exception as error:
            found = {"kind": "crashed", "text": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(limit=-6)}
        tell(about | found | {"seconds": round(time.monotonic() - began, 2)})
        if found["kind"] == "crashed" and is_dead(machine):
            return


def smaller(case: Any) -> Iterator[Any]:
    """The case itself, then cases of the same mask (one that its lengths describe), tiny to large, one head, forward alone or both ways."""
    from pytest_longca.case import Case, Direction

    yield case
    for lengths in ((3, 2), (16, 8), (33, 32), (65, 64), (129, 64), (200, 128), (500, 400)):
        for direction in (Direction.FWD, Direction.FWD_BWD):
            yield Case(mask=type(case.mask)(*lengths), head_dim=64, dtype=case.dtype, direction=direction)


def try_known_failures() -> int:
    """Every entry that is due here, on its own case and on smaller ones; how many entries are stale."""
    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.ids import parse_case
    from pytest_longca.jobs import find_machine
    from pytest_longca.known_failures import due, stale

    machine, num_stale = find_machine(), 0
    for name in KERNELS:
        kernel = load(KERNELS[name])()
        for entry in [] if kernel.missing() else due(kernel, machine):
            if entry.after:
                print(f"KNOWN {entry.name}: not tried, as it takes two cases and a new process: pytest --longca-kernels={name} -k known")
                continue
            outcomes = {case.id: outcome_of(kernel, case, machine) for case in smaller(parse_case(entry.case))}
            failing = [case for case, outcome in list(outcomes.items())[1:] if entry.describes(outcome)]
            no_longer = stale(entry, next(iter(outcomes.values())))
            num_stale += no_longer is not None
            print(f"KNOWN {entry.name}: {no_longer or 'still so'}; the smallest case that fails is {failing[0] if failing else 'its own'}")
            for case, outcome in outcomes.items():
                print(f"      {case}: {str(outcome)[:160]}")
    return num_stale


def outcome_of(kernel: Any, case: Any, machine: Any) -> Any:
    from pytest_longca.checks import verify
    from pytest_longca.outcome import Crashed

    try:
        return verify(kernel, case, machine, ("count", "truth")).outcome
    except Exception as error:
        return Crashed(f"{kernel.name} raised {type(error).__name__}: {str(error)[:300]}")


def is_dead(machine: Any) -> bool:
    """Whether CUDA is beyond use in this process, as after an illegal access."""
    import torch

    try:
        return machine.device == "cuda" and not bool(torch.ones(1, device="cuda").sum().item() == 1)
    except RuntimeError:
        return True


def tell(line: dict[str, Any]) -> None:
    print("\x1e" + json.dumps(line, default=str), flush=True)


def run(kernels: tuple[str, ...], shapes: tuple[str, ...], seconds: float, parts: int) -> Iterator[dict[str, Any]]:
    """Every cell's line, as soon as it is known, from so many processes at once and another one where one died."""
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    deadline = time.monotonic() + seconds

    def run_part(part: int) -> None:
        for line in in_processes(kernels, shapes, part, parts, deadline):
            lines.put(line)
        lines.put(None)

    for part in range(parts):
        threading.Thread(target=run_part, args=(part,), daemon=True).start()
    ended = 0
    while ended < parts:
        line = lines.get()
        if line is None:
            ended += 1
        else:
            yield line


def in_processes(kernels: tuple[str, ...], shapes: tuple[str, ...], part: int, parts: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The lines of one part's cells, one process after another."""
    start, total = 0, len(cells(kernels, shapes, part, parts))
    while start < total:
        chosen = {"--kernels": ",".join(kernels), "--shapes": ",".join(shapes), "--part": part, "--parts": parts}
        chosen |= {"--work": start, "--seconds": deadline - time.monotonic()}
        command = [sys.executable, "-u", __file__, *(str(x) for option in chosen.items() for x in option)]
        done, begun = start, {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for text in worker.stdout:
                if not text.startswith("\x1e"):
                    continue
                line = json.loads(text[1:])
                if line["kind"] == "started":
                    begun = line
                    continue
                done, begun = line["number"] + 1, {}
                yield line
        if begun:
            done = begun["number"] + 1
            yield begun | {"kind": "crashed", "text": f"the process ended with {worker.returncode}"}
        if done == start:
            unknown = dict.fromkeys(("kernel", "shape", "mask"), "?")
            yield unknown | {"number": start, "kind": "crashed", "text": f"no worker starts: {worker.returncode}"}
            return
        start = done


def show(line: dict[str, Any]) -> None:
    took = f"{line['seconds']:6.1f} s" if "seconds" in line else " " * 8
    print(f"{line['kernel']:14} {line['shape']:7} {line['mask']:22} {took} {line['kind']:12} {str(line.get('text', ''))[:200]}", flush=True)
    for name in line.get("device_kernels", []):
        print(f"{'':14} ran {name}", flush=True)


def table(lines: list[dict[str, Any]]) -> str:
    """Kernels by masks: the worst error over its limit of all shapes, or the worst outcome."""
    severity = (
        *("crashed", "wrong", "timed_out", "out_of_memory", "refused", "known_wrong"),
        *("not_verified", "passed", "unsupported", "not_installed"),
    )
    names = [mask.name for mask in masks(1000, 1000) if any(line["mask"] == mask.name for line in lines)]
    rows = [f"{'':14} " + " ".join(f"{name[:10]:>10}" for name in names)]
    for kernel in dict.fromkeys(line["kernel"] for line in lines):
        row = []
        for mask in names:
            mine = [line for line in lines if (line["kernel"], line["mask"]) == (kernel, mask)]
            kind = min((line["kind"] for line in mine), key=severity.index, default="")
            worst = [max(line["worst"].values()) for line in mine if line["kind"] == "passed"]
            row.append(f"{max(worst):.2f}" if kind == "passed" else {"unsupported": "-"}.get(kind, kind))
        rows.append(f"{kernel:14} " + " ".join(f"{cell[:10]:>10}" for cell in row))
    return "\n".join(rows)


def bad(line: dict[str, Any]) -> bool:
    return line["kind"] in ("crashed", "wrong", "refused", "timed_out", "out_of_memory") or bool(line.get("fallback"))


@pytest.mark.gpu
@pytest.mark.slow
def test_every_declared_cell_of_every_installed_dense_kernel_is_right() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    lines = list(run(KERNELS, tuple(SHAPES), 540, PARTS))
    failed = [f"{line['kernel']} {line['shape']} {line['mask']}: {line.get('fallback') or line.get('text')}" for line in lines if bad(line)]
    assert not failed, table(lines) + "\n" + "\n".join(failed)
    assert any(line["kind"] == "passed" for line in lines), "nothing was judged"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--known", action="store_true", help="try the known failures, and smaller cases of them")
    parser.add_argument("--parts", type=int, default=PARTS, help="processes at once; each judges some of the masks")
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.known:
        return try_known_failures()
    kernels, shapes = tuple(options.kernels.split(",")), tuple(options.shapes.split(","))
    if options.work is not None:
        work(kernels, shapes, options.part, options.parts, options.work, time.monotonic() + options.seconds)
        return 0
    lines = []
    with contextlib.suppress(KeyboardInterrupt):  # what is known by then is shown
        for line in run(kernels, shapes, options.seconds, options.parts):
            lines.append(line)
            show(line)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(line, default=str) + "\n")
    print(table(lines))
    for line in filter(bad, lines):
        print(
            f"BAD {line['kernel']} {line['shape']} {line['mask']}: {line.get('fallback') or line.get('text')}\n    {line.get('case', '')}"
        )
        print(line.get("traceback", ""))
    return int(any(map(bad, lines)))


if __name__ == "__main__":
    sys.exit(main())
