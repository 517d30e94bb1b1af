"""How long a plan takes: from a mask's row intervals to tile lists, columns or endpoints. Run on a GPU, as a script.

    PYTHONPATH=.:$SITE python tests/gpu/bench_plans.py [--kernels flashmask,fa4,cudnn_flex] [--figures FILE]

Each kernel is bound again and again to the same operands (bf16, 64:8 heads of 128, their contents do not matter). Host time until the
device is done, medians of several; what making the mask's row intervals takes, which every kernel starts from, is timed alone and stated
beside. The targets are for what comes after it. What to keep comes last.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pytest_longca import catalogue
from pytest_longca.case import Case
from pytest_longca.conformance import commit, versions
from pytest_longca.inputs import Inputs
from pytest_longca.jobs import find_machine
from pytest_longca.kernel import Kernel

KERNELS = "flashmask,fa4,cudnn_flex"
STATIC = catalogue.MASK_GROUPS["static"]
K = 1024
LENGTHS = {32 * K: STATIC, 512 * K: ("causal", "causal_document", "prefix_lm_document", "block_causal_document")}
TARGETS_MS = {32 * K: 3.0, 512 * K: 30.0}
TIMES = 7


def case_of(name: str, seqlen: int) -> Case:
    mask = catalogue.load(catalogue.MASKS[name]).default(seqlen)
    return Case(mask=mask, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")


def operands(seqlen: int) -> Inputs:
    q, do = (torch.empty(1, seqlen, 64, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = (torch.empty(1, seqlen, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return Inputs(q, k, v, do)


def wall_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def median_ms(call: Callable[[], object]) -> float:
    """The median time; the first calls are left out, they compile and import."""
    return statistics.median([wall_ms(call) for _ in range(TIMES + 2)][2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=KERNELS)
    parser.add_argument("--figures", type=Path, help="a file that gets one line of JSON for each figure")
    args = parser.parse_args()
    machine, rows, failed = find_machine(), list[str](), 0
    for seqlen, masks in LENGTHS.items():
        inputs = operands(seqlen)
        for name in args.kernels.split(","):
            kernel: Kernel = catalogue.load(catalogue.KERNELS[name])()
            for mask in masks:
                case = case_of(mask, seqlen)
                if reason := kernel.missing() or kernel.supports(case, machine):
                    print(f"{name} {mask}: {reason}", flush=True)
                    continue
                try:
                    bind_ms = median_ms(partial(kernel.bind, case, inputs))
                    intervals_ms = median_ms(partial(case.mask.row_intervals, "cuda"))
                except Exception:
                    failed += 1
                    traceback.print_exc()
                    continue
                verdict = "ok" if bind_ms - intervals_ms <= TARGETS_MS[seqlen] else "ABOVE"
                rows.append(f"plan: {name:10} {mask:22} {seqlen:7}: {bind_ms:7.2f} ms, of it intervals {intervals_ms:7.2f}  {verdict}")
                print(rows[-1], flush=True)
                if args.figures:
                    about = {"device": machine.name, "versions": versions(kernel), "commit": commit(), "kernel": name}
                    about |= {"figure": "plan", "mask": mask, "seqlen": seqlen}
                    with args.figures.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(about | {"bind_ms": bind_ms, "intervals_ms": intervals_ms}) + "\n")
    print("\n" + "\n".join(rows))
    return int(failed > 0 or not rows)


if __name__ == "__main__":
    raise SystemExit(main())
