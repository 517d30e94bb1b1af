"""What the plugin adds to a call, and whether its clock tells the time: run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_calls.py --minutes 2 [--kernels fa2,fa4] [--figures FILE]

First each adapter's call against a bare call of its library, written out by hand with the same inputs, in turns (A B B A), full and causal
or half of all blocks of 64, 8192 tokens. Then the clock against triton.testing.do_bench (its defaults, its median) on the same call, and
at 1024 tokens against the profiler: do_bench fills no queue, so that it times the host where a launch takes longer than the call. Without
kernels (--kernels=) the clock alone, the most telling lengths first; what it compiles is compiled ahead, in several processes. bf16, 64:8
heads (blocks: 16:16), head_dim 128. Every figure is a ratio of two medians of this run; what to keep comes last.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sparse_cases
import torch
import torch._functorch.config
from torch import Tensor

from pytest_longca import blocks, catalogue
from pytest_longca.case import Case, Direction
from pytest_longca.conformance import commit, versions
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Kernel
from pytest_longca.timing import CLOCKS, Effort, interleave
from pytest_longca.warming import Run, run_all

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], object]
IN_TURNS, ALONE = (
    Effort(min_samples=40, max_samples=100, budget_s=0.5),
    Effort(min_samples=20, max_samples=60, budget_s=0.5, patience_s=1.5),
)
SEQLEN = 8192
BLOCK, BLOCK_HEADS = 64, 16
CLOCK_ROUNDS = {8192: 3, 1024: 2, 32768: 1}
"""How often our clock and do_bench take turns at each length: within a percent or two the device's clocks depend on what ran just before.

Most often where power limits calls that are short enough for a rest between them to tell; calls of 50 ms differ by a thousandth.
"""
CLOCK_KERNELS = ("sdpa", "fa2", "flex")
PROFILED_SEQLEN, PROFILED_CALLS = 1024, 30
COMPILE_TIMEOUT_S = 120.0


def bare_fa2(case: Case, inputs: Inputs) -> Attention:
    from flash_attn import flash_attn_func

    causal = case.mask.name == "causal"
    return lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=case.scale, causal=causal)


def bare_fa3(case: Case, inputs: Inputs) -> Attention:
    from flash_attn_interface import flash_attn_func

    causal = case.mask.name == "causal"
    return lambda q, k, v: first(flash_attn_func(q, k, v, softmax_scale=case.scale, causal=causal))


def bare_fa4(case: Case, inputs: Inputs) -> Attention:
    from flash_attn.cute import flash_attn_func

    causal = case.mask.name == "causal"
    return lambda q, k, v: first(flash_attn_func(q, k, v, softmax_scale=case.scale, causal=causal))


def bare_cudnn(case: Case, inputs: Inputs) -> Attention:
    import cudnn.sdpa.fwd.torch_op  # noqa: F401  # registers the operator

    causal = case.mask.name == "causal"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = torch.ops.cudnn.sdpa_fwd(q, k, v, case.scale, is_causal=causal)[0]
        return out.transpose(1, 2)

    return attend


def bare_cudnn_flex(case: Case, inputs: Inputs) -> Attention:
    from cudnn.flex_attention.api import create_mask_plan, flex_attn_func

    ends = torch.full((case.seqlen_q,), case.seqlen_kv, dtype=torch.int32, device="cuda")
    if case.mask.name == "causal":
        ends = torch.arange(1, case.seqlen_q + 1, dtype=torch.int32, device="cuda")
    plan = create_mask_plan(ends[None, None].contiguous(), inputs.q, inputs.k, inputs.v, build_backward=True)
    return lambda q, k, v: first(flex_attn_func(q, k, v, mask_plan=plan, softmax_scale=case.scale))


def bare_flex(case: Case, inputs: Inputs) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    mask = create_block_mask(causal, None, None, case.seqlen_q, case.seqlen_kv, device="cuda") if case.mask.name == "causal" else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, scale=case.scale, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def bare_cudnn_sparse(case: Case, inputs: Inputs) -> dict[str, Step]:
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    lists = blocks.padded_lists(blocks.checked_map(case.mask, case.heads_q, "cuda"))
    index, num = (x.expand(1, case.heads_q, *x.shape[1:]).contiguous() for x in (lists.index, lists.num))
    common = {"q2k_block_index": index, "q2k_block_nums": num, "sparse_block_size": BLOCK, "softmax_scale": case.scale, "layout": "bshd"}
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    done = block_sparse_attention_forward(q, k, v, **common)
    return {
        "fwd": lambda: block_sparse_attention_forward(q, k, v, **common),
        "bwd": lambda: block_sparse_attention_backward(do, q, k, v, done["o_tensor"], done["lse_tensor"], **common),
    }


BARE: dict[str, Callable[[Case, Inputs], Attention]] = {
    "fa2": bare_fa2,
    "fa3": bare_fa3,
    "fa4": bare_fa4,
    "cudnn": bare_cudnn,
    "cudnn_flex": bare_cudnn_flex,
    "flex": bare_flex,
}
"""The libraries' own functions, as their documentation calls them."""
EXPLICIT: dict[str, Callable[[Case, Inputs], dict[str, Step]]] = {"cudnn_sparse": bare_cudnn_sparse}
"""Forward and backward of libraries without autograd."""


