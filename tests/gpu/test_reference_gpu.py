"""The reference in halves on a GPU: its error against fp64, and what a full verification costs at long lengths.

    PYTHONPATH=. python tests/gpu/test_reference_gpu.py [--seconds 75] [--only 512K] [--figures FILE]     one table, within the time
    pytest tests/gpu/test_reference_gpu.py                                 the same figures, asserted

Each line is printed as soon as it is known; the table comes last. What there is no time for is said.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from pytest_longca import catalogue
from pytest_longca.arithmetic import Arithmetic, Exact, Split
from pytest_longca.case import Case, Values
from pytest_longca.conformance import commit
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.jobs import find_machine
from pytest_longca.judge import Result, judge
from pytest_longca.mask import Mask
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal
from pytest_longca.reference import Reference, choose_arithmetic, compute
from pytest_longca.subject import Subject

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TENSORS = ("out", "dq", "dk", "dv")
K = 1024
TARGETS_S = {8 * K: 0.3, 32 * K: 2.0, 128 * K: 30.0}
"""Full verification of causal 64:8 heads of 128: reference and comparison."""
DOCUMENTS = 16
"""Causal documents of equal length: a density of 1 / 32, 0.03."""
ERROR_TARGET = 2e-5
ARITHMETIC: dict[str, Callable[[Case, Inputs], Arithmetic]] = {
    "eager": lambda case, inputs: Split(False),
    "compiled": lambda case, inputs: Split(True),
    "chosen": choose_arithmetic,
}


@dataclass(frozen=True)
class Line:
    """A measured figure and what it should be at most."""

    what: str
    value: float
    target: float
    unit: str

    def __str__(self) -> str:
        verdict = "ok" if self.value <= self.target else "ABOVE"
        return f"{self.what:44} {self.value:9.3g} {self.unit:6} target {self.target:<7.3g} {verdict}"


def case_of(mask: Mask, dtype: str = "bf16", values: Values = Values.NORMAL, heads: tuple[int, int] = (64, 8)) -> Case:
    return Case(mask=mask, heads_q=heads[0], heads_kv=heads[1], head_dim=128, dtype=dtype, values=values)


def largest_error(found: Reference, truth: Reference) -> float:
    """The largest row error of any tensor, as a fraction of the row's sum of absolute terms."""
    worst = 0.0
    for name in TENSORS:
        error = torch.linalg.vector_norm(getattr(found, name).double() - getattr(truth, name), dim=-1)
        worst = max(worst, float((error / truth.bounds[name].scale).nan_to_num().max()))
    return worst


def errors(dtype: str, values: Values, mask: Mask) -> Iterator[Line]:
    """Each arithmetic against fp64; halves alone are not chosen for peaked inputs, whose fp32 scores are too coarse."""
    case = case_of(mask, dtype, values, (8, 2))
    inputs = make_inputs(case, "cuda")
    truth = compute(case, inputs, Exact())
    for name, arithmetic in ARITHMETIC.items():
        error = largest_error(compute(case, inputs, arithmetic(case, inputs)), truth)
        target = float("inf") if values is Values.PEAKED and name != "chosen" else ERROR_TARGET
        shape = "2K" if mask.seqlen_q == mask.seqlen_kv else f"{mask.seqlen_q} rows of 16K"
        yield Line(f"error over A at {shape}, {dtype} {values} {name}", error, target, "")


def as_kernel(reference: Reference, dtype: torch.dtype) -> Result:
    """The reference's own values as a kernel would give them."""
    rounded = {name: getattr(reference, name).to(dtype) for name in TENSORS}
    return Result(lse=reference.lse.float(), **rounded)


