"""The exact probes: silent on correct kernels, loud on the smallest mistake, whatever the sizes."""

import pytest
import torch

from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS
from pytest_longca.checks import verify
from pytest_longca.faulty import make_faulty, wrong_grad, wrong_mask
from pytest_longca.kernel import Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.machine import CPU
from pytest_longca.mask import PredicateMask
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.outcome import Passed
from pytest_longca.strategies import probe_cases


@pytest.mark.parametrize(
    ("kernel", "mask"), [(Naive(), mask) for mask in MASKS] + [(Sdpa(), mask) for mask in ("causal", "full_document", "variable_block")]
)
def test_correct_kernels_pass_count_and_support_on_every_probe_case(kernel: Kernel, mask: str) -> None:
    for case in probe_cases(mask, kernel, CPU):
        verification = verify(kernel, case, CPU, ["count", "support"])
        assert verification.outcome == Passed(), case.id
        assert verification.checks == ("count", "support")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_counts_more_keys_than_it_can_write_exactly(dtype: str) -> None:
    case = Case(mask=Causal(300, 300), heads_q=2, head_dim=64, heads_kv=1, dtype=dtype)
    assert verify(Naive(), case, CPU, ["count", "support"]).outcome == Passed()


@pytest.mark.parametrize("head_dim_v", [8, 11, 24])
def test_count_sees_every_key_when_there_are_more_keys_than_columns(head_dim_v: int) -> None:
    case = Case(mask=Full(20, 37), batch=2, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=head_dim_v)
    assert verify(Naive(), case, CPU, ["count"]).outcome == Passed()
    for key in range(0, 37, 6):
        blind = make_faulty(Naive(), "blind", wrong_mask(lambda _, mod, key=key: lambda b, h, i, j: mod(b, h, i, j) & (j != key)))
        finding, of_lse = verify(blind, case, CPU, ["count"]).findings
        assert of_lse.tensor == "lse" and of_lse.place is not None and "keys" not in of_lse.place
        assert f"does not read key {key}, which the mask shows" in finding.message
        assert f"all at key {key}" in finding.message
        assert finding.place is not None and finding.place["keys"] == [key]


@pytest.mark.parametrize(("row", "key"), [(0, 3), (5, 12), (12, 12)])
def test_one_wrongly_visible_pair_of_one_head_is_found_and_named(row: int, key: int) -> None:
    case = Case(
        mask=PredicateMask(lambda b, h, i, j: (j <= i) & (j != key) & (h >= 0), 13, 13, num_heads=4), heads_q=4, heads_kv=2, head_dim=16
    )
    leaky = make_faulty(
        Naive(), "leaky", wrong_mask(lambda _, mod: lambda b, h, i, j: mod(b, h, i, j) | ((i == row) & (j == key) & (h == 3)))
    )
    finding = verify(leaky, case, CPU, ["count"]).findings[0]
    assert f"head 3, query {row} reads key {key}, which the mask hides; 1 pair in all: only heads 3" in finding.message
    assert finding.place == {"batch": 0, "head": 3, "rows": [row], "keys": [key], "pairs": [[row, key]]}


def test_masks_that_differ_between_batch_elements_are_probed_copy_by_copy() -> None:
    mask = PredicateMask(lambda b, h, i, j: j <= i + 2 * b, 9, 9, num_batches=3)
    case = Case(mask=mask, batch=3, heads_q=2, heads_kv=1, head_dim=4)
    assert verify(Naive(), case, CPU, ["count", "support"]).outcome == Passed()
    swapped = make_faulty(Naive(), "swapped", wrong_mask(lambda _, mod: lambda b, h, i, j: mod((b + 1) % 3, h, i, j)))
    assert "reads key" in verify(swapped, case, CPU, ["count"]).findings[0].message


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_support_finds_one_gradient_row_that_should_be_zero_or_should_not(name: str) -> None:
    case = Case(mask=Causal(14, 17), heads_q=6, heads_kv=2, head_dim=16)

    def lose(case: Case, grad: torch.Tensor) -> torch.Tensor:
        grad[:, 5, 1] = 0
        return grad

    def leak(case: Case, grad: torch.Tensor) -> torch.Tensor:
        grad[:, 5, 1, 3] += 1e-6
        return grad

    for change in (lose, leak):
        findings = verify(make_faulty(Naive(), "wrong", wrong_grad(name, change)), case, CPU, ["support"]).findings
        assert {finding.tensor for finding in findings} == {name}


def test_support_names_a_constant_factor() -> None:
    case = Case(mask=Full(12, 12), heads_q=6, heads_kv=2, head_dim=32)
    doubled = make_faulty(Naive(), "doubled", wrong_grad("dk", lambda case, grad: 2 * grad))
    assert ": all 2 times what is due, which is 2" in verify(doubled, case, CPU, ["support"]).findings[0].message
    rounded = make_faulty(Naive(), "rounded", wrong_grad("dk", lambda case, grad: grad.bfloat16().float()))
    assert "times what is due" not in verify(rounded, case, CPU, ["support"]).findings[0].message


def test_probes_are_not_asked_where_they_have_nothing_to_say() -> None:
    forward_only = Case(mask=Full(4, 4), head_dim=8, direction=Direction.FWD)
    assert verify(Naive(), forward_only, CPU, ["probes"]).checks == ("count", "layout")
    empty = Case(mask=Full(0, 4), head_dim=8)
    assert verify(Naive(), empty, CPU, ["probes"]).outcome.kind == "not_verified"
