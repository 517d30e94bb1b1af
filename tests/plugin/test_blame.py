"""Whose fault a failure is: no kernel is accused of what another one, or an earlier case, left behind in its process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_longca import known_failures
from pytest_longca.known_failures import Entry
from tests.plugin.conftest import Run

KERNELS = '''
import os

import torch

from pytest_longca.kernels.naive import Naive

SOFTMAX = torch.Tensor.softmax


class Patching(Naive):
    """Right while it runs; what it leaves behind is not."""

    name = "a_patch"

    def bind(self, case, inputs):
        torch.Tensor.softmax = SOFTMAX
        call = super().bind(case, inputs)
        function = call.function

        def attend(q, k, v):
            torch.Tensor.softmax = SOFTMAX
            answer = function(q, k, v)
            torch.Tensor.softmax = lambda self, *args, **more: SOFTMAX(self, *args, **more) * 1.001
            return answer

        call.function = attend
        return call


class Wearing(Naive):
    """Wrong with 16 queries, once it had 12."""

    name = "wearing"
    seen = set()

    def bind(self, case, inputs):
        self.seen.add(case.seqlen_q)
        call = super().bind(case, inputs)
        function = call.function
        factor = 1.001 if case.seqlen_q == 16 and 12 in self.seen else 1.0
        call.function = lambda q, k, v: (function(q, k, v)[0] * factor, function(q, k, v)[1])
        return call


class Wrong(Naive):
    name = "wrong"

    def bind(self, case, inputs):
        with open(PIDS, "a") as file:
            print(os.getpid(), file=file)
        call = super().bind(case, inputs)
        function = call.function
        call.function = lambda q, k, v: (function(q, k, v)[0] * 1.001, None)
        return call


class Gappy(Naive):
    """Wrong where q has gaps between its tokens."""

    name, wrong = "gappy", ((0, "fused"), (0, "padded"))

    def bind(self, case, inputs):
        call = super().bind(case, inputs)
        function = call.function
        factor = 1.001 if any(case.layouts[operand] == layout for operand, layout in self.wrong) else 1.0
        call.function = lambda q, k, v: (function(q, k, v)[0] * factor, function(q, k, v)[1])
        return call


class Gappier(Gappy):
    """Wrong where k has them, too."""

    name, wrong = "gappier", (*Gappy.wrong, (1, "fused"))


def pytest_longca_kernels():
    return [Patching(), Wearing(), Wrong(), Gappy(), Gappier()]
'''
CASE = "causal(seqlen_q=20,seqlen_kv=20)/b1/h2:2/d64/fp32/fwd_bwd/s2"
LEFT = "a_patch ran before in the same process"


@pytest.fixture(autouse=True)
def kernels(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by the environment: workers have that of the process which forks them, and it may be older than this test.
    pytester.makeconftest(f"PIDS = {str(pytester.path / 'pids')!r}\n{KERNELS}")
    monkeypatch.setattr(torch.Tensor, "softmax", torch.Tensor.softmax)  # which one of them replaces, once in this process


@pytest.mark.parametrize("stage", ["examples", "probes"])
def test_what_another_kernel_left_behind_is_not_blamed_on_the_next(judge: Run, stage: str) -> None:
    result = judge("--longca-kernels=a_patch,naive", "-k", stage, "--longca-json=records.jsonl")
    result.assert_outcomes(passed=2, warnings=1)
    warning = " ".join(result.stdout.str().split())
    assert "naive is right on causal in a process of its own" in warning and LEFT in warning and "--longca-isolate=kernel" in warning
    records = {record["kernel"]: record for record in map(json.loads, Path("records.jsonl").read_text().splitlines())}
    assert records["naive"]["outcome"]["kind"] == "passed" and records["naive"]["num_examples"] > 0
    assert records["naive"]["facts"]["judged again"].startswith("wrong: ")


def test_nor_on_a_replayed_case(judge: Run) -> None:
    result = judge("--longca-kernels=a_patch,naive", f"--longca-case={CASE}")
    result.assert_outcomes(passed=2, warnings=1)


def test_nor_before_a_timing(run: Run) -> None:
    result = run("--longca-kernels=a_patch,naive", "--longca-masks=causal", "--longca-preset=smoke", "-k", "timing")
    assert "failed" not in result.parseoutcomes() and result.parseoutcomes()["warnings"] == 2


def test_a_kernel_of_its_own_process_needs_no_second_look(judge: Run) -> None:
    result = judge("--longca-kernels=a_patch,naive", "-k", "examples", "--longca-isolate=kernel")
    result.assert_outcomes(passed=2)


def test_a_wrong_kernel_stays_wrong_after_another_one(judge: Run) -> None:
    result = judge("--longca-kernels=a_patch,wrong", "-k", "examples")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["wrong is wrong: *", "replay: pytest --longca-kernels=wrong *"])
    assert "process of its own" not in result.stdout.str()
    assert len(set(Path("pids").read_text().split())) == 2


def test_a_case_that_is_wrong_in_a_new_process_is_not_judged_twice(judge: Run) -> None:
    judge("--longca-kernels=wrong", f"--longca-case={CASE}").assert_outcomes(failed=1)
    assert len(set(Path("pids").read_text().split())) == 1


def test_what_only_earlier_cases_of_the_same_kernel_spoil_stays_a_failure_and_says_so(judge: Run) -> None:
    result = judge("--longca-kernels=wearing", "-k", "probes")
    result.assert_outcomes(failed=1)
    hint = "right in a process of its own, but after other cases of wearing (*--longca-isolate=case*)"
    result.stdout.fnmatch_lines([f"wearing is wrong (not reproducible): {hint}: *"])


@pytest.fixture
def known_of_wearing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Puts an entry into the file: wearing is wrong with 16 queries after a case of so many."""

    def know(first: int) -> None:
        ids = {"case": 16, "after": first}
        cases = {key: f"causal(seqlen_q={n},seqlen_kv={n})/b1/h2:2/d64/fp32/fwd/s0" for key, n in ids.items()}
        message = "right in a process of its own, but after other cases of wearing .*: (out|dq): "
        entry = Entry(name="worn", kernel="wearing", message=message, why="a cache", **cases)
        monkeypatch.setattr(known_failures, "load", lambda: (entry,))

    return know


