"""FlashMask on a GPU against the reference: every static mask, bf16 and fp16, every head dim class, long lengths, layouts, memory."""

import dataclasses
from random import Random

import pytest
import torch

from pytest_longca import catalogue
from pytest_longca.case import Case, Layout
from pytest_longca.inputs import make_inputs
from pytest_longca.judge import Result, judge
from pytest_longca.kernel import Call
from pytest_longca.kernels.flashmask import FlashMask
from pytest_longca.mask import Mask
from pytest_longca.masks.regular import FullSlidingWindow
from pytest_longca.reference import compute

pytestmark = pytest.mark.gpu

STATIC = catalogue.MASK_GROUPS["static"]


def sampled(name: str, seqlen: int, seed: int = 0) -> Mask:
    mask: Mask = catalogue.load(catalogue.MASKS[name]).sample(Random(f"{name}:{seqlen}:{seed}"), seqlen)
    return mask


def results(call: Call, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, lse = call.forward()
    assert lse is not None
    return (out.detach(), lse.detach(), *call.backward(do))


def judge_case(case: Case) -> None:
    """Every tensor is within the limits that the project judges all kernels by."""
    x = make_inputs(case, "cuda")
    result = Result(*results(FlashMask().bind(case, x), x.do))
    wrong = [verdict for verdict in judge(case, x, compute(case, x), result) if not verdict.ok]
    assert not wrong, f"{case}: " + "; ".join(f"{verdict.tensor}: {verdict.message}" for verdict in wrong)


@pytest.mark.parametrize("seqlen", [1, 127, 1000])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", STATIC)
def test_every_static_mask_is_right(name, dtype, seqlen):
    judge_case(Case(mask=sampled(name, seqlen), heads_q=8, heads_kv=2, head_dim=128, dtype=dtype))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (40, 40), (64, 64), (72, 72), (192, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_class_of_head_dims_is_right(head_dim, head_dim_v, dtype):
    judge_case(Case(mask=sampled("shared_question", 500), heads_q=4, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype))


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_is_right(layout):
    judge_case(Case(mask=sampled("causal_document", 300), heads_q=4, heads_kv=2, head_dim=64, dtype="bf16", layouts=(layout,) * 4))


def test_two_runs_give_the_same_bits():
    case = Case(mask=sampled("shared_question", 3000), heads_q=16, heads_kv=2, head_dim=128, dtype="bf16")
    x = make_inputs(case, "cuda")
    first, second = (results(FlashMask().bind(case, x), x.do) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("wrong", [1, -1])
def test_the_limits_catch_a_window_that_is_wrong_by_one(wrong):
    right = Case(mask=FullSlidingWindow(1000, 1000, 200), heads_q=8, heads_kv=2, head_dim=128, dtype="bf16")
    x = make_inputs(right, "cuda")
    other = dataclasses.replace(right, mask=FullSlidingWindow(1000, 1000, 200 + wrong))
    verdicts = judge(right, x, compute(right, x), Result(*results(FlashMask().bind(other, x), x.do)))
    assert not any(verdict.ok for verdict in verdicts)


def test_128k_tokens_need_less_than_a_twentieth_beyond_operands_and_gradients():
    mask = catalogue.load(catalogue.MASKS["causal_document"]).default(128 * 1024)
    case = Case(mask=mask, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
    x = make_inputs(case, "cuda")
    half = sum(t.nbytes for t in (x.q, x.k, x.v, x.do))  # out, dq, dk and dv are as much again
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(FlashMask().bind(case, x), x.do)
    extra = torch.cuda.max_memory_allocated() - before - half
    assert extra < 0.05 * 2 * half
