"""The end of a run: what the gate's policies let pass, what is not green, and what is never written."""

from pathlib import Path
from typing import Any

import pytest

from pytest_longca.closing import check_paths, close
from pytest_longca.errors import InvalidArgument
from pytest_longca.options import Options, parse
from pytest_longca.outcome import NotVerified, Outcome, Passed
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records, write_records


def options(**values: str) -> Options:
    return parse(lambda option: values.get(option.attribute))


def run(processes: int, ms: float = 1.0, outcome: Outcome | None = None, **fields: Any) -> list[Record]:
    about = {"stage": "timing", "kernel": "k", "mask": "m", "case": "c", "outcome": (outcome or Passed()).to_json()} | fields
    return [Record(**about, process=f"p{i}", samples_ms=[ms] * 30) for i in range(processes)]  # type: ignore[arg-type]  # of one record


@pytest.fixture
def baseline(tmp_path: Path) -> str:
    """A baseline of 1 ms."""
    write_records(tmp_path / "baseline.jsonl", run(5))
    return str(tmp_path / "baseline.jsonl")


@pytest.mark.parametrize(
    ("policy", "exit_code"),
    [({}, 1), ({"fail_slower": "off"}, 0), ({"allow": "slower"}, 0), ({"fail_slower": "30%"}, 0), ({"fail_slower": "10%"}, 1)],
)
def test_ten_percent_slower_fails_as_the_policy_says(baseline: str, policy: dict[str, str], exit_code: int) -> None:
    assert close(run(2, 1.1), options(baseline=baseline, **policy), is_complete=True).exit_code == exit_code


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (run(2, device="NVIDIA H200"), "the baseline's device is cpu, this is NVIDIA H200"),
        (run(2, case="d"), "no case in common"),
        ([], "no results, so nothing was compared and no baseline was written"),
    ],
    ids=["other device", "no case in common", "nothing"],
)
def test_what_cannot_be_compared_is_not_green_and_leaves_the_baseline_alone(baseline: str, new: list[Record], says: str) -> None:
    before = Path(baseline).read_bytes()
    closing = close(new, options(baseline=baseline), is_complete=True)
    assert closing.exit_code == 2
    assert says in "\n".join(closing.lines)
    assert Path(baseline).read_bytes() == before


@pytest.mark.parametrize(
    ("records", "is_complete", "says"),
    [
        (run(5), False, "the run was cut short"),
        ([*run(5), *run(1, case="d", outcome=NotVerified("no time", is_postponed=True))], True, "1 item was outside the budget"),
    ],
)
def test_an_incomplete_run_makes_no_baseline(tmp_path: Path, records: list[Record], is_complete: bool, says: str) -> None:
    path = tmp_path / "baseline.jsonl"
    closing = close(records, options(baseline=str(path)), is_complete)
    assert closing.exit_code == 2
    assert says in closing.lines[0]
    assert not path.exists()


def test_a_page_that_cannot_be_written_is_told_and_is_not_green(tmp_path: Path) -> None:
    closing = close(run(1), options(html=str(tmp_path / "no" / "page.html"), md=str(tmp_path / "summary.md")), is_complete=True)
    assert closing.exit_code == 2
    assert "page.html: cannot be written" in closing.lines[0]
    assert (tmp_path / "summary.md").read_text().startswith("# Attention kernels")


@pytest.mark.parametrize("name", ["html", "md", "baseline"])
def test_a_folder_that_does_not_exist_is_found_before_anything_runs(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--longca-{name}: the folder of /no/such/file does not exist"):
        check_paths(options(**{name: "/no/such/file"}))


@pytest.mark.parametrize("name", ["json", "resume", "html", "md"])
def test_a_file_that_the_run_writes_is_not_its_baseline(baseline: str, tmp_path: Path, name: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    hard = tmp_path / "hard.jsonl"
    hard.hardlink_to(baseline)
    for other in (baseline, str(link / "baseline.jsonl"), str(hard)):
        with pytest.raises(InvalidArgument, match=f"--longca-{name}: {other} is the baseline, which is only read"):
            check_paths(options(baseline=baseline, **{name: other}))
    with pytest.raises(InvalidArgument, match="is the baseline"):
        check_paths(options(baseline=str(tmp_path / "first.jsonl"), **{name: str(link / "first.jsonl")}))
    check_paths(options(baseline=baseline, **{name: str(tmp_path / "another")}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "baseline.jsonl: holds no records"),
        (b'{"schema": 1, "kern', "baseline.jsonl, line 1: not a record"),
        (b"\xff", "baseline.jsonl: cannot be read"),
        (None, r"baseline.jsonl: cannot be read \(Is a directory\); name a file"),
    ],
    ids=["empty", "truncated", "no text", "folder"],
)
def test_a_baseline_that_is_none_is_found_before_anything_runs(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "baseline.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"^--longca-baseline: .*{says}"):
        check_paths(options(baseline=str(path)))


def test_a_file_of_records_forgets_postponed_items_that_were_run_later(tmp_path: Path) -> None:
    postponed = NotVerified("no time", is_postponed=True)
    later, never = run(1, outcome=postponed), run(1, outcome=postponed, case="d")
    write_records(tmp_path / "records.jsonl", [*later, *never, *run(1)])
    assert read_records(tmp_path / "records.jsonl") == [*never, *run(1)]
