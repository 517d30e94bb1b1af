"""Times the dense kernels on the 12 static masks, after verifying each on each: run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_dense.py --minutes 5 [--seqlens 8192,32768] [--kernels flex,fa4] [--records FILE]

Other processes, one for each mask, verify every kernel on it and fill the compilers' caches on disk; what is not right is not timed. Then
this process times, forward and backward apart, bf16, 64:8 heads, head_dim 128, medians with a cold L2; TFLOP/s count visible pairs. With
--calls, what `bench_calls.py` does comes after the first length, as it needs the same compiled kernels. What to keep comes last, and
every time is a line of --records as soon as it is known.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench_calls
import torch
from torch import Tensor

from pytest_longca import catalogue
from pytest_longca.case import Case, Direction
from pytest_longca.cells import least_bytes
from pytest_longca.checks import verify
from pytest_longca.conformance import commit, versions
from pytest_longca.device_kernels import device_kernels, silent_fallback
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Call, Kernel
from pytest_longca.machine import Machine
from pytest_longca.outcome import NotVerified, Passed, Wrong
from pytest_longca.report.record import Record, shape_of
from pytest_longca.timing import CLOCKS, Effort, interleave

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # FA4 reads it at its import, here and in the other processes

KERNELS = ("flex", "fa4", "cudnn_flex", "flashmask", "cudnn", "fa2", "fa3", "sdpa_flash", "sdpa_cudnn")
"""FlexAttention first: it is what the others are compared with."""
BASE = KERNELS[0]
FIRST_MASKS = ("full", "causal", "causal_document", "full_sliding_window", "global_sliding_window", "prefix_lm_document")
MASKS = FIRST_MASKS + tuple(name for name in catalogue.MASK_GROUPS["static"] if name not in FIRST_MASKS)
DIRECTIONS = (Direction.FWD, Direction.BWD)
SDPA_MASKS = ("full", "causal")
"""Elsewhere SDPA would need a dense mask of seqlen^2, which is no comparison."""
SLOW_TO_START = "cudnn_flex"
"""Compiles for half a minute in every process, whatever the mask, and keeps nothing on disk: done while the others verify."""
MEMORY_FACTOR, WARM_FACTOR = 10, 2
"""Judging a case takes up to so many times its operands and results: 40 GiB at 32K with 64:64 heads, nearly all of it the reference's.

