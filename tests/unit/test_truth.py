"""Truth: how what a device gave comes to the host."""

import pytest
import torch

from pytest_longca import truth
from pytest_longca.case import Case, Layout
from pytest_longca.inputs import OPERANDS, make_inputs, shares_memory
from pytest_longca.judge import Result
from pytest_longca.masks.regular import Causal
from pytest_longca.truth import fetched, on_host, where_judged


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


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_of_a_device_come_in_one_copy(layout: Layout, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def cpu(x: torch.Tensor) -> torch.Tensor:
        copies.append(x)
        return x.clone()

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    inputs = make_inputs(Case(mask=Causal(5, 7), batch=2, heads_q=3, head_dim=5, dtype=dtype, layouts=(layout,) * 4))
    away = {name: getattr(inputs, name) for name in OPERANDS}
    away |= {"lse": torch.rand(2, 3, 5, dtype=torch.float64), "none": torch.empty(2, 0, 3)}
    found = fetched(away)
    assert len(copies) == 1
    for name, x in away.items():
        assert found[name].dtype is x.dtype and torch.equal(found[name], x)
        assert [stride == 0 for stride in found[name].stride()] == [stride == 0 for stride in x.stride()]


def test_only_a_small_case_is_judged_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "on_host", lambda given: "moved")
    result = Result()
    moved: object = where_judged(Case(mask=Causal(5, 7)), result)
    assert moved == "moved"
    assert where_judged(Case(mask=Causal(2**9, 2**9)), result) is result
