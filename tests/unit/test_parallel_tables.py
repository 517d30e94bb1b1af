"""The documentation's tables are the records: written by the package, and by nobody else."""

from pathlib import Path

import pytest

from pytest_longca.outcome import NotVerified, Passed
from pytest_longca.parallel.mechanisms import MECHANISMS
from pytest_longca.parallel.tables import main, markdown, update
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records

DOCS = Path(__file__).parents[2] / "docs"
CASE = "full(seqlen_q=16384,seqlen_kv=16384)/b1/h64:8/d128/bf16/fwd_bwd/s0"
FACTS = {"tokens": 8192, "mesh": "1x2x1", "layout": "zigzag", "groups": 1, "date": "2026-01-02"}


def record(mechanism: str, direction: str, rate: float, **facts: object) -> Record:
    about = {"stage": "parallel", "kernel": "fa2", "mask": "full", "outcome": Passed().to_json(), "case": CASE, "world_size": 2}
    state = {"sm_mhz": 1500.0, "power_capped": direction == "bwd"}
    found = {**FACTS, "tflop_per_s": rate, "of_alone": rate / 400, **facts}
    return Record(
        **about, mechanism=mechanism, direction=direction, samples_ms=[10.0, 12.0, 11.0], device="A GPU", clocks=state, facts=found
    )


def test_table_has_rates_shares_exposed_time_and_the_models_error() -> None:
    passes = {direction: {f"exposed_{direction}_ms": 1.1} for direction in ("fwd", "bwd")}
    found = [record("ring_p2p", direction, rate, **passes[direction]) for direction, rate in (("fwd", 380.0), ("bwd", 300.0))]
    text = markdown(found)
    row = next(line for line in text.splitlines() if "ring_p2p" in line)
    assert row.startswith("| 8,192 | full | fa2 | ring_p2p zigzag | 380 (95.0%) | 300 (75.0%) | 10.0% / 10.0% |  | ")
    assert text.startswith(
        "2 x A GPU, 2026-01-02: SM clocks of 1500 to 1500 MHz, power at its cap in 1 of 2 figures, medians of 3 samples."
    )


def test_simulated_ranks_are_not_taken_for_as_many_gpus() -> None:
    found = [record("alone", "fwd", 400.0), record("ring_p2p", "fwd", 380.0, communication="off")]
    assert markdown(found).startswith("Ranks of a world of 2 on one A GPU, 2026-01-02: ")


def test_what_was_not_measured_is_said_with_its_reason() -> None:
    outcome = NotVerified("the time was spent")
    about = {"stage": "parallel", "kernel": "fa2", "mask": "causal", "outcome": outcome.to_json(), "reason": str(outcome)}
    absent = Record(**about, mechanism="usp", facts={"tokens": 8192})
    assert "Not measured (not verified: the time was spent): 8,192 causal fa2 usp." in markdown([record("alone", "fwd", 400.0), absent])


def test_other_text_of_a_page_is_left_alone() -> None:
    page = "before\n<!-- records: results/context-parallel-2xh200.jsonl -->\nold\n<!-- end of records -->\nafter\n"
    found = update(page, DOCS)
    assert found.startswith("before\n<!-- records") and found.endswith("<!-- end of records -->\nafter\n") and "\nold\n" not in found


def test_documented_tables_are_those_of_the_records() -> None:
    page = (DOCS / "context-parallel.md").read_text()
    assert update(page, DOCS) == page, "write them: python -m pytest_longca.parallel.tables --update docs/context-parallel.md"


def test_shares_that_the_page_judges_are_those_of_the_records() -> None:
    """The table of what was wanted of simulated ranks: every figure, and bold exactly where it is short."""
    page = (DOCS / "context-parallel.md").read_text()
    found = {
        (record.mask, record.kernel, record.mechanism, record.direction): 100 * record.facts["of_alone"]
        for record in read_records(DOCS / "results" / "context-parallel-simulated-h200.jsonl")
    }
    head, _, *lines = page.split("| mask, kernel | wanted |")[1].split("\n\n")[0].splitlines()
    mechanisms = [name.strip(" `") for name in head.strip("|").split("|")]
    assert mechanisms == list(MECHANISMS) and len(lines) == 4
    for line in lines:
        what, wanted, *cells = (part.strip() for part in line.strip("|").split("|"))
        mask, kernel = what.replace("`", "").split(", ")
        for mechanism, cell in zip(mechanisms, cells, strict=True):
            shares = [found[mask, kernel, mechanism, direction] for direction in ("fwd", "bwd")]
            texts = [f"**{share:.1f}**" if share < float(wanted.removesuffix(" %")) else f"{share:.1f}" for share in shares]
            assert cell == " / ".join(texts)


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DOCS / "results" / "context-parallel-2xh200.jsonl")]) == 0
    assert "| 32,768 | full | fa2 | yunchang ulysses |" in capsys.readouterr().out


def test_command_says_what_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no/such.jsonl"]) == 2
    assert "no/such.jsonl: cannot be read" in capsys.readouterr().err
