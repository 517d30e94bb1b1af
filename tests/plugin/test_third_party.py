"""What strangers bring: kernels, masks and tests of their own, and what they are told when something is wrong with them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.conftest import Run
from tests.plugin.test_readme import KERNEL, MASK

USAGE = pytest.ExitCode.USAGE_ERROR
RETURNS = """
from pytest_longca.kernel import AutogradCall
from pytest_longca.kernels.naive import Naive

class Returns(Naive):
    name = "returns"

    def bind(self, case, inputs):
        function = super().bind(case, inputs).function
        return AutogradCall(lambda q, k, v: ({answer}), inputs, case.direction.needs_backward)

def pytest_longca_kernels():
    return [Returns()]
"""
MOD = """
import torch
from pytest_longca.mask import from_mask_mod

def pytest_longca_masks():
    return [from_mask_mod("mine", lambda b, h, q_idx, kv_idx: {answer})]
"""
MASK_CLASS = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from pytest_longca.mask import Mask

@dataclass(frozen=True)
class Mine(Mask):
    seqlen_q: int
    seqlen_kv: int
    name: ClassVar[str] = "mine"

    def predicate(self, device="cpu"):
        return lambda b, h, q_idx, kv_idx: {answer}

    @classmethod
    def sample(cls, rng, seqlen, seqlen_kv=None):
        return cls(seqlen, seqlen)

def pytest_longca_masks():
    return [Mine]
"""


def said(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines + result.errlines)


