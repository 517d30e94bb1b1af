"""`python -m pytest_longca`: exit statuses, files, and errors that say what to do."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_longca.__main__ import main
from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.ids import format_case
from pytest_longca.mask import Mask
from pytest_longca.outcome import Passed, Wrong
from pytest_longca.report.figures import tied
from pytest_longca.report.recommend import interpolate, make_case, recommend, render_advice
from pytest_longca.report.record import Record, shape_of
from pytest_longca.report.store import read_records, write_records


def case_of(seqlen: int, mask: str = "causal_document") -> Case:
    built: Mask = load(MASKS[mask]).default(seqlen)
    return Case(mask=built, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16", direction=Direction.FWD)


def document_mask(lens: tuple[int, ...]) -> Mask:
    mask: Mask = load(MASKS["causal_document"])(lens)
    return mask


def timing(kernel: str, seqlen: int, rate: float, process: int = 0, mask: str = "causal_document", **more: Any) -> Record:
    """A kernel that reaches `rate` TFLOP/s."""
    case = case_of(seqlen, mask)
    values: dict[str, Any] = {
        "outcome": Passed().to_json(),
        "case": format_case(case),
        "shape": shape_of(case),
        "direction": "fwd",
        "samples_ms": [case.flop() / rate / 1e9] * 30,
        "process": f"p{process}",
        "flop": case.flop(),
        "area": case.area,
        "peak_bytes": 2**30,
    }
    return Record(**{"stage": "timing", "kernel": kernel, "mask": mask, **values, **more})


def write(path: Path, records: list[Record]) -> str:
    write_records(path, records)
    return str(path)


@pytest.fixture
def baseline(tmp_path: Path) -> str:
    return write(tmp_path / "old.jsonl", [timing("flex", 4096, 400.0, process) for process in range(5)])


def new(tmp_path: Path, rate: float) -> str:
    return write(tmp_path / "new.jsonl", [timing("flex", 4096, rate, process) for process in range(2)])


def test_compare_ends_with_0_where_nothing_became_worse(baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", baseline, new(tmp_path, 400.0)]) == 0
    assert "no regression: 1 case compared" in capsys.readouterr().out


def test_compare_says_how_many_cases_were_too_noisy_to_judge(baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = write(tmp_path / "noisy.jsonl", [timing("flex", 4096, rate, process) for process, rate in enumerate((400.0, 300.0))])
    assert main(["compare", baseline, noisy]) == 2
    assert "NOTHING GATED: 0 of 1 timings (too-noisy): give a limit" in capsys.readouterr().out
    assert main(["compare", baseline, noisy, "--allow", "too-noisy"]) == 0
    assert "no regression: 1 case compared, 1 of them not in full (too-noisy)" in capsys.readouterr().out


def test_a_reader_that_stops_reading_leaves_no_traceback(baseline: str) -> None:
    command = f"{sys.executable} -m pytest_longca compare {baseline} {baseline} | true; echo ended with ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() == "ended with 141"


def test_compare_ends_with_1_and_says_what_became_slower(baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", baseline, new(tmp_path, 300.0)]) == 1
    out = capsys.readouterr().out
    assert "! slower (time): flex causal_document(" in out
    assert "+33.3% where 5% must be caught" in out
    assert out.rstrip().endswith("REGRESSED (slower): 1 case compared")


def test_compare_takes_limits_and_policy(baseline: str, tmp_path: Path) -> None:
    slower = new(tmp_path, 300.0)
    assert main(["compare", baseline, slower, "--fail-slower", "off"]) == 0
    assert main(["compare", baseline, slower, "--fail-slower", "80%"]) == 0
    assert main(["compare", baseline, slower, "--allow", "slower,added"]) == 0


def test_compare_names_its_limits_and_the_options_that_the_run_itself_had(
    baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "pytest '--longca-fail-slower=10%' --longca-anchor sdpa --longca-fail-memory=5%"
    slower = write(tmp_path / "new.jsonl", [timing("flex", 4096, 380.0, process, command=command) for process in range(2)])
    assert main(["compare", baseline, slower]) == 1
    out = capsys.readouterr().out
    assert "limits: slower 5%, memory 5%, error 25%; times are absolute, without an anchor" in out
    assert "the run itself was gated with other options; to repeat them: --fail-slower 10% --anchor sdpa\n" in out
    assert main(["compare", baseline, slower, "--fail-slower", "10%", "--anchor", "sdpa"]) == 2
    out = capsys.readouterr().out
    assert "limits: slower 10%, memory 5%, error 25%; changes of time are of ratios to sdpa in the same run" in out
    assert "to repeat" not in out


def test_compare_writes_the_page_and_the_summary(baseline: str, tmp_path: Path) -> None:
    page, summary = tmp_path / "page.html", tmp_path / "page.md"
    assert main(["compare", baseline, new(tmp_path, 300.0), "--html", str(page), "--md", str(summary)]) == 1
    assert "REGRESSED" in page.read_text()
    assert "REGRESSED" in summary.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "GOOD", "old.jsonl: holds no records"),
        ('{"schema": 1, "kern', "GOOD", "old.jsonl, line 1: not a record"),
        ("SCHEMA", "GOOD", "old.jsonl, line 1: a record of schema 0"),
        ("MIXED", "GOOD", "the baseline mixes records of several devices (A, B)"),
        ("GOOD", "OTHER", "no case in common"),
        (None, "GOOD", "old.jsonl: cannot be read"),
    ],
)
def test_files_that_cannot_be_compared_end_with_2_and_are_left_alone(
    old: str | None, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = timing("flex", 4096, 400.0).to_line()
    texts = {
        "GOOD": good,
        "SCHEMA": good.replace('"schema":1', '"schema":0'),
        "MIXED": "\n".join(timing("flex", 4096, 400.0, device=device).to_line() for device in "AB"),
        "OTHER": timing("flex", 1024, 400.0).to_line(),
    }
    paths = {}
    for name, text in (("old.jsonl", old), ("new.jsonl", new)):
        paths[name] = tmp_path / name
        if text is not None:
            paths[name].write_text(texts.get(text, text))
    page = tmp_path / "page.html"
    page.write_text("the page of last week")
    assert main(["compare", *map(str, paths.values()), "--html", str(page)]) == 2
    assert message in capsys.readouterr().err
    assert page.read_text() == "the page of last week"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "a", "b", "--fail-slower", "5"], "'5' is not a percentage: write one such as 5%"),
        (["compare", "a", "b", "--allow", "slow"], "unknown verdict 'slow': did you mean 'slower'"),
        (["recommend", "a", "--heads", "64"], "write query heads, a colon, key/value heads"),
        (["recommend", "a", "--pass", "forward"], "invalid choice: 'forward'"),
        ([], "the following arguments are required: compare|report|recommend"),
    ],
)
def test_a_bad_option_is_a_usage_error_that_says_what_to_write(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_report_joins_files_and_compares_with_a_baseline(baseline: str, tmp_path: Path) -> None:
    page, summary = tmp_path / "page.html", tmp_path / "page.md"
    more = write(tmp_path / "more.jsonl", [timing("sdpa", 4096, 100.0)])
    assert main(["report", new(tmp_path, 300.0), more, "--baseline", baseline, "--html", str(page), "--md", str(summary)]) == 0
    assert "3 records" in page.read_text()
    assert "sdpa" in summary.read_text()


def test_report_into_a_folder_that_is_not_there_ends_with_2(baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", baseline, "--html", str(tmp_path / "absent" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_module_runs_and_needs_no_torch_to_compare(baseline: str, tmp_path: Path) -> None:
    code = "import sys; from pytest_longca.__main__ import main; sys.exit(main(sys.argv[1:]) + 8 * ('torch' in sys.modules))"
    command = [sys.executable, "-c", code, "compare", baseline, new(tmp_path, 300.0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr


RATES = {("fa2", 1024): 100.0, ("fa2", 4096): 300.0, ("flex", 1024): 250.0, ("flex", 4096): 150.0}
RECORDS = [timing(kernel, seqlen, rate) for (kernel, seqlen), rate in RATES.items()]


def test_advice_is_the_fastest_at_the_users_own_length() -> None:
    assert [advice.kernel for advice in recommend(RECORDS, case_of(1024))] == ["flex", "fa2"]
    fa2, flex = recommend(RECORDS, case_of(4096))
    assert (fa2.kernel, fa2.rate, flex.rate) == ("fa2", 300.0, 150.0)
    assert fa2.expected_ms == pytest.approx(case_of(4096).flop() / 300 / 1e9)
    assert fa2.points == ((1024, 100.0), (4096, 300.0))


def test_advice_never_names_a_kernel_that_is_wrong_on_the_mask() -> None:
    wrong = Record(stage="examples", kernel="fa2", mask="causal_document", outcome=Wrong("off").to_json())
    assert [advice.kernel for advice in recommend([*RECORDS, wrong], case_of(4096))] == ["flex"]


def test_advice_from_timings_beside_other_tests_says_that_they_are_rough() -> None:
    rough = [dataclasses.replace(record, facts={"shared_machine": True}) for record in RECORDS]
    assert "its timings are rough: other tests ran beside them" in recommend(rough, case_of(4096))[0].caveats
    assert recommend(RECORDS, case_of(4096))[0].caveats == ()


def test_advice_takes_the_median_of_the_processes_medians() -> None:
    (advice,) = recommend([timing("fa2", 4096, rate, process) for process, rate in enumerate((100.0, 300.0))], case_of(4096))
    assert advice.rate == pytest.approx(150.0), "the rate at the mean of the two times"


def spread_over(kernel: str, seqlen: int, *rates: float) -> Record:
    """A kernel whose samples are at these rates."""
    record = timing(kernel, seqlen, 1.0)
    assert record.flop
    return dataclasses.replace(record, samples_ms=[record.flop / rate / 1e9 for rate in rates])


def test_advice_names_the_kernels_that_cannot_be_told_apart() -> None:
    wide, near = spread_over("flex", 4096, 260, 270, 280, 290, 300), spread_over("sdpa", 4096, 250, 255, 265, 272, 275)
    alone = spread_over("fa2", 4096, 150, 151, 152, 153, 154)
    first, second, third = ranked = recommend([alone, near, wide], case_of(4096))
    assert [entry.kernel for entry in ranked] == ["flex", "sdpa", "fa2"]
    assert (tied(ranked), tied([second, first, third]), tied([third, first, second])) == ([second], [first], [])
    text = render_advice(case_of(4096), ranked)
    assert text.splitlines()[0].endswith("4096 tokens: use flex, tied with sdpa")
    assert text.count("tied") == 1
    assert "tied" not in render_advice(case_of(4096), recommend([alone, wide], case_of(4096)))
    assert "use flex, tied with fa2 and sdpa" in render_advice(
        case_of(4096), recommend([wide, near, timing("fa2", 4096, 274.0)], case_of(4096))
    )


def test_advice_between_two_lengths_is_tied_by_what_both_say() -> None:
    wide = [spread_over("flex", length, 260, 270, 280, 290, 300) for length in (1024, 4096)]
    near, apart = timing("sdpa", 1024, 275.0), timing("sdpa", 4096, 200.0)
    assert tied(recommend([*wide, near, apart], case_of(1024)))
    assert not tied(recommend([*wide, near, apart], case_of(2048))), "some 238 TFLOP/s against 270 to 290"
    assert not tied(recommend([*wide, near, apart], case_of(4096)))


def test_advice_beyond_what_was_measured_says_so() -> None:
    assert "65536 tokens are outside the measured lengths 1024 to 4096" in recommend(RECORDS, case_of(65536))[0].caveats


def test_advice_for_much_sparser_masks_than_measured_says_so() -> None:
    short_documents = dataclasses.replace(case_of(4096), mask=document_mask((16,) * 256))
    assert any("time this very case" in caveat for caveat in recommend(RECORDS, short_documents)[0].caveats)


def test_advice_without_a_fitting_record_lists_what_there_is() -> None:
    with pytest.raises(InvalidArgument, match=r"no verified timing of causal 64:8 .*by --mask, .*: causal_document 64:8 d128 bf16 fwd"):
        recommend(RECORDS, case_of(4096, "causal"))
    with pytest.raises(InvalidArgument, match="no verified timing at all"):
        recommend([], case_of(4096))


def test_advice_counts_mechanisms_and_ranks_apart() -> None:
    parallel = [timing("flex", 4096, 900.0, mechanism="ulysses", world_size=8)]
    assert [advice.kernel for advice in recommend([*RECORDS, *parallel], case_of(4096), world_size=8)] == ["ulyssesx8:flex"]


def test_a_list_of_lengths_is_one_batch_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps([100, 1, 27]))
    case = make_case("causal_document", (64, 8), 128, "bf16", "fwd", str(path))
    assert case.mask == document_mask((100, 1, 27))
    assert make_case("causal", (64, 8), 128, "bf16", "fwd", str(path)).seqlen_q == 128


def test_a_case_without_a_number_of_tokens_asks_for_it() -> None:
    with pytest.raises(InvalidArgument, match="how many tokens"):
        make_case("causal", (64, 8), 128, "bf16", "fwd")


def test_recommend_prints_the_winner_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "records.jsonl", RECORDS)
    lengths = tmp_path / "my.json"
    lengths.write_text("[1000, 1000, 2096]")
    assert main(["recommend", path, "--lengths", str(lengths)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("causal_document 64:8 d128 bf16 fwd, 4096 tokens: use fa2")
    assert "measured TFLOP/s: 100 at 1024, 300 at 4096" in out
    assert main(["recommend", path, "--mask", "casual", "--tokens", "4k"]) == 2
    assert "did you mean 'causal'" in capsys.readouterr().err


def test_interpolation_hits_the_points_and_stays_between_them() -> None:
    points = [(1024, 100.0), (4096, 300.0)]
    assert [interpolate(points, length) for length in (512, 1024, 2048, 4096, 8192)] == [100.0, 100.0, 200.0, 300.0, 300.0]
    assert render_advice(case_of(1024), recommend(RECORDS, case_of(1024))).count("TFLOP/s") == 4


def test_records_of_the_tests_are_real_records(baseline: str) -> None:
    assert len(read_records(baseline)) == 5
