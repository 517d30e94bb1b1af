"""Each metamorphic relation speaks where it holds, agrees with a right kernel, and sees a fault that the case itself hides."""

from dataclasses import replace

import pytest
import torch

from pytest_longca.case import Case, Direction, Layout
from pytest_longca.checks import verify
from pytest_longca.faults import FAULTS
from pytest_longca.faulty import Bind, Fresh, Hooked, make_faulty, other_mask, wrong_inputs, wrong_results
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.machine import CPU
from pytest_longca.mask import Mask
from pytest_longca.masks.document import BlockCausalDocument, CausalBlockwise, CausalDocument, FullDocument, SharedQuestion
from pytest_longca.masks.prefix import PrefixLmCausal, PrefixLmDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full, FullSlidingWindow
from pytest_longca.metamorphic import RELATIONS
from pytest_longca.outcome import Passed
from pytest_longca.subject import Subject

CASE = Case(mask=Causal(20, 20), batch=2, heads_q=4, heads_kv=2, head_dim=16)


def k_kept() -> Bind:
    """The first call's keys serve all calls of the shape."""
    kept: dict[torch.Size, torch.Tensor] = {}
    return wrong_inputs(lambda case, inputs: replace(inputs, k=kept.setdefault(inputs.k.shape, inputs.k)))


def last_query_lost_if_alone(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """With a batch of one, the last query's row is 0."""

    def after_forward(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        keeps = torch.arange(case.seqlen_q) < case.seqlen_q - (case.batch == 1)
        return out * keeps[:, None, None], lse

    return Hooked(inner.bind(case, inputs), after_forward=after_forward)


def dense_path_top_left(mask: Mask) -> Mask:
    """A single document with more keys than queries is aligned top-left: only the keys of the square are seen."""
    return CausalDocument((mask.seqlen_q, 0), (mask.seqlen_q, mask.seqlen_kv - mask.seqlen_q)) if isinstance(mask, Causal) else mask


def window_wraps(mask: Mask) -> Mask:
    """The window is kept in seven bits."""
    return replace(mask, window=mask.window % 128) if isinstance(mask, CausalSlidingWindow | FullSlidingWindow) else mask


def do_saturates(inner: Kernel, case: Case, inputs: Inputs) -> Call:
    """Elements of do stop at 6."""
    return Hooked(inner.bind(case, inputs), before_backward=lambda do: do.clamp(-6, 6))


def short_lse_lost(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of fewer than 16 keys the lse is 0."""
    return out, lse * (case.seqlen_kv >= 16) if lse is not None else None


SEEN: dict[str, tuple[Case, Bind | Fresh]] = {
    "with the batch reversed": (CASE, Fresh(k_kept)),
    "with the heads reversed": (replace(CASE, batch=1), Fresh(k_kept)),
    "with one batch element alone": (CASE, last_query_lost_if_alone),
    "with each document alone": (replace(CASE, mask=CausalDocument((4, 9), (4, 12))), other_mask(dense_path_top_left)),
    "with the documents reversed": (replace(CASE, mask=CausalDocument((4, 9, 7))), FAULTS["mask_cached_by_shape"].bind),
    "with a window as wide as both sequences": (replace(CASE, mask=Causal(64, 70)), other_mask(window_wraps)),
    "with do doubled": (CASE, do_saturates),
    "merged from two halves of the keys": (replace(CASE, mask=Full(5, 20)), wrong_results(short_lse_lost)),
}
"""For each relation a case, and a fault that gives the case itself what is due."""


def test_every_relation_has_its_fault() -> None:
    assert SEEN.keys() == RELATIONS.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_relation_agrees_with_a_right_kernel_and_sees_a_fault_that_the_case_hides(name: str) -> None:
    case, fault = SEEN[name]
    right, wrong = Subject(Naive(), case, CPU), Subject(make_faulty(Naive(), "faulty", fault), case, CPU)
    assert right.is_right and wrong.is_right
    related = list(RELATIONS[name](right))
    assert related and not any(right.wrong("metamorphic", result, name) for result in related)
    assert any(wrong.wrong("metamorphic", result, name) for result in RELATIONS[name](wrong))
    findings = verify(make_faulty(Naive(), "faulty", fault), case, CPU, ["metamorphic"]).findings
    assert findings and all(finding.check == "metamorphic" for finding in findings)
    assert any(finding.message.startswith(f"{name}: ") for finding in findings)


@pytest.mark.parametrize(
    "mask",
    [
        FullDocument((5, 15)),
        FullDocument((5, 0, 15), (9, 4, 7)),
        CausalDocument((1, 16, 3)),
        CausalDocument((6, 14), (14, 2)),
        BlockCausalDocument((7, 13), 4),
        PrefixLmDocument((8, 12), (8, 1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_documents_that_do_not_know_their_place_may_be_reversed(mask: Mask, dtype: str) -> None:
    subject = Subject(Naive(), replace(CASE, mask=mask, dtype=dtype), CPU)
    (result,) = RELATIONS["with the documents reversed"](subject)
    assert subject.wrong("metamorphic", result) == []


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("with the batch reversed", replace(CASE, batch=1)),
        ("with the heads reversed", replace(CASE, heads_q=2, heads_kv=1)),
        ("with one batch element alone", replace(CASE, batch=1)),
        ("with each document alone", CASE),
        ("with each document alone", replace(CASE, mask=PrefixLmDocument((8, 12), (8, 1)))),
        ("with the documents reversed", CASE),
        ("with the documents reversed", replace(CASE, mask=CausalDocument((7, 6, 7)))),
        ("with the documents reversed", replace(CASE, mask=SharedQuestion((5, 7, 8)))),
        ("with the documents reversed", replace(CASE, mask=CausalBlockwise((5, 7, 8)))),
        ("with a window as wide as both sequences", replace(CASE, mask=PrefixLmCausal(20, 20, 5))),
        ("with do doubled", replace(CASE, direction=Direction.FWD)),
        ("with do doubled", replace(CASE, dtype="fp16")),
        ("merged from two halves of the keys", CASE),
        ("merged from two halves of the keys", replace(CASE, mask=Full(5, 1))),
        ("merged from two halves of the keys", replace(CASE, mask=Full(5, 20), dtype="bf16")),
    ],
)
def test_a_relation_that_does_not_hold_for_a_case_is_silent(name: str, case: Case) -> None:
    assert list(RELATIONS[name](Subject(Naive(), case, CPU))) == []


def test_halves_of_a_kernel_without_lse_are_not_merged() -> None:
    case = replace(CASE, mask=Full(5, 20))
    assert list(RELATIONS["merged from two halves of the keys"](Subject(Sdpa(), case, CPU))) == []


@pytest.mark.parametrize("kernel", [Naive(), Sdpa()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", [Full(33, 65), Causal(65, 33), CausalDocument((16, 0, 49))], ids=repr)
def test_no_relation_accuses_a_correct_kernel(kernel: Kernel, dtype: str, mask: Mask) -> None:
    case = replace(CASE, mask=mask, dtype=dtype, layouts=(Layout.FUSED, Layout.BHSD, Layout.PADDED, Layout.OFFSET))
    assert verify(kernel, case, CPU, ["metamorphic"]).outcome == Passed()
