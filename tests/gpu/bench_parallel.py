"""Context parallelism on one GPU: every block kernel on every kind of block, then 4 and 8 staged ranks against the kernel alone.

    python tests/gpu/bench_parallel.py [--kernels fa2,fa2_torch,cudnn_flex,fa4,cudnn,fa3] [--worlds 4,8] [--skip-ranks]

Exit status 1 if anything is wrong. Nothing is timed here: `pytest_longca.parallel.bench` does that.
"""

import argparse
import sys
from collections.abc import Iterator
from random import Random

import torch

from pytest_longca.case import Case
from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.errors import DidNotRun
from pytest_longca.outcome import Unsupported
from pytest_longca.parallel.check import run_parallel
from pytest_longca.parallel.kernel import BlockKernel, NaiveBlock, find_block_kernel
from pytest_longca.parallel.layout import LAYOUTS
from pytest_longca.parallel.plan import Plan, Step
from pytest_longca.parallel.pool import Pool
from pytest_longca.parallel.setup import Sharing, document_lengths

TOKENS, RING, HEADS, DIM = 2000, 4, (8, 2), 128
BF16_ERROR = 0.02  # of the largest entry: several roundings of bf16, far below any wrong mask
ERROR_RATIO = 2.0


def steps(mask_name: str, layout: str) -> Iterator[tuple[str, Step]]:
    """Every block that a ring rank computes, and the whole gathered sequence."""
    mask = load(MASKS[mask_name]).sample(Random(7), TOKENS)
    intervals = mask.row_intervals()[0, 0]
    shards = LAYOUTS[layout](document_lengths(mask), (intervals[..., 1] - intervals[..., 0]).sum(1, dtype=torch.int64), RING)
    plan = Plan(intervals, shards, 1, torch.device("cuda"))
    for sources in [(source,) for source in range(RING)] + [tuple(range(RING))]:
        step = plan.step(sources)
        if step is not None:
            yield f"{mask_name} {layout} block {sources}", step


def block_errors(kernel: BlockKernel, step: Step) -> dict[str, float]:
    """Largest error of each tensor as a fraction of its largest entry, against dense attention in fp32."""
    generator = torch.Generator("cuda").manual_seed(3)
    rows, keys = step.segment.num_rows, step.segment.num_keys

    def draw(n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, DIM, generator=generator, device="cuda").bfloat16()

    q, do, kv = draw(rows, HEADS[0]), draw(rows, HEADS[0]), torch.cat((draw(keys, HEADS[1]), draw(keys, HEADS[1])), -1)
    k, v, scale = kv[..., :DIM], kv[..., DIM:], DIM**-0.5
    out, lse = NaiveBlock().block_forward(q, k, v, step.segment, scale)
    found_out, found_lse = kernel.block_forward(q, k, v, step.segment, scale)
    errors = {"out": _error(found_out, out), "lse": _error(found_lse, lse)}
    try:
        found = kernel.block_backward(do, q, k, v, out, lse, step.segment, scale)
    except DidNotRun as stopped:
        assert isinstance(stopped.outcome, Unsupported), stopped
        return errors
    truth = NaiveBlock().block_backward(do, q, k, v, out, lse, step.segment, scale)
    return errors | {name: _error(a, b) for name, a, b in zip(("dq", "dk", "dv"), found, truth, strict=True)}


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    found, truth = found.float(), truth.float()
    difference = (found - truth).masked_fill(found == truth, 0)
    largest = truth[truth.isfinite()].abs().max().item() if bool(truth.isfinite().any()) else 1.0
    return difference.abs().max().item() / max(largest, 1e-6) if bool(difference.isfinite().all()) else float("inf")


def check_blocks(name: str) -> int:
    """How many blocks of all static masks and two layouts the kernel gets wrong."""
    kernel, wrong, worst, count = find_block_kernel(name), 0, 0.0, 0
    for mask_name in MASK_GROUPS["static"]:
        for layout in ("zigzag", "balanced"):
            for what, step in steps(mask_name, layout):
                try:
                    errors = block_errors(kernel, step)
                except Exception as error:
                    print(f"{name} {what}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                    wrong += 1
                    continue
                count, worst = count + 1, max(worst, *errors.values())
                if max(errors.values()) > BF16_ERROR:
                    wrong += 1
                    print(f"{name} {what}: WRONG {errors}", flush=True)
    print(f"{name}: {count} blocks ran, {wrong} wrong, largest error {worst:.4f} of the largest entry", flush=True)
    return wrong


def check_ranks(name: str, world: int) -> int:
    """How many cases of `world` ranks, communication staged through the host, are further from the truth than twice the kernel alone."""
    wrong = 0
    with Pool(1, "cuda") as alone, Pool(world, "cuda") as pool:
        for mask_name in MASK_GROUPS["static"]:
            case = Case(mask=load(MASKS[mask_name]).sample(Random(7), TOKENS), heads_q=16, heads_kv=4, head_dim=DIM, dtype="bf16")
            for mechanism in ("ulysses", "ring_p2p", "ring_allgather", "usp", "loongtrain"):
                try:
                    truth = run_parallel(alone, case, Sharing("ring_p2p", 1), name, timeout_s=120)["rms"]
                    found = run_parallel(pool, case, Sharing(mechanism, world), name, timeout_s=120)["rms"]
                except DidNotRun as stopped:
                    print(f"{name} W={world} {mask_name} {mechanism}: {str(stopped)[:300]}", flush=True)
                    wrong += 1
                    continue
                ratios = {tensor: found[tensor] / max(truth[tensor], 1e-6) for tensor in found}
                worst = max(ratios.values())
                wrong += worst > ERROR_RATIO
                verdict = "WRONG" if worst > ERROR_RATIO else "ok"
                print(f"{name} W={world} {mask_name} {mechanism}: {verdict}, {worst:.2f} x the kernel alone", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="fa2,fa2_torch,cudnn_flex")
    parser.add_argument("--worlds", default="4,8")
    parser.add_argument("--skip-blocks", action="store_true")
    parser.add_argument("--skip-ranks", action="store_true")
    options = parser.parse_args()
    wrong = 0
    for name in options.kernels.split(","):
        if not options.skip_ranks:
            wrong += sum(check_ranks(name, int(world)) for world in options.worlds.split(","))
        if not options.skip_blocks:
            wrong += check_blocks(name)
    print(f"{wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