Running one, so that it is compiled, takes less.
"""
CHECK_SHARE = 0.45
"""How much of the time the verification may take."""
TILE, TILE_LIMIT = 128, 0.05
"""Where only a shorter sequence was verified: how far the norm of 128 rows may be from FlexAttention's, relative. Rounding gives 0.01."""
EFFORT = Effort(min_samples=10, max_samples=60, budget_s=0.4, patience_s=1.0, warm_up_s=0.05)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all cases share."""

    heads_q: int
    heads_kv: int
    head_dim: int

    def case(self, mask: str, seqlen: int, direction: Direction = Direction.FWD_BWD) -> Case:
        """The mask that speed is measured on."""
        return Case(
            mask=catalogue.load(catalogue.MASKS[mask]).default(seqlen),
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            dtype="bf16",
            direction=direction,
        )


def say(text: str) -> None:
    print(text, flush=True)


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = catalogue.load(catalogue.KERNELS[name])()
    return kernel


def directions_of(kernel: Kernel, mask: str, sizes: Sizes, machine: Machine) -> tuple[Direction, ...]:
    """The directions in which a kernel that is installed takes a mask."""
    if kernel.missing() or (kernel.name.startswith("sdpa") and mask not in SDPA_MASKS):
        return ()
    return tuple(d for d in DIRECTIONS if kernel.supports(sizes.case(mask, 1024, d), machine) is None)


# ---------------------------------------------------------------------------------------------------------------- other processes


def check_mask(mask: str, kernels: list[str], seqlens: list[int], check_seqlens: list[int], sizes: Sizes) -> None:
    """Verify the kernels on a mask, see what they launch, and compile what is compiled for each shape. Lines of JSON."""
    machine = find_machine()
    for name in kernels:
        kernel = kernel_named(name)
        directions = directions_of(kernel, mask, sizes, machine)
        if not directions:
            continue
        direction = Direction.FWD_BWD if Direction.BWD in directions else Direction.FWD
        for seqlen in check_seqlens:
            about = {"kernel": name, "mask": mask, "seqlen": seqlen, "direction": str(direction)}
            tell(about | {"kind": "started"})
            began = time.monotonic()
            try:
                found = checked(kernel, sizes.case(mask, seqlen, direction), machine, seqlen == check_seqlens[0])
            except Exception as error:
                traceback.print_exc()
                found = {"kind": "crashed", "text": f"{type(error).__name__}: {str(error)[:300]}"}
            tell(about | found | {"seconds": round(time.monotonic() - began, 1)})
        for seqlen in set(seqlens).difference(check_seqlens) if kernel.compiles_per_shape else ():
            warmed(kernel, case := sizes.case(mask, seqlen, direction), make_inputs(case, machine.device))


def checked(kernel: Kernel, case: Case, machine: Machine, profiles: bool) -> dict[str, Any]:
    verification = verify(kernel, case, machine, ("truth",))
    names = device_kernels(kernel, case, machine) if profiles and isinstance(verification.outcome, Passed) else []
    fallback = silent_fallback(kernel, names)
    outcome = Wrong(fallback) if fallback else verification.outcome
    return {"kind": outcome.kind, "text": str(outcome), "worst": verification.worst, "device_kernels": names, "case": case.id}


def tell(line: dict[str, Any]) -> None:
    print("\x1e" + json.dumps(line), flush=True)


def check_all(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """The verdicts of all masks, from one process each, and another one where one died; no more at once than the device has memory for."""
    with ThreadPoolExecutor(num_processes(args, find_machine())) as pool:
        return [line for lines in pool.map(lambda mask: list(check_in_processes(args, mask, deadline)), args.masks) for line in lines]


def num_processes(args: argparse.Namespace, machine: Machine) -> int:
    """How many processes check at once: as many as were asked for, if the longest cases that they judge and compile fit so often."""
    judged, compiled = (least_bytes(sizes_of(args).case("full", max(seqlens))) for seqlens in (args.check_seqlens, args.seqlens))
    each = MEMORY_FACTOR * judged + WARM_FACTOR * compiled
    return max(1, min(args.processes, machine.memory_bytes // each)) if machine.memory_bytes else int(args.processes)


def sizes_of(args: argparse.Namespace) -> Sizes:
    heads_q, heads_kv = map(int, args.heads.split(":"))
    return Sizes(heads_q, heads_kv, args.head_dim)


def check_in_processes(args: argparse.Namespace, mask: str, deadline: float) -> Iterator[dict[str, Any]]:
    kernels = list(args.kernels)
    while kernels and time.monotonic() < deadline:
        command = [sys.executable, __file__, *sys.argv[1:], "--check", mask, "--kernels", ",".join(kernels)]
        with tempfile.TemporaryFile("w+") as output:
            try:
                code = subprocess.run(
                    command, stdout=output, stderr=sys.stderr, timeout=max(1.0, deadline - time.monotonic()), check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = 0
            output.seek(0)
            lines = [json.loads(text[1:]) for text in output if text.startswith("\x1e") and text.endswith("\n")]
        yield from (line for line in lines if line["kind"] != "started")
        if code == 0 or not lines:
            return
        died = lines[-1]
        yield died | {"kind": "crashed", "text": f"the process ended with {code}"}
        kernels = kernels[kernels.index(died["kernel"]) + 1 :]


# ---------------------------------------------------------------------------------------------------------------- this process


@dataclasses.dataclass
class Bench:
    """A run: what was verified, the clock, the deadline, and the records so far."""

    sizes: Sizes
    machine: Machine
    verdicts: list[dict[str, Any]]
    deadline: float
    records_file: Path | None
    records: list[Record] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = CLOCKS[self.machine.device]()
        self.process = uuid.uuid4().hex[:12]

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def verdict(self, kernel: str, mask: str, seqlen: int) -> dict[str, Any] | None:
        """The verdict on this length, else on another one that was verified; None if there is none or one is bad."""
        mine = [v for v in self.verdicts if (v["kernel"], v["mask"]) == (kernel, mask) and v["kind"] != NotVerified.kind]
        if any(v["kind"] != "passed" for v in mine):
            return None
        return next((v for v in mine if v["seqlen"] == seqlen), mine[0] if mine else None)

    def keep(self, record: Record) -> None:
        self.records.append(record)
        if self.records_file:
            with self.records_file.open("a", encoding="utf-8") as file:
                file.write(record.to_line() + "\n")

    def median(self, kernel: str, mask: str, seqlen: int, direction: Direction) -> float | None:
        for record in self.records:
            if (record.kernel, record.mask, record.direction, record.shape["seqlen_q"]) == (kernel, mask, str(direction), seqlen):
                return statistics.median(record.samples_ms) if record.samples_ms else None
        return None


def time_mask(bench: Bench, kernels: list[str], mask: str, seqlen: int) -> None:
    """Every verified kernel on one mask at one length, forward and backward."""
    inputs = make_inputs(bench.sizes.case(mask, seqlen), bench.machine.device)
    base: dict[str, Tensor] = {}
    cells = []
    for name in kernels:
        verdict = bench.verdict(name, mask, seqlen)
        if verdict is None or bench.late:
            continue
        try:
            cells.append(time_kernel(bench, kernel_named(name), mask, seqlen, inputs, verdict, base))
        except Exception as error:
            traceback.print_exc()
            cells.append(f"{name} {type(error).__name__}")
    say(f"{seqlen:6} {mask:22} " + "  ".join(cells))


def time_kernel(
    bench: Bench, kernel: Kernel, mask: str, seqlen: int, inputs: Inputs, verdict: dict[str, Any], base: dict[str, Tensor]
) -> str:
    """One kernel on one mask; "name fwd/bwd" in TFLOP/s."""
    has_backward = verdict["direction"] != "fwd"
    case = bench.sizes.case(mask, seqlen, Direction.FWD_BWD if has_backward else Direction.FWD)
    compile_ms, call = bench.clock.wall(lambda: warmed(kernel, case, inputs))
    plan_ms = None if kernel.compiles_per_shape else bench.clock.wall(lambda: kernel.bind(case, inputs))[0]
    is_compared = verdict["seqlen"] != seqlen and (base or kernel.name == BASE)
    apart = apart_from(base, call, inputs.do, has_backward) if is_compared else {}
    if max(apart.values(), default=0.0) > TILE_LIMIT:
        bench.verdicts.append(verdict | {"seqlen": seqlen, "kind": "wrong", "text": f"apart from {BASE}: {apart}"})
        return f"{kernel.name} WRONG"
    speeds = []
    for direction in DIRECTIONS if has_backward else DIRECTIONS[:1]:
        step = call.forward if direction is Direction.FWD else functools.partial(call.backward, inputs.do)
        call_ms, launch_ms = bench.clock.wall(step)[0], bench.clock.launch(step)
        found = interleave(bench.clock, [step], EFFORT, call_ms, launch_ms)
        samples = found.of_steps[0]
        one_way = bench.sizes.case(mask, seqlen, direction)
        facts = {**call.facts, "protocol": bench.clock.protocol, "throttled_samples": found.thrown, "verified": verdict["case"]}
        facts |= {"late_samples": found.late} if found.late else {}
        facts |= {f"apart_from_{BASE}": apart} if apart else {}
        bench.keep(
            Record(
                stage="timing",
                kernel=kernel.name,
                mask=mask,
                outcome=Passed().to_json(),
                case=one_way.id,
                shape=shape_of(one_way),
                direction=str(direction),
                num_examples=1,
                verdicts=[{"tensor": t, "error_over_limit": x, "case": verdict["case"]} for t, x in verdict["worst"].items()],
                samples_ms=samples,
                process=bench.process,
                plan_ms=plan_ms,
                compile_ms=max(0.0, compile_ms - (plan_ms or 0.0)),
                launch_ms=launch_ms,
                area=one_way.area,
                flop=one_way.flop(),
                device=bench.machine.name,
                device_kernels=verdict["device_kernels"],
                compiled_form=call.facts.get("compiled_form"),
                facts=facts,
                clocks=found.clocks,
                versions=versions(kernel),
                commit=commit(),
                command=" ".join(["python tests/gpu/bench_dense.py", *sys.argv[1:]]),
            )
        )
        speeds.append(f"{one_way.flop() / statistics.median(samples) / 1e9:.0f}")
    return f"{kernel.name} {'/'.join(speeds)}"


def warmed(kernel: Kernel, case: Case, inputs: Inputs) -> Call:
    """A call that ran both ways: planned and compiled."""
    call = kernel.bind(case, inputs)
    call.forward()
    if case.direction.needs_backward:
        call.backward(inputs.do)
    return call


def apart_from(base: dict[str, Tensor], call: Call, do: Tensor, has_backward: bool) -> dict[str, float]:
    """How far the results are from FlexAttention's, which are put into `base` if it is empty: the worst 128 rows of a head, by norm."""
    found = {"out": call.forward()[0].detach()}
    if has_backward:
        found |= zip(("dq", "dk", "dv"), call.backward(do), strict=True)
    if not base:
        base |= found
        return {}
    return {name: worst_tile(x, base[name]) for name, x in found.items() if name in base}


