"""What becomes of kernels that are wrong, crash, hang, or return nonsense; each costs the others nothing."""

import json
import re
from pathlib import Path

import pytest

from pytest_longca import conformance
from pytest_longca.case import Case
from pytest_longca.checks import Verification
from pytest_longca.collector import ELSEWHERE
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Wrong
from pytest_longca.subject import Finding
from tests.plugin.conftest import KERNELS, Run


@pytest.fixture(autouse=True)
def kernels(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNELS)


def test_a_wrong_dk_is_named_shrunk_drawn_and_can_be_replayed(judge: Run) -> None:
    result = judge("--longca-kernels=wrong_dk,naive", "-k", "examples")
    result.assert_outcomes(passed=1, failed=1)
    output = result.stdout.str()
    assert re.search(r"wrong_dk is wrong: .*dk", output)
    replay = re.search(r"replay: pytest --longca-kernels=(\S+) --longca-case='(.*)'", output)
    assert replay
    shrunk = re.search(r"seqlen_q=(\d+)", replay[2])
    assert shrunk and int(shrunk[1]) <= 3
    again = judge(f"--longca-kernels={replay[1]}", f"--longca-case={replay[2]}")
    again.assert_outcomes(failed=1)


USUAL = "causal(seqlen_q=20,seqlen_kv=20)/b1/h2:2/d64/fp32/fwd_bwd/s2"


def test_a_neighbour_that_is_wrong_by_itself_is_the_case_that_fails(judge: Run) -> None:
    result = judge("--longca-kernels=usual_scale", f"--longca-case={USUAL}")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert re.search(r"usual_scale is wrong: truth: out: batch .*looks like scale 1/sqrt\(head_dim\), not 0\.61", output)
    assert "right after this one" not in output
    replay = re.search(r"replay: pytest --longca-kernels=usual_scale --longca-case='(.*/s3/scale=0\.61)'", output)
    assert replay and f"case: {replay[1]}" in output
    again = judge("--longca-kernels=usual_scale", f"--longca-case={replay[1]}")
    again.assert_outcomes(failed=1)


def test_a_search_shrinks_to_a_neighbour_that_is_wrong_by_itself(judge: Run) -> None:
    result = judge("--longca-kernels=usual_scale", "-k", "examples")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert re.search(r"usual_scale is wrong: truth: .*", output)
    replay = re.search(r"replay: .*seqlen_q=(\d+).*/scale=", output)
    assert replay and int(replay[1]) <= 3


def test_a_neighbour_that_only_a_kept_scale_spoils_is_told_as_state(judge: Run) -> None:
    result = judge("--longca-kernels=kept_scale", f"--longca-case={USUAL}")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert re.search(r"kept_scale is wrong: state: out: in another case \(.*\) right after this one", output)
    assert f"replay: pytest --longca-kernels=kept_scale --longca-case='{USUAL}'" in output
    picture = output[output.index("queries (down)") : output.index("replay:")]
    assert "<" not in picture and "X" not in picture


def test_a_failure_tells_each_finding_once_with_its_check_and_tensor() -> None:
    case = Case(mask=Causal(2, 2))
    findings = [Finding("count", "out", "reads key 1"), Finding("support", "dq", "is not due")]
    told = conformance.failure_text("mine", case, Verification(Wrong("count: out: reads key 1 (and 1 more)"), findings)).splitlines()
    assert told[:3] == ["mine is wrong: count: out: reads key 1 (and 1 more)", "  also support: dq: is not due", f"case: {case.id}"]


def test_a_crash_names_the_kernel_and_the_others_go_on(judge: Run) -> None:
    result = judge("--longca-kernels=crashing,naive", "-k", "examples or probes")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (2, 2)
    result.stdout.fnmatch_lines(["crashing crashed: the worker was killed by SIGSEGV*", "*Segmentation fault*"])


def test_a_hang_is_killed_and_reported(judge: Run) -> None:
    result = judge("--longca-kernels=hanging,naive", "--longca-timeout=6s", "-k", "probes")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["hanging timed out: no answer within 6 s*"])


