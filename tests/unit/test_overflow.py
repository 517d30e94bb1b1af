"""Operands far apart in memory: built as they should be, and a kernel whose offsets wrap is caught (here at a small threshold)."""

import pytest
import torch

from pytest_longca import overflow
from pytest_longca.case import Case
from pytest_longca.checks import CHECKS, verify
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall
from pytest_longca.kernels.naive import Naive
from pytest_longca.machine import CPU, Machine
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Passed
from pytest_longca.subject import Subject

CASE = Case(mask=Causal(40, 70), batch=2, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24, dtype="bf16")
FAR = 2**20


class Wrapping(Naive):
    """Reads tokens whose offset is beyond FAR / 2 where the wrapped offset leads."""

    name = "wrapping"

    def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
        step = inputs.k.stride(1)
        near = torch.arange(case.seqlen_kv) % max(FAR // 2 // step, 1)
        return super().bind(case, Inputs(inputs.q, inputs.k[:, near], inputs.v, inputs.do) if step * case.seqlen_kv > FAR else inputs)


def test_tokens_lie_on_both_sides_of_the_threshold_and_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "FAR_ELEMENTS", FAR)
    pair = (torch.randn(2, 40, 4, 16), torch.randn(2, 40, 4, 24))
    views = overflow.far_apart(pair)
    assert all(torch.equal(view, x) for view, x in zip(views, pair, strict=True))
    for view in views:
        offsets = view.storage_offset() + view.stride(1) * torch.arange(40)
        assert int(offsets[-1]) >= FAR and int(offsets[1]) < FAR / 2
        assert view.stride(1) % overflow.ALIGNMENT == 0 and view.data_ptr() % 16 == 0
    first, second = (set((view.storage_offset() + torch.arange(view.stride(0) * 2)).tolist()) for view in views)
    assert not first & second


def test_the_real_threshold_is_past_2_to_the_32_and_its_memory_is_known_beforehand() -> None:
    pair = (torch.empty(1, 1000, 8, 128, dtype=torch.bfloat16),) * 2
    assert overflow.token_elements(pair) * 999 > 2**32 and overflow.buffer_elements(pair) * 2 < 11 * 2**30


def test_a_kernel_whose_offsets_wrap_is_caught_and_naive_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "FAR_ELEMENTS", FAR)
    assert overflow.overflow(Subject(Naive(), CASE, CPU)) == []
    found = overflow.overflow(Subject(Wrapping(), CASE, CPU))
    assert {finding.tensor for finding in found} >= {"out", "lse", "dq", "dk"}
    assert "offsets pass 2^31" in found[0].message


def test_too_little_memory_is_a_skip_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "free_bytes", lambda device: 2**30)
    monkeypatch.setitem(CHECKS, "overflow", type(CHECKS["overflow"])(overflow.overflow, lambda subject: True))
    verification = verify(Naive(), CASE, CPU, ["overflow"])
    assert verification.outcome == Passed() and "are free" in verification.facts["overflow skipped"]


def test_it_is_for_gpus() -> None:
    applies = CHECKS["overflow"].applies
    assert not applies(Subject(Naive(), CASE, CPU)) and applies(Subject(Naive(), CASE, Machine("cuda")))