def first(result: Any) -> Tensor:
    """The out of a library that returns it alone in one release and with lse in another."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def say(text: str) -> None:
    print(text, flush=True)


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = catalogue.load(catalogue.KERNELS[name])()
    return kernel


def case_of(mask: str, seqlen: int, direction: Direction = Direction.FWD_BWD) -> Case:
    if mask in catalogue.MASK_GROUPS["block"]:
        return sparse_cases.case_of(seqlen, BLOCK_HEADS, BLOCK_HEADS, BLOCK, direction)
    full = catalogue.load(catalogue.MASKS[mask])(seqlen, seqlen)
    return Case(mask=full, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16", direction=direction)


class Bench:
    """A run: machine, clock, deadline, and the figures so far."""

    def __init__(self, minutes: float, figures_file: Path | None) -> None:
        self.machine = find_machine()
        self.clock = CLOCKS[self.machine.device]()
        self.deadline = time.monotonic() + 60 * minutes
        self.figures_file = figures_file
        self.rows: list[str] = []

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def keep(self, kernel: Kernel, row: str, **figures: Any) -> None:
        """A row of the table at the end, and a line of the file."""
        self.rows.append(row)
        say(row)
        if self.figures_file:
            about = {"device": self.machine.name, "versions": versions(kernel), "commit": commit(), "kernel": kernel.name}
            with self.figures_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about | figures) + "\n")

    def samples(self, steps: list[Step], effort: Effort) -> list[list[float]]:
        """Samples of each step, in turns."""
        call_ms = max(self.clock.wall(step)[0] for step in steps)
        launch_ms = max(min(self.clock.launch(step) for _ in range(3)) for step in steps)
        return interleave(self.clock, steps, effort, call_ms, launch_ms).of_steps


def steps_of(attention: Attention, inputs: Inputs, has_backward: bool) -> dict[str, Step]:
    """The bare call: a forward, and a backward of an earlier forward."""
    leaves = tuple(x.detach().requires_grad_(has_backward) for x in (inputs.q, inputs.k, inputs.v))
    with torch._functorch.config.patch(donated_buffer=False):  # a compiled backward that may run again
        out = attention(*leaves)
        steps: dict[str, Step] = {"fwd": lambda: attention(*leaves)}
        if has_backward:
            torch.autograd.grad(out, leaves, inputs.do, retain_graph=True)
            steps["bwd"] = lambda: torch.autograd.grad(out, leaves, inputs.do, retain_graph=True)
    return steps


def adapter_steps(kernel: Kernel, case: Case, inputs: Inputs) -> dict[str, Step]:
    call = kernel.bind(case, inputs)
    call.forward()
    steps: dict[str, Step] = {"fwd": call.forward}
    if case.direction.needs_backward:
        call.backward(inputs.do)
        steps["bwd"] = functools.partial(call.backward, inputs.do)
    return steps


def supported_case(kernel: Kernel, mask: str, seqlen: int, bench: Bench) -> Case | None:
    """The case both ways, else forward alone, else None."""
    if kernel.missing():
        return None
    cases = (case_of(mask, seqlen, direction) for direction in (Direction.FWD_BWD, Direction.FWD))
    return next((case for case in cases if kernel.supports(case, bench.machine) is None), None)


def overhead(bench: Bench, name: str, mask: str) -> None:
    """The adapter's call over a bare call of its library."""
    kernel = kernel_named(name)
    case = supported_case(kernel, mask, SEQLEN, bench)
    if case is None:
        return
    inputs = make_inputs(case, bench.machine.device)
    ours = adapter_steps(kernel, case, inputs)
    bare = EXPLICIT[name](case, inputs) if name in EXPLICIT else steps_of(BARE[name](case, inputs), inputs, case.direction.needs_backward)
    for direction, step in ours.items():
        a, b = bench.samples([step, bare[direction]], IN_TURNS)
        ratio = statistics.median(a) / statistics.median(b)
        row = f"adapter over bare call: {name:12} {mask:13} {SEQLEN:6} {direction}: {ratio:.3f}  ({statistics.median(b):.3f} ms bare)"
        bench.keep(
            kernel, row, figure="adapter_over_bare", mask=mask, seqlen=SEQLEN, direction=direction, ratio=ratio, ours_ms=a, bare_ms=b
        )