def test_an_installed_plugin_brings_its_kernel_and_mask_into_workers_too(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(my_attention=KERNEL + MASK)
    pytester.syspathinsert()
    result = run("-p", "my_attention", "--benchmark-skip", "--longca-kernels=mine", "--longca-masks=dilated", "--longca-examples=3")
    assert result.parseoutcomes()["passed"] == 2
    result.stdout.fnmatch_lines(["mask*mine", "dilated*ok"])


def test_a_users_tests_get_kernels_masks_and_cases_in_every_combination(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNEL + MASK)
    pytester.makepyfile("""
        def test_kernel(longca_kernel): assert longca_kernel.name in ("mine", "naive")
        def test_mask(longca_mask): assert longca_mask.name in ("dilated", "causal")
        def test_case(longca_case): assert longca_case.seqlen_q == 64
        def test_kernel_mask(longca_kernel, longca_mask): assert longca_kernel.name and longca_mask.name
        def test_kernel_case(longca_kernel, longca_case): assert longca_case.dtype == "fp32"
    """)
    chosen = ("--longca-kernels=mine,naive", "--longca-masks=dilated,causal", "--longca-seqlens=64", "--longca-dtypes=fp32")
    result = run(*chosen, "--longca-passes=fwd", "test_a_users_tests_get_kernels_masks_and_cases_in_every_combination.py", "-v")
    result.assert_outcomes(passed=2 + 2 + 2 + 4 + 4)
    result.stdout.fnmatch_lines(["*::test_kernel_mask?mine-dilated? PASSED*", "*::test_kernel_case?naive-causal(seqlen_q=64*? PASSED*"])


def test_a_refused_case_skips_a_users_test_with_the_reason(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNEL)
    path = pytester.makepyfile("def test_mine(longca_kernel, longca_case): assert False")
    result = run("--longca-kernels=mine", "--longca-masks=causal", "--longca-seqlens=64", "--longca-dtypes=bf16", "-rs", str(path))
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*takes fp32, not bf16*"])


def test_fixtures_that_do_not_go_together_are_named(run: Run, pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("def test_mine(longca_mask, longca_case): pass")
    result = run("--longca-masks=causal", str(path))
    assert "a test asks for longca_mask and longca_case: tests can ask for" in said(result)
    assert result.ret != 0


def test_a_users_given_test_shrinks_to_the_smallest_case(run: Run, pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("""
        from hypothesis import given, settings
        from pytest_longca.kernels.naive import Naive
        from pytest_longca.strategies import cases

        @settings(deadline=None, database=None, derandomize=True)
        @given(case=cases(masks=["causal"], kernel=Naive()))
        def test_short(case):
            assert case.seqlen_q < 7, f"drawn {case.id}"
    """)
    result = run(str(path))
    result.assert_outcomes(failed=1)
    assert "drawn causal(seqlen_q=7,seqlen_kv=7)/b1/h1:1/d16/fp32/fwd_bwd/s0" in said(result)


def test_a_conftest_that_does_not_import_is_a_usage_error_that_names_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import no_such_attention\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--longca-kernels=naive", "--longca-masks=causal"]
    result = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True)
    assert result.returncode == USAGE
    assert re.search(r"ImportError while loading conftest .*conftest.py", result.stderr)
    assert "No module named 'no_such_attention'" in result.stderr


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("None", "forward returned None: it must return (out, lse or None)"),
        ("function(q, k, v)[0]", "forward returned a Tensor: it must return (out, lse or None)"),
        ("None, None", "the kernel returned None where a tensor of shape ["),
        ("function(q, k, v)[0].transpose(1, 2), None", "(batch, seqlen_q, heads_q, head_dim_v)"),
        ("function(q, k, v)[0].double(), None", "has dtype torch.float64, due is torch.float32"),
        ("function(q, k, v)[0], function(q, k, v)[1].half()", "lse: has dtype torch.float16, due is torch.float32 or torch.float64"),
        ("function(q, k, v)[0], function(q, k, v)[1][..., None]", "(batch, heads_q, seqlen_q)"),
    ],
)
def test_a_kernel_that_returns_no_result_is_told_what_is_due(run: Run, pytester: pytest.Pytester, answer: str, says: str) -> None:
    pytester.makeconftest(RETURNS.format(answer=answer))
    case = "causal(seqlen_q=3,seqlen_kv=4)/b1/h2:1/d8/fp32/fwd_bwd/s0"
    result = run("--longca-kernels=returns", f"--longca-case={case}", "--longca-checks=truth", "--longca-isolate=off")
    result.assert_outcomes(failed=1)
    assert "returns is wrong: " in said(result) and says in said(result)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("(q_idx >= kv_idx).int()", "mask 'mine' returned torch.int32: a mask_mod returns torch.bool, True where the key is visible"),
        ("True", "mask 'mine' returned bool: a mask_mod returns a bool tensor"),
        ("torch.ones(3, 5, dtype=torch.bool)", "mask 'mine' returned shape (3, 5): it must broadcast to"),
        (
            "q_idx.item() >= kv_idx",
            "mask 'mine' raised RuntimeError: a Tensor with 4 elements cannot be converted to Scalar (<lambda>, line 5 of {path}): "
            "a mask_mod gets integer tensors that broadcast, of any length",
        ),
        (
            "(torch.rand(q_idx.shape) > 0.5) & (kv_idx >= 0)",
            "mask 'mine' gave two answers for the same indices: a mask_mod must be a function of its arguments alone",
        ),
    ],
)
@pytest.mark.parametrize("chosen", ["--longca-masks=mine", "--longca-case=mine(seqlen_q=9,seqlen_kv=9)/b1/h1:1/d8/fp32/fwd/s0"])
def test_a_predicate_that_is_none_is_told_what_is_due(run: Run, pytester: pytest.Pytester, answer: str, says: str, chosen: str) -> None:
    path = pytester.makeconftest(MOD.format(answer=answer))
    result = run("--longca-kernels=naive", chosen)
    assert result.ret == USAGE
    assert f"pytest_longca_masks in {path}: {says.format(path=path)}" in said(result)


