"""Times FlashMask against compiled FlexAttention on the 12 static masks, and sweeps its tiles: run on a GPU, as a script.

    python tests/gpu/bench_flashmask.py --sweep --minutes 5 --out times.json
    python tests/gpu/bench_flashmask.py --compare 8192 32768:full,causal

Every candidate is judged against the reference before it is timed. FlexAttention gets its BlockMask prebuilt and is compiled for each
shape; other processes compile ahead into the caches on disk. Figures are medians with a cold L2, TFLOP/s count visible pairs. What to
keep comes last; --out is written anew after each part.
"""

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch

from pytest_longca import catalogue
from pytest_longca.case import Case, Direction
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.judge import Result, judge
from pytest_longca.kernels import flashmask_attention as attention
from pytest_longca.kernels.flashmask import FlashMask, choose_launch, plan_case
from pytest_longca.kernels.flashmask_plan import Launch, Tile
from pytest_longca.mask import Mask
from pytest_longca.reference import cached_reference
from pytest_longca.warming import Run, run_all

STATIC = catalogue.MASK_GROUPS["static"]
SHORT = dict(
    zip(STATIC, ("full", "causal", "f_win", "c_win", "f_doc", "c_doc", "sh_q", "g_win", "c_blk", "p_cau", "p_doc", "bc_doc"), strict=True)
)
PARTS = ("fwd", "dq", "dkdv")

SWEPT = ("full", "causal", "causal_sliding_window", "causal_document", "shared_question", "causal_blockwise", "prefix_lm_document")
"""What candidates are timed on: long runs of full tiles, and mostly partial ones; even work, and uneven; where we lead by least."""

SWEEP_SHARE = 0.7
"""How much of the time a sweep may take; the rest is the comparison's."""

CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "fwd": (
        Tile(128, 64, 8, 2, 128), Tile(64, 64, 4, 2, in_registers=1), Tile(64, 64, 4, 2, 168, in_registers=1),
        Tile(64, 128, 4, 1, in_registers=1), Tile(128, 64, 8, 3, in_registers=1), Tile(128, 128, 8, 2, in_registers=1),
    ),
    "dq": (
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, in_registers=1), Tile(64, 64, 4, 2, in_registers=2), Tile(64, 64, 4, 3, in_registers=2),
        Tile(128, 64, 8, 4), Tile(128, 64, 8, 3, in_registers=1), Tile(128, 64, 8, 3, in_registers=2), Tile(128, 64, 8, 4, in_registers=2),
    ),
    "dkdv": (
        Tile(64, 64, 4, 2, early=True), Tile(64, 64, 4, 2, early=True, in_registers=1), Tile(64, 64, 4, 2, in_registers=1),
        Tile(64, 32, 4, 3, early=True), Tile(64, 32, 4, 3, early=True, in_registers=1), Tile(64, 32, 4, 2, early=True, in_registers=2),
        Tile(64, 32, 4, 3, early=True, in_registers=2), Tile(64, 32, 4, 3, in_registers=2),
    ),
}  # fmt: skip
"""Tiles that compile for Hopper at head_dim 128 without spilling more than a few registers. First, what is used now."""


@dataclasses.dataclass
class Bench:
    """The sizes of a run, its deadline and what it found."""

    heads_q: int
    heads_kv: int
    head_dim: int
    deadline: float
    found: dict[str, object] = dataclasses.field(default_factory=dict)

    def case(self, name: str, seqlen: int) -> Case:
        """The mask that speed is measured on."""
        return self._case(catalogue.load(catalogue.MASKS[name]).default(seqlen))

    def small_cases(self) -> list[Case]:
        """What a candidate is verified on: many documents, rows of two intervals, lengths that fill no tile."""
        masks = (catalogue.load(catalogue.MASKS[name]).sample(Random(3), 1000) for name in ("causal_document", "global_sliding_window"))
        return [self._case(mask) for mask in masks]

    def _case(self, mask: Mask) -> Case:
        return Case(mask=mask, heads_q=self.heads_q, heads_kv=self.heads_kv, head_dim=self.head_dim, dtype="bf16")

    def save(self, path: Path | None) -> None:
        """Write what was found so far."""
        if path:
            path.write_text(json.dumps(self.found, indent=1))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def say(text: str) -> None:
    print(text, flush=True)


_flush: list[torch.Tensor] = []