def clock(bench: Bench, name: str, seqlen: int) -> None:
    """Our clock over do_bench, in turns, and over the profiler where calls are short; over that alone where a launch takes longer."""
    from triton.testing import do_bench

    kernel = kernel_named(name)
    case = supported_case(kernel, "causal", seqlen, bench)
    if case is None:
        return
    inputs = make_inputs(case, bench.machine.device)
    for direction, step in adapter_steps(kernel, case, inputs).items():
        launch_ms, ours, theirs = min(bench.clock.launch(step) for _ in range(5)), list[float](), list[float]()
        for _ in range(CLOCK_ROUNDS[seqlen]):
            ours += bench.samples([step], ALONE)[0]
            theirs.append(do_bench(step, return_mode="median"))
        mine, other = statistics.median(ours), statistics.median(theirs)
        times_the_host = launch_ms > mine
        figures: dict[str, Any] = {"figure": "clock", "mask": "causal", "seqlen": seqlen, "direction": direction, "ours_ms": ours}
        figures |= {"do_bench_ms": theirs, "launch_ms": launch_ms, "ratio": None if times_the_host else mine / other}
        row = f"our clock: {name:10} causal {seqlen:6} {direction}: {mine:.4f} ms; "
        if times_the_host:
            row += f"do_bench times the host, {other:.4f} ms: a launch takes {launch_ms:.4f} ms"
        else:
            row += f"{mine / other:.3f} of do_bench's"
        if seqlen == PROFILED_SEQLEN or times_the_host:
            busy, span = profiled_ms(step)
            row += f"; over the profiler {mine / busy:.3f} of kernel time, {mine / span:.3f} of its span"
            figures |= {"kernels_ms": busy, "span_ms": span}
        bench.keep(kernel, row, **figures)


def compile_ahead(bench: Bench) -> None:
    """Compile what the clock's calls will need, all at once, each in a process of its own."""
    kernels = [kernel for name in CLOCK_KERNELS if (kernel := kernel_named(name)).compiles_to_disk(bench.machine)]
    cases = [(kernel, supported_case(kernel, "causal", seqlen, bench)) for seqlen in CLOCK_ROUNDS for kernel in kernels]
    runs = [Run(kernel.name, case) for kernel, case in cases if case]
    for one, answer in run_all(runs, (), max(1, len(runs)), lambda kernel, case: COMPILE_TIMEOUT_S):
        took = f"{answer['compile_ms'] / 1e3:.0f} s" if "compile_ms" in answer else "it failed"
        say(f"compiled ahead: {one.kernel} causal {one.case.seqlen_q}: {took}")


def profiled_ms(step: Step) -> tuple[float, float]:
    """What the profiler saw of a call: the time in its kernels, and from the first's start to the last's end; medians, with a cold L2."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler import profile

    scratch = torch.zeros(2**25, dtype=torch.float64, device="cuda")  # its kernel is told by its name: attention negates no doubles
    torch.cuda.synchronize()
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
        for _ in range(PROFILED_CALLS):
            scratch.neg_()
            step()
        torch.cuda.synchronize()
    events = [e for e in profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    calls: list[list[tuple[int, int]]] = []
    for event in sorted(events, key=lambda e: e.start_ns()):
        if "neg" in event.name():
            calls.append([])
        elif calls:
            calls[-1].append((event.start_ns(), event.duration_ns()))
    busy = [sum(duration for _, duration in call) / 1e6 for call in calls if call]
    span = [(max(start + duration for start, duration in call) - call[0][0]) / 1e6 for call in calls if call]
    return statistics.median(busy), statistics.median(span)


def run(kernels: list[str], minutes: float, figures_file: Path | None) -> int:
    """Everything, as far as the time goes, and the table; how many parts failed."""
    bench, failed = Bench(minutes, figures_file), 0
    jobs = [functools.partial(overhead, bench, name, mask) for mask in ("causal", "full") for name in kernels if name in BARE]
    jobs += [functools.partial(overhead, bench, name, "uniform_block") for name in kernels if name in EXPLICIT]
    jobs += [functools.partial(compile_ahead, bench)]
    jobs += [functools.partial(clock, bench, name, seqlen) for seqlen in CLOCK_ROUNDS for name in CLOCK_KERNELS]
    for job in jobs:
        if bench.late:
            break
        try:
            job()
        except Exception:
            failed += 1
            traceback.print_exc()
    say("\n" + "\n".join(bench.rows))
    say(f"{bench.machine.name}, torch {torch.__version__}; {failed} failed{', out of time' if bench.late else ''}")
    return failed + (not bench.rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join((*BARE, *EXPLICIT)))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--figures", type=Path, help="a file that gets one line of JSON for each figure")
    args = parser.parse_args()
    return int(run([name for name in args.kernels.split(",") if name], args.minutes, args.figures) > 0)


if __name__ == "__main__":
    sys.exit(main())