def test_a_mask_class_is_tried_too(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(MASK_CLASS.format(answer="(torch.rand(q_idx.shape) > 0.5) & (kv_idx >= 0)"))
    result = run("--longca-kernels=naive", "--longca-masks=mine")
    assert result.ret == USAGE
    assert "mask 'mine' gave two answers for the same indices" in said(result)


@pytest.mark.parametrize("chosen", ["--longca-masks=causal", "--longca-case=causal(seqlen_q=9,seqlen_kv=9)/b1/h1:1/d8/fp32/fwd/s0"])
def test_a_predicate_that_is_none_stops_no_run_of_other_masks(run: Run, pytester: pytest.Pytester, chosen: str) -> None:
    pytester.makeconftest(MOD.format(answer="(q_idx >= kv_idx).int()"))
    result = run("--longca-kernels=naive", chosen, "--longca-examples=2", "-k", "examples or case", "--longca-html=page.html")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("isolate", ["auto", "off"])
def test_a_predicate_that_raises_beyond_the_trial_is_told_in_one_line_and_costs_no_report(
    run: Run, pytester: pytest.Pytester, isolate: str
) -> None:
    path = pytester.makeconftest(MOD.format(answer="torch.zeros(8, dtype=torch.bool)[q_idx] & (kv_idx >= 0)"))
    chosen = ("--longca-kernels=naive", "--longca-masks=mine,causal", "--longca-examples=2", f"--longca-isolate={isolate}")
    result = run(*chosen, "-k", "examples", "--longca-html=page.html")
    result.assert_outcomes(passed=1, failed=1)
    says = "naive crashed: mask 'mine' raised IndexError: index 8 is out of bounds for dimension 0 with size 8"
    assert f"{says} (<lambda>, line 5 of {path}): a mask_mod gets integer tensors that broadcast, of any length" in said(result)
    result.stdout.fnmatch_lines(["replay: pytest --longca-kernels=naive --longca-case='mine(*", "mine*CRASH*"])
    assert "Traceback" not in said(result) and Path("page.html").exists()


BLIND = """
import multiprocessing
from dataclasses import replace
from pytest_longca.kernels.naive import Naive
from pytest_longca.masks.regular import Causal

class Blind(Naive):
    name = "blind"

    def bind(self, case, inputs):
        return super().bind(replace(case, mask=Causal(case.seqlen_q, case.seqlen_kv)), inputs)

def pytest_longca_kernels():
    return [Blind()]
"""


def test_a_predicate_that_raises_in_the_worker_alone_is_told_too(run: Run, pytester: pytest.Pytester) -> None:
    """As one does that captured tensors of the CPU, on a GPU."""
    answer = "(q_idx >= kv_idx) if q_idx.numel() < 9 or multiprocessing.parent_process() is None else 1 / 0"
    pytester.makeconftest(BLIND + MOD.format(answer=answer))
    result = run("--longca-kernels=blind", "--longca-case=mine(seqlen_q=9,seqlen_kv=9)/b1/h1:1/d8/fp32/fwd/s0")
    result.assert_outcomes(failed=1)
    assert "blind crashed: mask 'mine' raised ZeroDivisionError: division by zero (<lambda>, line " in said(result)
    assert "Traceback" not in said(result)


def test_ranks_share_no_mask_whose_predicate_raises(run: Run, pytester: pytest.Pytester) -> None:
    mod = MOD.format(answer="torch.zeros(8, dtype=torch.bool)[q_idx] & (kv_idx >= 0)").replace(")]", ", two_runs_a_row=True)]")
    pytester.makeconftest(mod)
    result = run("--longca-kernels=naive", "--longca-masks=mine", "--longca-mechanisms=ring_p2p")
    assert result.ret == USAGE
    assert "ERROR: mask 'mine' raised IndexError: index 8 is out of bounds" in said(result) and "Traceback" not in said(result)


def test_two_masks_of_one_name_are_a_usage_error(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(MOD.format(answer="q_idx >= kv_idx").replace('"mine"', '"causal"'))
    result = run("--longca-kernels=naive", "--longca-masks=causal")
    assert result.ret == USAGE
    assert "two masks are named 'causal': rename one of them" in said(result)


def declaring(line: str) -> str:
    return RETURNS.format(answer="function(q, k, v)").replace('name = "returns"', f'name = "returns"\n    {line}')


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("def missing(self): raise KeyError(7)", "kernel returns: missing raised KeyError: 7 (missing, line 6 of {path})"),
        ("def version(self): 1 / 0", "kernel returns: version raised ZeroDivisionError: division by zero (version, line 6 of {path})"),
        ("def supports(self, *_): raise SystemExit(3)", "kernel returns: supports raised SystemExit: 3 (supports, line 6 of {path})"),
        (
            "def also_refuses(self, *_): 1 / 0",
            "kernel returns: supports raised ZeroDivisionError: division by zero (also_refuses, line 6 of",
        ),
        ("capabilities = None", "{path}: kernel 'returns' has capabilities None: give it an instance of pytest_longca.kernel.Capabilities"),
    ],
)
def test_a_declaration_that_raises_is_a_usage_error_that_names_it(run: Run, pytester: pytest.Pytester, line: str, says: str) -> None:
    path = pytester.makeconftest(declaring(line))
    result = run("--longca-kernels=naive,returns", "--longca-masks=causal", "--longca-isolate=off")
    assert result.ret == USAGE
    assert says.format(path=path) in said(result) and "Traceback" not in said(result)


