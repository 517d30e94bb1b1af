"""A sweep in slices, on a clock that costs nothing: nothing is lost or run twice, and the paper's core fits into two of nine minutes."""

import itertools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_longca.budget import Budget, arrange, key_of_item, split
from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import KERNELS, MASK_GROUPS, MASKS, load
from pytest_longca.machine import H200
from pytest_longca.outcome import Passed
from pytest_longca.presets import PRESETS
from pytest_longca.report.record import Record

K = 1024
DENSE = {"flex": 420, "fa4": 600, "cudnn_flex": 600, "flashmask": 500, "fa2": 340, "fa3": 640, "cudnn": 560, "sdpa_flash": 330}
"""TFLOP/s of the dense kernels, about, as they were seen on an H200."""
REFERENCE_PAIRS_PER_S = 8e9
"""Visible pairs that the reference does in a second: 4 s for the causal mask of 32K tokens and 64 heads."""
OWN_S = 0.15
"""The harness in each item: inputs, judging, profiling, recording."""
CALLS = 13
"""Calls of a timing beside its samples, in calls of that pass: verified twice, first and second call, launches, profile."""


def item(kernel: str, case: str) -> Any:
    params = {"longca_kernel_name": kernel, "longca_case_id": case, "longca_process": 0}
    return SimpleNamespace(originalname="test_timing", nodeid="longca/x", callspec=SimpleNamespace(params=params))


def run_slice(items: list[Any], cost: Any, seconds: float, done: list[Record]) -> float:
    """Run what `done` does not hold, until the time is over: an item that is still running then is ended. The seconds that it took."""
    clock = SimpleNamespace(now=0.0)
    budget = Budget(seconds, lambda: clock.now)
    for one in arrange(split(items, done)[0]):
        outcome, key = budget.begin(), key_of_item(one)
        if outcome is None:
            end = clock.now + budget.left_s
            clock.now += cost(key.kernel, key.case)
            outcome = Passed() if clock.now <= end else budget.postponed()
            clock.now = min(clock.now, end)
        done.append(Record(stage="timing", kernel=key.kernel, mask=key.mask, case=key.case, outcome=outcome.to_json()))
    return clock.now


@given(st.lists(st.floats(0.01, 90.0), min_size=1, max_size=40))
def test_slices_lose_nothing_run_nothing_twice_and_end_in_time(costs: list[float]) -> None:
    items = [item(f"k{number % 3}", f"full(s{number})") for number in range(len(costs))]
    by_item = {(f"k{number % 3}", f"full(s{number})"): cost for number, cost in enumerate(costs)}
    done: list[Record] = []
    for _ in costs:  # each slice gets at least one item done, as none takes longer than a slice
        if split(items, done)[0]:
            assert run_slice(items, lambda kernel, case: by_item[kernel, case], 100.0, done) <= 100.0
    passed = [(record.kernel, record.case) for record in done if record.kind == "passed"]
    assert sorted(passed) == sorted(by_item)


def test_the_core_of_paper_dense_fits_into_two_slices_and_computes_each_reference_once() -> None:
    least = PRESETS["paper-dense"].min_samples
    cases = {case.id: case for case in core()}
    items = [item(name, case.id) for case, name in itertools.product(cases.values(), DENSE) if takes(name, case)]
    references: list[Case] = []
    own, total = 0.0, 0.0

    def cost(kernel: str, case_id: str) -> float:
        nonlocal own, total
        case = cases[case_id]
        call_s = case.flop() / DENSE[kernel] / 1e12
        seconds = call_s * (CALLS + max(least, min(300, 0.3 / call_s)))
        if not references or references[-1].mask != case.mask:  # kept: the newest case's, before and after its timing
            references.append(case)
            seconds += 2 * case.area / REFERENCE_PAIRS_PER_S
        own, total = own + OWN_S, total + seconds + OWN_S
        return seconds + OWN_S

    done: list[Record] = []
    for _ in range(2):
        run_slice(items, cost, 540.0, done)
    assert not split(items, done)[0], "two slices of nine minutes"
    assert len(references) <= 12 * 4 + 1, "once for each mask and length, and once more where the second slice begins"
    assert own < 0.15 * total


def core() -> list[Case]:
    """1K, 8K, 32K and 48K tokens of the 12 static masks, heads 64:8, both passes, the backward first as the suite has them."""
    masks = [load(MASKS[name]).default(seqlen) for name in MASK_GROUPS["static"] for seqlen in (K, 8 * K, 32 * K, 48 * K)]
    sizes: dict[str, Any] = {"heads_q": 64, "heads_kv": 8, "head_dim": 128, "dtype": "bf16"}
    return [Case(mask=mask, direction=direction, **sizes) for mask in masks for direction in (Direction.BWD, Direction.FWD)]


def takes(kernel: str, case: Case) -> bool:
    return load(KERNELS[kernel])().supports(case, H200) is None
