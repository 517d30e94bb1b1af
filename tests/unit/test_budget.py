"""The clock of a session with a budget, and which items a file of records has already."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_longca.budget import RESERVE, Budget, arrange, check_device, split
from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import Crashed, NotInstalled, NotVerified, Outcome, Passed, Unsupported
from pytest_longca.report.record import Record


@given(st.floats(1.0, 1000.0), st.lists(st.floats(0.01, 50.0), max_size=200))
def test_items_of_known_length_end_in_time_and_one_that_would_not_fit_does_not_start(seconds: float, lengths: list[float]) -> None:
    clock = SimpleNamespace(now=0.0)
    budget, longest = Budget(seconds, lambda: clock.now), 0.0
    for length in sorted(lengths, reverse=True):  # none is longer than one that was seen, but the first
        if outcome := budget.begin():
            assert outcome.is_postponed
            assert clock.now + longest >= seconds * (1 - RESERVE)
            return
        assert clock.now < seconds
        clock.now += length
        longest = longest or length
        budget.end()
        assert clock.now <= seconds or clock.now == longest  # only the very first item can be longer than the budget


def test_time_between_items_counts_and_the_last_item_of_a_kind_ends_the_run() -> None:
    clock = SimpleNamespace(now=0.0)
    budget = Budget(100.0, lambda: clock.now)
    assert budget.begin() is None
    clock.now = 30.0
    assert budget.begin() is None, "67 s are left, and the last item took 30"
    clock.now = 80.0
    outcome = budget.begin()
    assert outcome == NotVerified("outside --longca-budget=100s; --longca-resume goes on with it", is_postponed=True)


def test_what_the_budget_does_not_pay_for_is_given_back() -> None:
    clock = SimpleNamespace(now=0.0)
    budget = Budget(100.0, lambda: clock.now)
    clock.now = 500.0
    budget.add(500.0)
    assert budget.left_s == 100.0 * (1 - RESERVE) and budget.begin() is None


def item(test: str, kernel: str = "k", case: str = "", mask: str = "", process: int = 0, nodeid: str = "longca/x") -> Any:
    params = {"longca_kernel_name": kernel}
    params |= {"longca_case_id": case, "longca_process": process} if case else {"longca_mask_name": mask}
    return SimpleNamespace(originalname=test, nodeid=nodeid, callspec=SimpleNamespace(params=params))


def timing(kernel: str, case: str, process: int = 0) -> Any:
    return item("test_timing", kernel, case, process=process)


def test_timings_go_round_masks_and_kernels_before_any_cell_has_its_second_case() -> None:
    cases = [timing(kernel, f"{mask}(s{n})") for mask in ("full", "causal") for n in (1, 2) for kernel in ("a", "b")]
    shown = [(one.callspec.params["longca_kernel_name"], one.callspec.params["longca_case_id"]) for one in arrange(cases)]
    first = [("a", "full(s1)"), ("b", "full(s1)"), ("a", "causal(s1)"), ("b", "causal(s1)")]
    assert shown == [*first, *((kernel, case.replace("1", "2")) for kernel, case in first)]


def test_all_passes_of_a_case_come_together_so_that_they_share_its_reference() -> None:
    cases = [timing("a", f"{mask}(s{n})/fp32/{way}/s0") for mask in ("full", "causal") for n in (1, 2) for way in ("bwd", "fwd")]
    shown = [one.callspec.params["longca_case_id"] for one in arrange(cases)]
    assert shown == [f"{mask}(s{n})/fp32/{way}/s0" for n in (1, 2) for mask in ("full", "causal") for way in ("bwd", "fwd")]


def test_probes_come_first_then_timings_process_by_process_then_examples_and_strangers() -> None:
    probes, examples = item("test_probes", mask="full"), item("test_examples", mask="full")
    stranger = SimpleNamespace(originalname="test_timing", nodeid="mine/test_x.py")
    late, early = timing("k", "full(s1)", process=1), timing("k", "full(s2)")
    assert arrange([stranger, late, examples, early, probes]) == [probes, early, late, examples, stranger]


def record(outcome: Outcome, stage: str = "timing", case: str | None = "full(s1)", device: str = "cpu") -> Record:
    return Record(stage=stage, kernel="k", mask="full", case=case, outcome=outcome.to_json(), device=device, samples_ms=[1.0])


@pytest.mark.parametrize(
    ("outcome", "is_done"),
    [
        (Passed(), True),
        (Unsupported("no"), True),
        (Crashed("boom"), True),
        (NotVerified("no time", is_postponed=True), False),
        (NotInstalled("no", "pip"), False),
    ],
    ids=str,
)
def test_an_item_with_a_final_outcome_is_not_run_again(outcome: Outcome, is_done: bool) -> None:
    mine = timing("k", "full(s1)")
    assert split([mine], [record(outcome)]) == (([], [mine]) if is_done else ([mine], []))


def test_each_process_of_a_case_needs_a_record_of_its_own() -> None:
    items = [timing("k", "full(s1)", process) for process in range(5)]
    assert split(items, [record(Passed())] * 3) == (items[3:], items[:3])


def test_a_cell_is_done_whatever_case_its_record_names_and_other_stages_are_not() -> None:
    examples, probes = item("test_examples", mask="full"), item("test_probes", mask="full")
    assert split([examples, probes], [record(Crashed("boom"), stage="examples", case="full(s9)")]) == ([probes], [examples])


def test_timings_of_another_device_are_not_resumed() -> None:
    check_device([record(Passed())], "cpu")
    with pytest.raises(InvalidArgument, match="its timings are from NVIDIA H200, and this is cpu"):
        check_device([record(Passed(), device="NVIDIA H200")], "cpu")