@pytest.mark.parametrize("chosen", ["--longca-list", "-n1"])
def test_a_declaration_that_raises_is_named_by_a_list_and_under_xdist_too(run: Run, pytester: pytest.Pytester, chosen: str) -> None:
    pytester.makeconftest(declaring("def also_refuses(self, *_): 1 / 0"))
    result = run("--longca-kernels=naive,returns", "--longca-masks=causal", "--longca-isolate=off", chosen)
    assert result.ret == USAGE
    assert "kernel returns: supports raised ZeroDivisionError" in said(result) and "Traceback" not in said(result)


@pytest.mark.parametrize("stage", ["probes", "examples"])
def test_supports_that_raises_on_a_drawn_case_is_the_outcome_of_that_case(run: Run, pytester: pytest.Pytester, stage: str) -> None:
    line = "def also_refuses(self, case, machine): return {True: None}[case.seqlen_q >= 256]"  # as those that are asked for first
    path = pytester.makeconftest(declaring(line))
    result = run("--longca-kernels=returns", "--longca-masks=causal", "--longca-examples=5", "-k", stage)
    result.assert_outcomes(failed=1)
    says = f"crashed: kernel returns: supports raised KeyError: False [(]also_refuses, line 6 of {re.escape(str(path))}[)] on causal[(]"
    assert re.search(says, said(result)) and "Traceback" not in said(result)
    result.stdout.fnmatch_lines(["replay: pytest --longca-kernels=returns --longca-case='causal(*", "causal*CRASH*"])


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (
            "def pytest_longca_kernels(): raise SystemExit('no\\nGPU')",
            "pytest_longca_kernels in {path} raised SystemExit: no (pytest_longca",
        ),
        ("def pytest_longca_masks(): yield 1 / 0", "pytest_longca_masks in {path} raised ZeroDivisionError: division by zero"),
        ("import pytest\ndef pytest_longca_masks(): pytest.skip('today')", "pytest_longca_masks in {path} raised Skipped: today"),
    ],
)
def test_whatever_a_hook_raises_is_a_usage_error_that_names_its_file(run: Run, pytester: pytest.Pytester, hook: str, says: str) -> None:
    path = pytester.makeconftest(hook)
    result = run("--longca-kernels=naive", "--longca-masks=causal")
    assert result.ret == USAGE
    assert says.format(path=path) in said(result) and "Traceback" not in said(result)


@pytest.mark.parametrize(
    ("conftest", "says"),
    [
        (MOD.format(answer="q_idx >= kv_idx").replace('"mine"', '"regular"'), "mask name 'regular' is that of a group of masks: rename it"),
        (MOD.format(answer="q_idx >= kv_idx").replace('"mine"', '"all"'), "mask name 'all' is that of a group of masks: rename it"),
        (RETURNS.replace('"returns"', '"all"'), "kernel name 'all' is that of a group of kernels: rename it"),
    ],
)
def test_the_name_of_a_group_is_free_for_no_kernel_and_no_mask(run: Run, pytester: pytest.Pytester, conftest: str, says: str) -> None:
    pytester.makeconftest(conftest)
    result = run("--longca-kernels=naive", "--longca-masks=causal")
    assert result.ret == USAGE
    assert says in said(result)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("", "--longca-case"),
        ("causal", "--longca-case"),
        ("casual(seqlen_q=3,seqlen_kv=3)/b1/h1:1/d8/fp32/fwd/s0", "did you mean 'causal'"),
        ("causal(seqlen_q=3,seqlen_kv=x)/b1/h1:1/d8/fp32/fwd/s0", "--longca-case"),
        ("causal(seqlen_q=__import__('os').getpid(),seqlen_kv=3)/b1/h1:1/d8/fp32/fwd/s0", "--longca-case"),
        ("causal(seqlen_q=3,seqlen_kv=3)/b1/h3:2/d8/fp32/fwd/s0", "heads 3:2"),
        ("causal(seqlen_q=-3,seqlen_kv=3)/b1/h1:1/d8/fp32/fwd/s0", "--longca-case"),
        ("prefix_lm_document(doc_lens=2+3,prefixes=1)/b1/h1:1/d8/fp32/fwd/s0", "prefix"),
    ],
)
def test_a_malformed_case_is_a_usage_error_that_says_where(run: Run, case: str, says: str) -> None:
    result = run("--longca-kernels=naive", f"--longca-case={case}")
    assert result.ret == USAGE
    assert says in said(result)