def test_cases_that_are_refused_when_they_run_do_not_end_a_cell(judge: Run) -> None:
    result = judge("--longca-kernels=picky", "--longca-examples=20", "-k", "examples or probes", "--longca-json=records.jsonl")
    result.assert_outcomes(passed=2)
    for record in map(json.loads, Path("records.jsonl").read_text().splitlines()):
        assert record["outcome"]["kind"] == "passed" and record["num_examples"] > 0
        assert re.fullmatch(
            r"\d+ cases when they ran, the first causal.*: unsupported: no kernel for so long a sequence", record["facts"]["refused"]
        )


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("refusing", "refusing does not run this case: unsupported: no kernel for so long a sequence"),
        ("flex", "flex does not run this case: unsupported: *"),
        ("fa3", "fa3 does not run this case: not installed: *"),
    ],
)
def test_a_named_case_that_a_named_kernel_does_not_run_is_red_and_says_why(run: Run, kernel: str, says: str) -> None:
    result = run(f"--longca-kernels={kernel}", "--longca-case=causal(seqlen_q=20,seqlen_kv=20)/b1/h2:2/d32/fp32/fwd_bwd/s0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([says])


def test_a_refusal_hides_no_failure(judge: Run) -> None:
    judge("--longca-kernels=picky_wrong", "--longca-examples=20", "-k", "examples").assert_outcomes(failed=1)


def test_a_cell_in_which_every_case_is_refused_is_unsupported(judge: Run) -> None:
    result = judge("--longca-kernels=refusing", "-k", "examples or probes", "--longca-json=records.jsonl")
    result.assert_outcomes(skipped=2)
    kinds = [json.loads(line)["outcome"]["kind"] for line in Path("records.jsonl").read_text().splitlines()]
    assert kinds == ["unsupported"] * 2


def test_a_kernel_that_returns_none_is_wrong_and_told_what_to_return(judge: Run) -> None:
    result = judge("--longca-kernels=returns_none", "-k", "examples")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["returns_none is wrong: truth: out: forward returned None: it must return (out, lse or None)"])


def test_records_hold_outcome_verdicts_and_the_replay_line(judge: Run, pytester: pytest.Pytester) -> None:
    judge("--longca-kernels=wrong_dk,naive", "-k", "examples", "--longca-json=out.jsonl")
    records = [json.loads(line) for line in Path(pytester.path, "out.jsonl").read_text().splitlines()]
    assert {record["kernel"]: record["outcome"]["kind"] for record in records} == {"wrong_dk": "wrong", "naive": "passed"}
    by_kernel = {record["kernel"]: record for record in records}
    assert by_kernel["wrong_dk"]["replay"].startswith("pytest --longca-kernels=wrong_dk --longca-case='causal(")
    assert {verdict["tensor"] for verdict in by_kernel["naive"]["verdicts"]} == {"out", "lse", "dq", "dk", "dv"}


def test_records_that_cannot_be_written_go_elsewhere_and_the_run_says_where(judge: Run) -> None:
    result = judge("-q", "--longca-kernels=naive", "-k", "examples", "--longca-json=/no/such/folder/out.jsonl")
    result.assert_outcomes(passed=1)
    first, last = (number for number, line in enumerate(result.outlines) if "cannot be written" in line)
    progress = next(number for number, line in enumerate(result.outlines) if line.startswith("."))
    assert first < progress < last, "it is said before anything runs, and where the user looks at the end"
    fallback = Path(result.outlines[last].rsplit(" ", 1)[1])
    assert json.loads(fallback.read_text())["kernel"] == "naive"
    fallback.unlink()
    assert result.ret == ELSEWHERE, "nothing is lost, and a job that reads the file is not told that all is well"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "def pytest_longca_kernels(): return [1]",
            "*pytest_longca_kernels in *conftest.py returned 1: return instances of *",
        ),
        (
            "def pytest_longca_masks(): return ['x']",
            "*pytest_longca_masks in *conftest.py returned 'x': return subclasses of *",
        ),
        ("def pytest_longca_kernels(): return 1", "*pytest_longca_kernels in *conftest.py returned 1: return a list, of one as of many*"),
        ("def pytest_longca_kernels(): raise ValueError('boom')", "*pytest_longca_kernels in *conftest.py raised ValueError: boom*"),
        (
            "from pytest_longca.kernels.naive import Naive\ndef pytest_longca_kernels(): return [Naive()]",
            "*two kernels are named 'naive': rename one of them*",
        ),
    ],
)
def test_a_hook_that_is_wrong_is_a_usage_error(run: Run, pytester: pytest.Pytester, body: str, says: str) -> None:
    pytester.makeconftest(body)
    result = run("--longca-masks=causal", "--longca-kernels=naive")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines + result.outlines).fnmatch_lines([says])