def verification_s(case: Case, inputs: Inputs, arithmetic: Arithmetic) -> float:
    """Seconds for the reference and the comparison."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    reference = compute(case, inputs, arithmetic)
    torch.cuda.synchronize()
    computed = time.perf_counter() - start
    result = as_kernel(reference, inputs.q.dtype)
    torch.cuda.synchronize()
    start = time.perf_counter()
    verdicts = judge(case, inputs, reference, result)
    torch.cuda.synchronize()
    assert all(verdict.ok for verdict in verdicts), [verdict.message for verdict in verdicts]
    return computed + time.perf_counter() - start


def costs(seqlen: int, arithmetic: str, left: Callable[[], float] = lambda: float("inf")) -> Iterator[Line]:
    """Seconds of causal, and documents of 0.03 density as a part of causal's."""
    seconds = {}
    for name, mask in (("causal", Causal(seqlen, seqlen)), ("documents", CausalDocument((seqlen // DOCUMENTS,) * DOCUMENTS))):
        case = case_of(mask)
        inputs = make_inputs(case, "cuda")
        made = ARITHMETIC[arithmetic](case, inputs)
        tries = 2 if seqlen <= 32 * K else 1  # the first warms allocator, libraries and compiler
        times = [verification_s(case, inputs, made) for _ in range(tries) if left() > 0]
        if not times:
            return
        seconds[name] = times[-1]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"  {seqlen} {name} {arithmetic}: {', '.join(f'{t:.3f}' for t in times)} s, peak {peak:.1f} GiB", flush=True)
    yield Line(f"verification at {seqlen // K}K, {arithmetic}", seconds["causal"], TARGETS_S[seqlen], "s")
    full = 2 * seconds["causal"]  # of full, by area
    if seqlen >= 32 * K:  # below, starting kernels is most of the time
        yield Line(f"documents of 0.03 over full at {seqlen // K}K, {arithmetic}", seconds["documents"] / full, 0.1, "")


def sampled() -> Iterator[Line]:
    """Seconds of what is verified of causal 512K tokens, with real results: samples of all heads, one head in full, the identities."""
    case = case_of(Causal(512 * K, 512 * K))
    subject = Subject(catalogue.load(catalogue.KERNELS["fa2"])(), case, find_machine())
    start = time.perf_counter()
    subject.result  # noqa: B018  # forward and backward
    kernel_s = time.perf_counter() - start
    verdicts = subject.verdicts
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start - kernel_s
    assert all(verdict.ok for verdict in verdicts), [verdict.message for verdict in verdicts]
    print(f"  {case.seqlen_q} causal: fa2 ran {kernel_s:.0f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    yield Line("verification at 512K, samples and one head", seconds, 180.0, "s")


SQUARE, LONG_ROWS = Causal(2 * K, 2 * K), Causal(512, 16 * K)
"""The second has pieces of keys of the length that few heads have."""


@pytest.mark.parametrize("mask", [SQUARE, LONG_ROWS], ids=str)
@pytest.mark.parametrize("values", [Values.NORMAL, Values.BIASED, Values.PEAKED])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_halves_are_within_2e_5_of_fp64(dtype: str, values: Values, mask: Mask) -> None:
    for line in errors(dtype, values, mask):
        print(line)
        assert line.value <= line.target


@pytest.mark.parametrize("arithmetic", ["eager", "compiled"])
@pytest.mark.parametrize("seqlen", [8 * K, 32 * K])
def test_a_full_verification_costs_what_it_may(seqlen: int, arithmetic: str) -> None:
    lines = list(costs(seqlen, arithmetic))
    print(*lines, sep="\n")
    best = {line.what: line for line in lines}
    assert all(line.value <= line.target for line in best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--only", default="", help="the steps whose names contain it: errors, 8K, 32K, 128K, 512K")
    parser.add_argument("--figures", type=Path, help="a file that gets one line of JSON for each figure")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    about = {"device": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__}, "commit": commit()}

    def left() -> float:
        return end - time.monotonic()

    lengths = (
        (8 * K, "eager", 2.0),
        (8 * K, "compiled", 3.0),
        (32 * K, "compiled", 8.0),
        (32 * K, "eager", 10.0),
        (128 * K, "compiled", 30.0),
    )
    steps: list[tuple[str, float, Callable[[], Iterator[Line]]]] = [
        (f"errors {values}", 2.0, partial(errors, "bf16", values, SQUARE)) for values in (Values.NORMAL, Values.BIASED, Values.PEAKED)
    ]
    steps += [(f"errors {values}, long rows", 2.0, partial(errors, "bf16", values, LONG_ROWS)) for values in (Values.NORMAL, Values.BIASED)]
    steps += [("512K", 100.0, sampled)]
    steps += [(f"{seqlen // K}K {name}", need, partial(costs, seqlen, name, left)) for seqlen, name, need in lengths]
    lines: list[Line | str] = []
    for name, need, step in (step for step in steps if args.only in step[0]):
        if left() < need:
            lines.append(f"{name:44} no time left")
            continue
        try:
            for line in step():
                lines.append(line)
                print(line, flush=True)
                if args.figures:
                    with args.figures.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(about | asdict(line)) + "\n")
        except (AssertionError, RuntimeError) as error:
            lines.append(f"{name:44} {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()
    print("\nTABLE", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