def median_ms(run: Callable[[], object], budget_ms: float = 250.0) -> float:
    """The median time of one call, each with a cold L2 and a queue long enough that events measure the GPU."""
    if not _flush:
        _flush.append(torch.empty(128 * 2**20, dtype=torch.int8, device="cuda"))
    run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    rounds = max(3, min(15, int(budget_ms / max(0.05, start.elapsed_time(end)))))
    torch.cuda._sleep(20_000_000)  # about 10 ms in which the host gets ahead
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for begin, finish in events:
        _flush[0].zero_()
        _flush[0].zero_()
        begin.record()
        run()
        finish.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(finish) for begin, finish in events)
    return times[len(times) // 2]


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def tile_name(tile: Tile) -> str:
    limit = f"r{tile.max_registers}" if tile.max_registers else ""
    flags = "e" * tile.early + "i" * tile.in_registers  # ii: two operands
    return f"{tile.block}x{tile.step}w{tile.num_warps}s{tile.num_stages}{limit}{flags}"


def runners(
    case: Case, x: Inputs, launch: Launch, known: tuple[torch.Tensor, torch.Tensor] | None = None
) -> dict[str, Callable[[], object]]:
    """Each of the three kernels as a function without arguments. `known` is out and lse; dq has run once, which dk and dv build on."""
    plan = plan_case(case, launch, x.q.device)
    assert plan.dq is not None and plan.dkdv is not None
    out, lse = known or attention.attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
    stats = torch.empty(2, *lse.shape[:2], -(-x.q.shape[1] // launch.dq.block) * launch.dq.block, device="cuda")
    of_dq, of_dkdv, schedules = (x.do, x.q, x.k, x.v, out, dq), (x.do, x.q, x.k, x.v, dk, dv), (plan.dq, plan.dkdv)
    attention._launch_dq(of_dq, lse, stats, plan, schedules[0], case.scale, launch, launch.tma)
    return {
        "fwd": lambda: attention.attention_forward(x.q, x.k, x.v, plan, case.scale, launch),
        "dq": lambda: attention._launch_dq(of_dq, lse, stats, plan, schedules[0], case.scale, launch, launch.tma),
        "dkdv": lambda: attention._launch_dkdv(of_dkdv, stats, plan, schedules[1], case.scale, launch, launch.tma),
    }


def run_once(case: Case, x: Inputs, launch: Launch) -> Result:
    """All results of a case with these tiles."""
    plan = plan_case(case, launch, x.q.device)
    out, lse = attention.attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    return Result(out, lse, *attention.attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, launch))


def errors(case: Case, launch: Launch) -> float:
    """The worst error of a small case over its limit: at most 1 is right."""
    x = make_inputs(case, "cuda")
    return max(verdict.error_over_limit for verdict in judge(case, x, cached_reference(case, x, "cuda"), run_once(case, x, launch)))


def launches(part: str, base: Launch) -> Iterator[Launch]:
    """Every candidate for one kernel."""
    for tile in CANDIDATES[part]:
        yield dataclasses.replace(base, **{part: tile})


def label(part: str, launch: Launch) -> str:
    return tile_name(getattr(launch, part))


def verified(bench: Bench, part: str, base: Launch) -> list[Launch]:
    """The candidates that compile, fit the GPU and are right on two small cases."""
    good = []
    for launch in launches(part, base):
        try:
            worst = max(errors(case, launch) for case in bench.small_cases())
        except Exception as error:  # whatever Triton or the driver says about tiles that do not fit
            say(f"  {part} {label(part, launch)}: {type(error).__name__} {str(error)[:90]!r}")
            continue
        if worst <= 1.0:
            good.append(launch)
        else:
            say(f"  {part} {label(part, launch)}: WRONG, {worst:.2f} of the limit")
    return good


def sweep(bench: Bench, base: Launch, parts: list[str], seqlens: list[int]) -> Launch:
    """Time every verified candidate of these kernels on every mask; the best by geometric mean over masks and lengths."""
    best = base
    for part in parts:
        began = time.monotonic()
        good = verified(bench, part, base)
        scores: dict[str, dict[str, float]] = {label(part, launch): {} for launch in good}
        for seqlen in seqlens:
            say(f"{part} ms at {seqlen}: " + " ".join(f"{SHORT[name]:>7}" for name in SWEPT) + "  geomean")
            table = {name: times_of(bench, name, seqlen, part, good, base) for name in SWEPT if not bench.late}
            for own in scores:
                row = {f"{name}:{seqlen}": table[name][own] for name in table}
                scores[own] |= row
                say(f"{own:>16} " + " ".join(f"{ms:7.3f}" for ms in row.values()) + f"  {geomean(list(row.values())):7.3f}")
        means = {own: geomean(list(times.values())) for own, times in scores.items()}
        ranked = sorted(good, key=lambda launch: means[label(part, launch)])
        say(f"{part} best: " + ", ".join(f"{label(part, c)} {means[label(part, c)]:.3f}" for c in ranked[:4]))
        say(f"{part}: {time.monotonic() - began:.0f} s")
        if ranked and scores[label(part, ranked[0])]:
            best = dataclasses.replace(best, **{part: getattr(ranked[0], part)})
        bench.found[part] = {"ms": scores, "geomean": means}
    return best


def times_of(bench: Bench, name: str, seqlen: int, part: str, candidates: list[Launch], base: Launch) -> dict[str, float]:
    """Median ms of each candidate, all after one forward of the base."""
    case = bench.case(name, seqlen)
    x = make_inputs(case, "cuda")
    known = attention.attention_forward(x.q, x.k, x.v, plan_case(case, base, x.q.device), case.scale, base)
    return {label(part, launch): median_ms(runners(case, x, launch, known)[part], 120.0) for launch in candidates}


def sweep_order(bench: Bench, launch: Launch, seqlens: list[int]) -> None:
    """Whether heads should take turns block by block: always, as the threshold says, never."""
    for seqlen, (part, threshold) in itertools.product(seqlens, {"dq": "ROW_TAIL", "dkdv": "COLUMN_TAIL"}.items()):
        usual = getattr(attention, threshold)
        rows: dict[float, list[float]] = {0.0: [], usual: [], math.inf: []}
        for name in STATIC if not bench.late else ():
            case = bench.case(name, seqlen)
            run = runners(case, make_inputs(case, "cuda"), launch)[part]
            for tail in rows:
                setattr(attention, threshold, tail)
                rows[tail].append(median_ms(run, 60.0))
            setattr(attention, threshold, usual)
        say(f"{part} ms at {seqlen}: " + " ".join(f"{SHORT[name]:>7}" for name in STATIC))
        for tail, row in rows.items():
            say(f"{'turns above ' + str(tail):>16} " + " ".join(f"{ms:7.3f}" for ms in row))
        bench.found[f"{part} turns:{seqlen}"] = {str(tail): row for tail, row in rows.items()}


def compare(bench: Bench, launch: Launch, wanted: dict[int, tuple[str, ...]]) -> None:
    """FlashMask with these tiles against FlexAttention, forward and backward, through the adapters' calls."""
    from pytest_longca.kernels.flex import Flex

    for seqlen, names in wanted.items():
        say(f"\n{seqlen} tokens, {bench.heads_q}:{bench.heads_kv}, D {bench.head_dim}: TFLOP/s fwd, bwd; ratio to flex; flex's TFLOP/s")
        ratios: dict[str, list[float]] = {"fwd": [], "bwd": []}
        for name in names:
            if bench.late:
                say("out of time")
                break
            case = bench.case(name, seqlen)
            x = make_inputs(case, "cuda")
            ours, theirs = measure(own_call(case, x, launch), case, x), measure(Flex().bind(case, x), case, x)
            worst = max((a.float() - b.float()).abs().amax().item() for a, b in zip(ours[2], theirs[2], strict=True))
            for part, mine, other in zip(ratios, ours, theirs, strict=False):
                ratios[part].append(other / mine)
            speeds = " ".join(
                f"{case.flop(d) / ms / 1e9:6.0f}"
                for d, ms in zip((Direction.FWD, Direction.BWD) * 2, (*ours[:2], *theirs[:2]), strict=True)
            )
            say(f"{name:>24} {ratios['fwd'][-1]:6.2f} {ratios['bwd'][-1]:6.2f}  {speeds}  max|diff| {worst:.3g}")
            bench.found[f"{name}:{seqlen}"] = {"flashmask": ours[:2], "flex": theirs[:2]}
        if ratios["fwd"]:
            means, least = (" ".join(f"{f(ratios[part]):6.2f}" for part in ratios) for f in (geomean, min))
            say(f"{'geometric mean':>24} {means}  minimum {least}")


def own_call(case: Case, x: Inputs, launch: Launch) -> object:
    """The adapter's own call with other tiles."""
    from pytest_longca.kernel import AutogradCall

    plan = plan_case(case, launch, x.q.device)
    return AutogradCall(lambda q, k, v: attention.FlashMaskFunction.apply(q, k, v, plan, case.scale, launch), x, True)


def measure(call: object, case: Case, x: Inputs) -> tuple[float, float, tuple[torch.Tensor, ...]]:
    """(forward ms, backward ms, (out, dq, dk, dv))."""
    fwd = median_ms(call.forward)
    out, _ = call.forward()
    return fwd, median_ms(lambda: call.backward(x.do)), (out.detach(), *call.backward(x.do))


def limits(bench: Bench) -> None:
    """Plan times, and the memory of 128K tokens."""
    for name, seqlen in (*((name, 32768) for name in STATIC), ("causal_document", 131072), ("causal_document", 524288)):
        case = bench.case(name, seqlen)
        launch = choose_launch(case.head_dim, torch.bfloat16, torch.device("cuda"))
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            plan_case(case, launch, torch.device("cuda"))
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        say(f"plan of {seqlen} tokens, {name}: {min(times):.2f} ms")
        bench.found[f"plan {name}:{seqlen}"] = min(times)
    case = bench.case("causal_document", 131072)
    x = make_inputs(case, "cuda")
    held = sum(t.nbytes for t in (x.q, x.k, x.v, x.do))  # as much again are out, dq, dk and dv
    before = torch.cuda.memory_allocated()
    call = FlashMask().bind(case, x)
    torch.cuda.reset_peak_memory_stats()
    call.forward()
    call.backward(x.do)
    extra = torch.cuda.max_memory_allocated() - before - held
    say(f"128K causal_document: {extra / (2 * held):.2%} memory beyond q, k, v, out and gradients")


def warm(bench: Bench, what: str) -> None:
    """Compile a candidate, "PART:INDEX", into the cache on disk and leave."""
    name, number = what.split(":")
    base = choose_launch(bench.head_dim, torch.bfloat16, torch.device("cuda"))
    launch = list(launches(name, base))[int(number)]
    for case in bench.small_cases():
        run_once(case, make_inputs(case, "cuda"), launch)


def warm_all(bench: Bench, flex: list[Case], jobs: list[str], processes: int) -> None:
    """Run the compilations in other processes, which have half of the time; what they leave is compiled when it is used."""
    half = (time.monotonic() + bench.deadline) / 2
    for _ in run_all([Run("flex", case) for case in flex], (), processes, lambda kernel, case: 120.0):
        if time.monotonic() > half:
            break
    waiting, running = list(jobs), list[subprocess.Popen[bytes]]()
    while (waiting or running) and time.monotonic() < half:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < processes:
            command = [sys.executable, *sys.argv, "--warm", waiting.pop(0)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(0.05)
    for process in running:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="8192,32768", help="lengths of the sweep")
    parser.add_argument(
        "--compare",
        nargs="*",
        default=["8192", "32768:full,causal,causal_document,prefix_lm_causal"],
        help="lengths, each with its masks or all, that are compared with FlexAttention",
    )
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sweep", action="store_true", help="time every candidate tile first, and compare with the best")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="of the sweep (default: fwd,dq,dkdv)")
    parser.add_argument("--turns", action="store_true", help="after the sweep, time the orders in which heads take turns too")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a JSON file for all times")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    heads_q, heads_kv = map(int, args.heads.split(":"))
    bench = Bench(heads_q, heads_kv, args.head_dim, time.monotonic() + 60 * args.minutes)
    if args.warm:
        warm(bench, args.warm)
        return
    seqlens = [int(n) for n in args.seqlens.split(",")]
    began = time.monotonic()
    base = choose_launch(args.head_dim, torch.bfloat16, torch.device("cuda"))
    own = [f"{part}:{i}" for part in args.parts for i in range(len(list(launches(part, base))))] if args.sweep else []
    wanted = {int(n): tuple(names.split(",")) if names else STATIC for n, _, names in (item.partition(":") for item in args.compare)}
    flex = [bench.case(name, n) for n, names in wanted.items() for name in names]
    warm_all(bench, flex, own, args.processes)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled ahead in {time.monotonic() - began:.0f} s")
    torch.cuda.empty_cache()
    best = base
    if args.sweep:
        end, bench.deadline = bench.deadline, began + 60 * args.minutes * SWEEP_SHARE
        best = sweep(bench, base, args.parts, seqlens)
        bench.save(args.out)
        if args.turns:
            sweep_order(bench, best, seqlens)
        bench.deadline = end
    compare(bench, best, wanted)
    bench.save(args.out)
    limits(bench)
    bench.found["best"] = {part: tile_name(getattr(best, part)) for part in PARTS}
    bench.save(args.out)
    say(f"best: {bench.found['best']}; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