def test_a_failure_comes_with_a_file_for_upstream_and_a_drawing_in_its_record(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RETURNS.format(answer="function(q, k, v)[0] * 1.01, None"))
    case = "causal(seqlen_q=3,seqlen_kv=4)/b1/h2:1/d8/fp32/fwd_bwd/s0"
    chosen = ("--longca-kernels=returns,naive", f"--longca-case={case}", "--longca-checks=truth")
    result = run(*chosen, "--longca-isolate=off", "--longca-repro=upstream", "--longca-json=out.jsonl")
    result.assert_outcomes(failed=1, passed=1)
    (path,) = Path(pytester.path, "upstream").iterdir()
    assert f"standalone: upstream/{path.name} (lacks the call of returns, which its `snippet` would give)" in result.outlines
    assert f"# case: {case}" in path.read_text() and "returns was not called" in path.read_text()
    assert "seen with: python 3." in path.read_text()
    records = [json.loads(line) for line in Path(pytester.path, "out.jsonl").read_text().splitlines()]
    drawings = {record["kernel"]: record["facts"].get("drawing") for record in records}
    assert drawings["returns"]["cells"] == ["##..", "###.", "####"] and drawings["returns"]["wrong_rows"]
    assert drawings["naive"] is None


def test_a_folder_that_cannot_be_written_in_the_end_costs_no_result(run: Run, pytester: pytest.Pytester) -> None:
    conftest = RETURNS.format(answer="function(q, k, v)[0] * 1.01, None")
    pytester.makeconftest(conftest + "\n\ndef pytest_collection_finish(session):\n    open('upstream', 'w').close()\n")
    case = "causal(seqlen_q=3,seqlen_kv=4)/b1/h2:1/d8/fp32/fwd_bwd/s0"
    chosen = ("--longca-kernels=returns", f"--longca-case={case}", "--longca-checks=truth")
    result = run(*chosen, "--longca-isolate=off", "--longca-repro=upstream")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["returns is wrong:*", "standalone: --longca-repro: *cannot be written*"])


NARROW = """
from pytest_longca.kernel import AutogradCall, Capabilities
from pytest_longca.kernels.naive import Naive

class Narrow(Naive):
    name = "narrow"
    capabilities = Capabilities(head_dims=(96,), dtypes=frozenset({"bf16"}))

    def bind(self, case, inputs):
        function = super().bind(case, inputs).function
        return AutogradCall(lambda q, k, v: (function(q, k, v)[0] * 1.1, function(q, k, v)[1]), inputs, case.direction.needs_backward)

def pytest_longca_kernels():
    return [Narrow()]
"""


@pytest.mark.parametrize("stage", ["probes", "examples"])
def test_a_kernel_of_none_of_the_usual_dtypes_and_head_dims_is_judged_on_its_own(run: Run, pytester: pytest.Pytester, stage: str) -> None:
    pytester.makeconftest(NARROW)
    result = run("--longca-kernels=narrow", "--longca-masks=causal", "-k", stage, "--longca-examples=5")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*narrow is wrong*", "replay: *d96/bf16*"])


def test_dtypes_that_were_asked_for_are_not_replaced(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NARROW)
    result = run("--longca-kernels=narrow", "--longca-masks=causal", "--longca-dtypes=fp32", "-k", "examples")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["narrow: unsupported: takes bf16, not fp32*"])


PARALLEL = """
import multiprocessing
from pytest_longca.kernels.naive import Naive

class Parallel(Naive):
    name = "parallel"

    def bind(self, case, inputs):
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return super().bind(case, inputs)

def pytest_longca_kernels():
    return [Parallel()]
"""


def test_a_kernel_may_start_processes(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PARALLEL)
    run("--longca-kernels=parallel", "--longca-masks=causal", "-k", "examples", "--longca-examples=3").assert_outcomes(passed=1)
