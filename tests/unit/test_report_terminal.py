"""The terminal summary: every outcome has its word, every reason is told, at any width and in any locale."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_longca.catalogue import MASKS
from pytest_longca.outcome import (
    OUTCOMES,
    Crashed,
    KnownWrong,
    NotInstalled,
    NotVerified,
    Outcome,
    OutOfMemory,
    Passed,
    TimedOut,
    Unsupported,
    Wrong,
)
from pytest_longca.report.markdown import markdown
from pytest_longca.report.matrix import FORWARD_ASKED, FORWARD_ONLY, MARKS, PARTIAL, WOULD_RUN, cell_kind, matrix
from pytest_longca.report.record import Record
from pytest_longca.report.terminal import masks_text, render
from pytest_longca.report.view import view

EVERY: dict[str, Outcome] = {
    "passed": Passed(),
    "wrong": Wrong("dk is 4.2 times its limit at batch 0, head 1, rows 3 to 9"),
    "known_wrong": KnownWrong("lse is off", "fa2-lse"),
    "unsupported": Unsupported("takes a block map, and causal has no such form"),
    "not_installed": NotInstalled("the package flash-attn is not installed", "pip install pytest-longca[fa2]"),
    "out_of_memory": OutOfMemory("wanted 80 GB"),
    "crashed": Crashed("signal 11"),
    "timed_out": TimedOut("after 120 s"),
    "not_verified": NotVerified("no case of this cell could run here"),
}


def record(kernel: str = "flex", mask: str = "causal", outcome: Outcome | None = None, **more: Any) -> Record:
    return Record(**{"stage": "examples", "kernel": kernel, "mask": mask, "outcome": (outcome or Passed()).to_json(), **more})


def cell(kernel: str = "flex", mask: str = "causal", **more: Any) -> list[Record]:
    """What a cell leaves that passed, all of it."""
    return [record(kernel, mask, stage=stage, **more) for stage in ("probes", "examples")]


def timing(kernel: str, ms: float, outcome: Outcome | None = None, **more: Any) -> Record:
    shape = {"batch": 1, "seqlen_q": 8192, "seqlen_kv": 8192, "heads_q": 64, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    values: dict[str, Any] = {"shape": {**shape, "dtype": "bf16"}, "case": "c", "direction": "fwd", "flop": 10**12, "samples_ms": [ms] * 3}
    return record(kernel, outcome=outcome, **{**values, "stage": "timing", **more})


def test_every_outcome_has_a_mark_of_its_own() -> None:
    besides = {FORWARD_ONLY, FORWARD_ASKED, PARTIAL, WOULD_RUN}
    assert set(MARKS) == {*OUTCOMES, *besides} == {*EVERY, *besides}
    assert len({mark.word for mark in MARKS.values()}) == len(MARKS)


@pytest.mark.parametrize("kind", EVERY)
def test_each_outcome_shows_its_word_meaning_and_reason(kind: str) -> None:
    text = render(cell(outcome=EVERY[kind]), width=200)
    assert re.search(rf"^causal +{re.escape(MARKS[kind].word)}$", text, re.MULTILINE)
    assert MARKS[kind].meaning in text
    if kind != "passed":
        assert str(EVERY[kind]).replace("causal has", "the mask has") in text


def test_a_cell_shows_the_gravest_of_its_outcomes() -> None:
    assert cell_kind([*cell(), record(outcome=EVERY["wrong"]), record(outcome=EVERY["unsupported"])]) == "wrong"
    assert cell_kind([record(), record(stage="probes", outcome=EVERY["unsupported"])]) == "passed"


@pytest.mark.parametrize(("stage", "lacks"), [("probes", "drawn example"), ("examples", "exact probe")])
def test_a_cell_in_which_only_probes_or_only_examples_ran_says_so(stage: str, lacks: str) -> None:
    ran, timed = record(stage=stage), timing("flex", 2.0, direction="fwd_bwd")
    assert cell_kind([ran]) == cell_kind([ran, timed]) == PARTIAL
    assert cell_kind(cell()) == cell_kind([*cell(), timed]) == "passed"
    assert cell_kind([timed]) == "passed", "a timing verifies the very case that it times"
    assert cell_kind([record(stage=stage, direction="fwd")]) == FORWARD_ASKED
    text = render([ran, *cell(mask="full"), record(mask="full_document", stage=stage)], width=100)
    assert f"flex: passed, but no {lacks} ran [causal, full_document]" in text
    assert re.search(r"^full +ok$", text, re.MULTILINE) and re.search(r"^causal +ok\*$", text, re.MULTILINE)
    assert "but no" not in render([ran, record(mask="causal", stage=stage, outcome=EVERY["wrong"])])


def test_a_cell_that_the_run_did_not_reach_is_not_empty() -> None:
    text = render([*cell("flex", "full"), *cell("naive", "causal")], width=80)
    assert re.search(r"^full +\? +ok$", text, re.MULTILINE) and re.search(r"^causal +ok +\?$", text, re.MULTILINE)
    assert re.search(r"^\? +nothing was judged$", text, re.MULTILINE)


def test_a_cell_without_any_backward_says_forward_only() -> None:
    assert cell_kind(cell(direction="fwd")) == FORWARD_ONLY
    assert cell_kind([*cell(direction="fwd"), record(direction="bwd")]) == "passed"


def test_a_cell_whose_backward_was_not_asked_for_says_so() -> None:
    case = "causal(seqlen_q=8,seqlen_kv=8)/b1/h1:1/d64/bf16"
    asked = timing("flex", 2.0, case=f"{case}/fwd/s0")
    refused = record(stage="timing", outcome=EVERY["unsupported"], case=f"{case}/bwd/s0")
    assert cell_kind([asked]) == FORWARD_ASKED
    assert cell_kind([asked, *cell(direction="fwd")]) == FORWARD_ONLY, "no drawn case had a backward"
    assert cell_kind([asked, refused]) == FORWARD_ONLY
    late = record(stage="timing", outcome=NotVerified("outside the budget"), case=f"{case}/bwd/s0")
    assert cell_kind([asked, late]) == PARTIAL


def test_a_cell_that_passed_and_could_not_be_timed_says_so_and_why() -> None:
    missed = record(outcome=NotVerified("interpreted: not verified on hardware"), stage="timing")
    assert cell_kind([*cell(), missed]) == PARTIAL
    assert cell_kind([missed]) == "not_verified"
    assert cell_kind([record(), record(outcome=EVERY["not_verified"])]) == "not_verified", "examples that did not run are no pass"
    text = render([*cell(), missed], width=100)
    assert "flex: passed, not timed: interpreted: not verified on hardware [causal]" in text
    assert text.endswith("ok*    passed what ran: what did not is told")
    assert "flex: not verified: interpreted" in render([missed])
    failed = record(outcome=EVERY["wrong"])
    assert "flex: not verified: interpreted" in render([record(), missed, failed]), "what is wrong besides has not passed"


def test_a_reason_that_holds_for_many_masks_is_told_once() -> None:
    records = [record(mask=mask, outcome=Unsupported(f"takes a block map, and {mask} has no such form")) for mask in MASKS]
    (reason,) = matrix(records).reasons
    assert reason.masks == tuple(MASKS)
    assert render(records, width=300).count("takes a block map") == 1


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        (MASKS, "all 14 masks"),
        (list(MASKS)[:6], ", ".join(list(MASKS)[:6])),
        (list(MASKS)[:-2], "all but uniform_block, variable_block"),
        (list(MASKS)[:8], "full, causal, full_sliding_window, causal_sliding_window, full_document, causal_document and 2 more"),
    ],
)
def test_masks_are_told_in_the_fewest_words(masks: Iterable[str], says: str) -> None:
    assert masks_text(list(masks), list(MASKS)) == says
    assert masks_text(["causal"], ["causal"]) == "causal"


def test_a_failure_shows_the_line_that_replays_it_unbroken() -> None:
    replay = "pytest --longca-kernels=flex --longca-case='causal(seqlen_q=16,seqlen_kv=20)/b2/h4:2/d64/bf16/fwd_bwd/s0'"
    assert f"  {replay}" in render([record(outcome=EVERY["wrong"], replay=replay)], width=40).splitlines()


@given(width=st.integers(24, 200), num_kernels=st.integers(1, 14), data=st.data())
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_lost(width: int, num_kernels: int, data: st.DataObject) -> None:
    kernels = [f"kernel_{number}" for number in range(num_kernels)]
    outcomes = st.sampled_from(list(EVERY.values()))
    records = [record(kernel, mask, data.draw(outcomes)) for kernel in kernels for mask in ("causal", "full_document")]
    lines = render(records, width=width).splitlines()
    assert max(map(len, lines)) <= max(width, 48), "48: the longest legend line and the longest word"
    rows = "\n".join(line for line in lines if line.startswith(("causal ", "full_document ")))
    assert len(re.findall(r"\S+", rows)) == len(records) + len(rows.splitlines())


def test_colours_change_nothing_but_the_colour() -> None:
    records = [record(kernel, mask, outcome) for kernel in ("a", "b") for mask, outcome in EVERY.items()]
    coloured = render(records, width=80, color=True)
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == render(records, width=80)


def test_summary_is_ascii_so_that_any_locale_can_print_it() -> None:
    assert render([record(outcome=outcome, mask=mask) for mask, outcome in EVERY.items()] + [timing("flex", 2.0)]).isascii()


def test_fastest_kernel_comes_with_its_figures_and_the_runner_up() -> None:
    text = render([timing("sdpa", 4.0), timing("flex", 2.0, peaks={"matmul_tflop_per_s": 800.0})], width=200)
    assert "causal 8192 64:8 d128 bf16 fwd: flex 2 ms, 500 TFLOP/s (62% of peak), 2.00x the speed of sdpa" in text


def test_kernels_whose_samples_overlap_are_tied_and_the_next_slower_one_is_told_too() -> None:
    near, apart = timing("sdpa", 2.0, samples_ms=[2.05, 2.1, 2.15]), timing("fa2", 4.0)
    text = render([near, timing("flex", 2.0, samples_ms=[1.9, 2.0, 2.1]), apart], width=200)
    assert "fwd: flex 2 ms, 500 TFLOP/s, tied with sdpa, 2.00x the speed of fa2" in text
    assert "tied" not in render([timing("flex", 2.0), apart], width=200)


def test_a_kernels_time_is_the_median_of_its_processes_medians() -> None:
    processes = [timing("flex", ms, process=f"p{ms}") for ms in (2.0, 4.0, 3.0, 9.0)]
    assert "fwd: flex 3.5 ms, 286 TFLOP/s" in render(processes, width=200)
    fast_once = [timing("sdpa", ms, process=f"p{ms}") for ms in (1.0, 5.0, 6.0)]
    assert "fwd: flex 3.5 ms" in render([*processes, *fast_once], width=200)


def test_a_speed_below_one_tflop_is_told_in_gflop() -> None:
    assert "fwd: flex 2 ms, 5 GFLOP/s" in render([timing("flex", 2.0, flop=10**7)], width=200)


def test_a_kernel_that_is_wrong_on_the_mask_is_never_the_fastest() -> None:
    text = render([timing("sdpa", 4.0), timing("flex", 2.0), record("flex", outcome=EVERY["wrong"])], width=200)
    assert "fwd: sdpa 4 ms" in text
    assert "flex 2 ms" not in text


def test_no_records_make_a_summary_too() -> None:
    assert render([]) == "no results"


def test_a_timing_whose_samples_lie_far_apart_is_marked_as_noisy() -> None:
    """A quarter of the median is what p20 and p80 may be apart."""
    text = render([timing("flex", 2.0, samples_ms=[1.8, 1.9, 2.0, 2.5, 2.6])], width=200)
    assert "flex 2 ms, 500 TFLOP/s, noisy (p20 to p80: 1.9 to 2.5 ms)" in text
    assert "noisy" not in render([timing("flex", 2.0, samples_ms=[1.8, 1.9, 2.0, 2.3, 2.6])], width=200)


def test_what_did_not_run_of_a_cell_and_noise_are_told_in_the_markdown_and_the_page() -> None:
    shape = {"batch": 1, "seqlen_q": 8, "seqlen_kv": 8, "heads_q": 1, "heads_kv": 1, "head_dim": 64, "head_dim_v": 64, "dtype": "fp32"}
    about: dict[str, Any] = {"kernel": "k", "mask": "m", "outcome": Passed().to_json()}
    timing = Record(stage="timing", **about, shape=shape, direction="bwd", flop=10**9, samples_ms=[1.0, 2.0, 3.0, 4.0, 5.0])
    probed = Record(stage="probes", **about)
    text = markdown([probed, timing])
    assert "| m | ok\\* |" in text and "passed, but no drawn example ran" in text
    assert "| noisy (p20 to p80: 2 to 4 ms) |" in text
    assert view([probed, timing])["cells"] == [["k", "m", "partial", "passed, but no drawn example ran"]]
    assert view([timing])["cells"] == [["k", "m", "passed", ""]]
