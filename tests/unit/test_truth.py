"""Truth: how what a device gave comes to the host."""

import pytest
import torch

from pytest_longca.case import Case, Layout
from pytest_longca.inputs import OPERANDS, make_inputs, shares_memory
from pytest_longca.judge import Result
from pytest_longca.masks.regular import Causal
from pytest_longca.truth import on_host


@pytest.mark.parametrize("layout", Layout)
def test_operands_on_the_host_are_the_same_and_share_the_same_memory(layout: Layout) -> None:
    inputs = make_inputs(Case(mask=Causal(5, 7), batch=2, heads_q=4, heads_kv=2, head_dim=8, dtype="bf16", layouts=(layout,) * 4))
    moved = on_host(inputs)
    for name in OPERANDS:
        before, after = getattr(inputs, name), getattr(moved, name)
        assert torch.equal(before, after)
        assert [shares_memory(after, axis) for axis in range(4)] == [shares_memory(before, axis) for axis in range(4)]


def test_results_on_the_host_keep_what_is_no_tensor() -> None:
    result = Result(out=torch.ones(1, 2, 3, 4), lse=None, sums_in_dtype=True)
    moved = on_host(result)
    assert moved.lse is None and moved.sums_in_dtype and moved.out is not None and torch.equal(moved.out, torch.ones(1, 2, 3, 4))
