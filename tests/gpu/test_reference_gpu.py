"""The reference in halves on a GPU: its error against fp64, and what it costs at long lengths."""

import os
import time

import pytest
import torch

from pytest_longca.arithmetic import Arithmetic, Exact, Split
from pytest_longca.case import Case, Values
from pytest_longca.inputs import make_inputs
from pytest_longca.judge import Result, judge
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full
from pytest_longca.reference import choose_arithmetic, compute

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TENSORS = ("out", "dq", "dk", "dv")


def uniform_block(seqlen: int, heads: int, density: float) -> UniformBlock:
    blocks = seqlen // 64
    block_map = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(1)) < density
    return UniformBlock(seqlen, seqlen, 64, block_map)


def errors(case: Case, arithmetic: Arithmetic | None) -> dict[str, float]:
    """The largest row error of each tensor against fp64, as a fraction of the row's sum of absolute terms."""
    inputs = make_inputs(case, "cuda")
    truth, found = compute(case, inputs, Exact()), compute(case, inputs, arithmetic or choose_arithmetic(case, inputs))
    over = {}
    for name in TENSORS:
        error = torch.linalg.vector_norm(getattr(found, name).double() - getattr(truth, name), dim=-1)
        over[name] = float((error / getattr(truth, f"scale_{name}")).nan_to_num().max())
    return over


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("values", [Values.NORMAL, Values.BIASED])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_halves_are_within_2e_5_of_fp64(values: Values, dtype: str, compiled: bool) -> None:
    case = Case(mask=Causal(2048, 2048), heads_q=16, heads_kv=2, head_dim=128, dtype=dtype, values=values)
    over = errors(case, Split(compiled))
    print(f"\n{dtype} {values} {'compiled' if compiled else 'eager'}: {over}")
    assert max(over.values()) <= 2e-5


@pytest.mark.parametrize("values", list(Values))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_chosen_is_within_2e_5_of_fp64(values: Values, dtype: str) -> None:
    case = Case(mask=Causal(2048, 2048), heads_q=8, heads_kv=2, head_dim=128, dtype=dtype, values=values)
    over = errors(case, None)
    print(f"\n{dtype} {values}: {over}")
    assert max(over.values()) <= 2e-5


@pytest.mark.parametrize("mask", [CausalDocument((700, 0, 1000, 348)), uniform_block(2048, 16, 0.2)], ids=lambda mask: mask.name)
def test_masks_that_skip_agree_with_fp64(mask: Mask) -> None:
    over = errors(Case(mask=mask, batch=2, heads_q=16, heads_kv=2, head_dim=64, dtype="bf16"), Split())
    assert max(over.values()) <= 2e-5


def lengths() -> list[int]:
    """8K and 32K; more with LONGCA_REFERENCE_LENGTHS=131072,..."""
    more = os.environ.get("LONGCA_REFERENCE_LENGTHS", "")
    return [8192, 32768, *(int(length) for length in more.split(",") if length)]


def timed_masks(seqlen: int) -> dict[str, Mask]:
    """Causal, and masks of about 0.03 density."""
    documents = (seqlen // 32,) * 32
    return {
        "causal": Causal(seqlen, seqlen),
        "full": Full(seqlen, seqlen),
        "window 0.03": CausalSlidingWindow(seqlen, seqlen, seqlen // 32),
        "documents 0.016": CausalDocument(documents),
        "blocks of 64, 0.03": uniform_block(seqlen, 64, 0.03),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("seqlen", lengths())
def test_what_a_reference_costs(seqlen: int, compiled: bool) -> None:
    for name, mask in timed_masks(seqlen).items():
        if seqlen > 32768 and name == "full":
            continue
        case = Case(mask=mask, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
        inputs = make_inputs(case, "cuda")
        seconds = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):  # the first warms allocator, autotuner and compiler
            torch.cuda.synchronize()
            start = time.perf_counter()
            reference = compute(case, inputs, Split(compiled))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        result = Result(*(getattr(reference, tensor).to(torch.bfloat16) for tensor in ("out",)), reference.lse.float(), *(
            getattr(reference, tensor).to(torch.bfloat16) for tensor in ("dq", "dk", "dv")))  # fmt: skip
        verdicts = judge(case, inputs, reference, result)
        torch.cuda.synchronize()
        judging = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"\n{seqlen} {name}: first {seconds[0]:.2f} s, then {seconds[1]:.3f} s, judge {judging:.3f} s, peak {peak:.1f} GiB", end="")
        assert all(verdict.ok for verdict in verdicts)
        del reference, result