def test_what_earlier_cases_spoil_is_a_known_failure_if_the_file_says_so(judge: Run, known_of_wearing: Callable[[int], None]) -> None:
    known_of_wearing(12)
    result = judge("--longca-kernels=wearing", "-k", "probes or known", "--longca-json=records.jsonl")
    result.assert_outcomes(xfailed=2)
    records = [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()]
    assert [record["outcome"]["entry"] for record in records] == ["worn", "worn"]
    assert max(record["num_examples"] or 0 for record in records) > 20, "the probes after the known failure ran too"


def test_a_pair_of_cases_that_is_right_is_a_stale_entry(judge: Run, known_of_wearing: Callable[[int], None]) -> None:
    known_of_wearing(13)
    result = judge("--longca-kernels=wearing", "-k", "known")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*known failure 'worn' is stale: wearing passes its smallest case*"])


@pytest.mark.parametrize("mode", ["case", "off"])
def test_nothing_is_said_of_a_pair_of_cases_where_no_process_runs_both_or_none_is_new(
    judge: Run, known_of_wearing: Callable[[int], None], mode: str
) -> None:
    known_of_wearing(12)
    judge("--longca-kernels=wearing", "-k", "known", f"--longca-isolate={mode}").assert_outcomes(skipped=1)


def test_without_other_processes_the_message_names_what_ran_before(judge: Run) -> None:
    result = judge("--longca-kernels=a_patch,naive", "-k", "examples", "--longca-isolate=off")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"naive is wrong: {LEFT} (*--longca-isolate=kernel*): *"])


@pytest.fixture
def known_of_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries: both kernels are wrong with gaps between queries."""
    about = {"message": "(out|dq): ", "why": "strides", "only": "queries with gaps between them"}
    case = "causal(seqlen_q=2,seqlen_kv=2)/b1/h1:1/d64/fp32/fwd_bwd/s0/layout=q:padded"
    entries = tuple(Entry(name=f"gaps-of-{kernel}", kernel=kernel, case=case, **about) for kernel in ("gappy", "gappier"))
    monkeypatch.setattr(known_failures, "load", lambda: entries)


@pytest.mark.usefixtures("known_of_gaps")
@pytest.mark.parametrize("asked", [("-k", "probes"), (f"--longca-case={CASE}",)], ids=["probes", "a replayed case"])
def test_a_layout_that_a_check_tries_is_known_by_the_case_that_it_made(judge: Run, asked: tuple[str, ...]) -> None:
    result = judge("--longca-kernels=gappy", *asked, "--longca-json=records.jsonl")
    result.assert_outcomes(xfailed=1)
    (record,) = map(json.loads, Path("records.jsonl").read_text().splitlines())
    assert record["outcome"]["entry"] == "gaps-of-gappy"
    assert record["outcome"]["reason"].startswith("layout: out: with q fused, k bhsd, v padded, do offset: ")
    assert record["case"].endswith("/layout=q:fused,k:bhsd,v:padded,do:offset")
    again = judge("--longca-kernels=gappy", f"--longca-case={record['case']}")
    again.assert_outcomes(xfailed=1)


@pytest.mark.usefixtures("known_of_gaps")
def test_a_known_layout_hides_no_other(judge: Run) -> None:
    result = judge("--longca-kernels=gappier", "-k", "probes")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["gappier is wrong: layout: *", "  also layout: out: with q offset, k fused, *"])