def worst_tile(x: Tensor, y: Tensor) -> float:
    """The largest relative distance of TILE rows of `[batch, seqlen, heads, head_dim]`."""
    rows = ((x.float() - y.float()).square().sum(-1), y.float().square().sum(-1))  # [batch, seqlen, heads]
    pad = -x.shape[1] % TILE
    error, size = (torch.nn.functional.pad(r, (0, 0, 0, pad)).unflatten(1, (-1, TILE)).sum(2) for r in rows)
    return float((error / size.clamp_min(1e-20)).sqrt().max())


# ---------------------------------------------------------------------------------------------------------------- what to keep


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def conclude(bench: Bench, kernels: list[str], masks: list[str], seqlens: list[int]) -> None:
    """TFLOP/s of every cell, then ratios over FlexAttention: geometric mean, least, and of how many masks."""
    for seqlen in seqlens:
        for direction in DIRECTIONS:
            say(f"\nTFLOP/s at {seqlen}, {direction}\n{'':22} " + " ".join(f"{name[:10]:>10}" for name in kernels))
            for mask in masks:
                flop = bench.sizes.case(mask, seqlen).flop(direction)
                times = [bench.median(name, mask, seqlen, direction) for name in kernels]
                say(f"{mask:22} " + " ".join(f"{flop / ms / 1e9:10.0f}" if ms else f"{'':>10}" for ms in times))
    say(f"\ntimes as fast as {BASE}: geometric mean (least, masks)")
    for name in [name for name in kernels if name != BASE] if BASE in kernels else []:
        parts = []
        for seqlen in seqlens:
            for direction in DIRECTIONS:
                pairs = [(bench.median(BASE, m, seqlen, direction), bench.median(name, m, seqlen, direction)) for m in masks]
                ratios = [theirs / mine for theirs, mine in pairs if theirs and mine]
                parts.append(f"{seqlen} {direction} {geomean(ratios):.2f} ({min(ratios):.2f}, {len(ratios)})" if ratios else "")
        say(f"{name:12} " + "  ".join(parts))


