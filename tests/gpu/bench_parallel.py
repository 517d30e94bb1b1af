"""Context parallelism on one GPU: every block kernel on every kind of block, then 4 and 8 staged ranks against the kernel alone.

    python tests/gpu/bench_parallel.py [--kernels fa2,fa2_torch,cudnn_flex,fa4,cudnn,fa3] [--worlds 4,8] [--skip-ranks]

Exit status 1 if anything is wrong. Nothing is timed here: `pytest_longca.parallel.bench` does that.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from random import Random

import torch

from pytest_longca.case import Case
from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.errors import DidNotRun
from pytest_longca.parallel.block_check import judge_block, worst
from pytest_longca.parallel.check import run_parallel
from pytest_longca.parallel.conformance import ALLOWED
from pytest_longca.parallel.kernel import find_block_kernel
from pytest_longca.parallel.layout import LAYOUTS
from pytest_longca.parallel.plan import Plan
from pytest_longca.parallel.pool import Pool
from pytest_longca.parallel.segment import Segment
from pytest_longca.parallel.setup import Sharing, document_lengths

TOKENS, RING, DIM = 2000, 4, 128
SEEDS = (7, 9, 16)  # windows of half the sequence and of 1, one document; eight documents; three
ERROR_RATIO = 2.0
LSE_FLOOR = 1e-6


def blocks(mask_name: str, seed: int) -> Iterator[tuple[str, Segment]]:
    """Every block that any ring rank computes under two layouts, and all others as one, as a gather gives them."""
    mask = load(MASKS[mask_name]).sample(Random(seed), TOKENS)
    intervals = mask.row_intervals()[0, 0]
    area = (intervals[..., 1] - intervals[..., 0]).sum(1, dtype=torch.int64)
    for layout in ("zigzag", "balanced"):
        shards = LAYOUTS[layout](document_lengths(mask), area, RING)
        for own in range(RING):
            plan = Plan(intervals, shards, own, torch.device("cuda"))
            for sources in [(source,) for source in range(RING)] + [tuple(source for source in range(RING) if source != own)]:
                if step := plan.step(sources):
                    yield f"{mask!r} {layout} rank {own} block {sources}", step.segment


def check_blocks(name: str, samples: int) -> int:
    """How many blocks of all static masks the kernel gets wrong, by the limits of any kernel."""
    kernel, wrong, largest, count = find_block_kernel(name), 0, 0.0, 0
    for mask_name in MASK_GROUPS["static"]:
        for what, segment in (found for seed in SEEDS[:samples] for found in blocks(mask_name, seed)):
            try:
                verdict = worst(judge_block(kernel, segment, "bf16", heads=(8, 2), head_dim=DIM))
            except Exception as error:
                print(f"{name} {what}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                wrong += 1
                continue
            count, largest = count + 1, max(largest, verdict.error_over_limit)
            if not verdict.ok:
                wrong += 1
                print(f"{name} {what}: WRONG {verdict.tensor} {verdict.message}", flush=True)
    print(f"{name}: {count} blocks ran, {wrong} wrong, largest error {largest:.2f} of its limit", flush=True)
    return wrong


def check_ranks(name: str, world: int, samples: int) -> int:
    """How many cases of `world` ranks, communication staged through the host, are further from the truth than twice the kernel alone."""
    wrong = 0
    with Pool(1, "cuda") as alone, Pool(world, "cuda") as pool:
        for mask_name, seed in product(MASK_GROUPS["static"], SEEDS[:samples]):
            case = Case(mask=load(MASKS[mask_name]).sample(Random(seed), TOKENS), heads_q=16, heads_kv=4, head_dim=DIM, dtype="bf16")
            for mechanism in ("ulysses", "ring_p2p", "ring_allgather", "usp", "loongtrain"):
                try:
                    truth = run_parallel(alone, case, Sharing("ring_p2p", 1), name, timeout_s=120)["rms"]
                    answer = run_parallel(pool, case, Sharing(mechanism, world), name, timeout_s=120)
                except DidNotRun as stopped:
                    print(f"{name} W={world} {mask_name} {mechanism}: {str(stopped)[:300]}", flush=True)
                    wrong += 1
                    continue
                ratio = max(answer["rms"][tensor] / max(truth[tensor], LSE_FLOOR) for tensor in truth)
                over = max(float(verdict["error_over_limit"]) for verdict in answer["verdicts"])
                is_wrong = ratio > ERROR_RATIO or not over <= ALLOWED
                wrong += is_wrong
                verdict = "WRONG" if is_wrong else "ok"
                figures = f"{ratio:.2f} x the kernel alone, {over:.2f} of a limit"
                print(f"{name} W={world} {mask_name} {seed} {mechanism}: {verdict}, {figures}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="fa2,fa2_torch,cudnn_flex")
    parser.add_argument("--worlds", default="4,8")
    parser.add_argument("--samples", type=int, default=2, choices=range(1, len(SEEDS) + 1), help="masks of each kind")
    parser.add_argument("--skip-blocks", action="store_true")
    parser.add_argument("--skip-ranks", action="store_true")
    options = parser.parse_args()
    wrong = 0
    for name in options.kernels.split(","):
        if not options.skip_ranks:
            wrong += sum(check_ranks(name, int(world), options.samples) for world in options.worlds.split(","))
        if not options.skip_blocks:
            wrong += check_blocks(name, options.samples)
    print(f"{wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