def parsed() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=names, default=list(KERNELS))
    parser.add_argument("--masks", type=names, default=list(MASKS))
    parser.add_argument("--seqlens", type=numbers, default=[8192, 32768])
    parser.add_argument(
        "--check-seqlens", type=numbers, default=[8192], help="the lengths that are verified; others are compared with flex"
    )
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--records", type=Path, help="a file that gets one line of JSON for each time")
    parser.add_argument("--verdicts", type=Path, help="a file that gets one line of JSON for each cell that was verified, or not")
    parser.add_argument("--calls", type=float, default=0.0, help="minutes of the time for bench_calls.py, 0 for none")
    parser.add_argument("--figures", type=Path, help="what bench_calls.py found, one line of JSON for each figure")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args, began = parsed(), time.monotonic()
    sizes = sizes_of(args)
    if args.check:
        check_mask(args.check, args.kernels, args.seqlens, args.check_seqlens, sizes)
        return 0
    machine = find_machine()
    with ThreadPoolExecutor(1) as background:
        checking = background.submit(check_all, args, began + 60 * args.minutes * CHECK_SHARE)
        if SLOW_TO_START in args.kernels and not kernel_named(SLOW_TO_START).missing() and machine.device == "cuda":
            case = sizes.case("causal", 1024)
            warmed(kernel_named(SLOW_TO_START), case, make_inputs(case, machine.device))
        verdicts = checking.result()
    if args.verdicts:
        args.verdicts.write_text("".join(f"{json.dumps(verdict)}\n" for verdict in verdicts), encoding="utf-8")
    passed = sum(v["kind"] == "passed" for v in verdicts)
    say(f"{passed} of {len(verdicts)} cells verified in {time.monotonic() - began:.0f} s")
    bench = Bench(sizes, machine, verdicts, began + 60 * args.minutes, args.records)
    for seqlen in args.seqlens:
        for mask in args.masks:
            if not bench.late:
                time_mask(bench, args.kernels, mask, seqlen)
        if args.calls and seqlen == args.seqlens[0]:
            bench_calls.run([name for name in args.kernels if name in bench_calls.BARE], args.calls, args.figures)
    conclude(bench, args.kernels, args.masks, args.seqlens)
    bad = [v for v in bench.verdicts if v["kind"] not in ("passed", NotVerified.kind)]
    for verdict in bench.verdicts:
        if verdict["kind"] == NotVerified.kind:
            say(f"NOT VERIFIED {verdict['kernel']} {verdict['mask']} {verdict['seqlen']}: {verdict['text'][:120]}")
    for verdict in bad:
        say(f"BAD {verdict['kernel']} {verdict['mask']} {verdict['seqlen']}: {verdict['text'][:300]}")
    say(f"{bench.machine.name}, torch {torch.__version__}, {time.monotonic() - began:.0f} s{', out of time' if bench.late else ''}")
    return int(bool(bad) or not bench.records)


if __name__ == "__main__":
    sys.exit(main())
