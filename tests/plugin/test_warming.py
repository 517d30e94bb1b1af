"""What is compiled ahead: which cases, in how many processes, and that a budget does not pay for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_longca.budget import Budget
from pytest_longca.case import Case
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.machine import CPU, H200
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow
from pytest_longca.warming import Run, cheapest_of_alike, code_of, num_processes
from tests.plugin.conftest import Run as RunPytest

K = 1024

COMPILING = '''
"""A kernel that compiles each shape for a fifth of a second, into a folder: a second process finds it there."""

import os
import time
from pathlib import Path

from pytest_longca.kernels.naive import Naive

CACHE = Path(__file__).with_name("cache")


class Compiling(Naive):
    name = "compiling"
    compiles_per_shape = True

    def compiles_to_disk(self, machine):
        return True

    def bind(self, case, inputs):
        if case.seqlen_q == 24:
            os._exit(3)
        CACHE.mkdir(exist_ok=True)
        with CACHE.with_name("ran").open("a") as file:
            print(os.getpid(), file=file)
        shape = "_".join(map(str, (case.seqlen_q, case.heads_q, case.head_dim, case.dtype, case.direction.needs_backward)))
        if not (CACHE / shape).exists():
            time.sleep(0.2)
            (CACHE / shape).write_text(str(os.getpid()))
        return super().bind(case, inputs)


def pytest_longca_kernels():
    return [Compiling()]


def pytest_runtestloop(session):
    with CACHE.with_name("ran").open("a") as file:
        print("items", file=file)
'''
FOR_ALL_LENGTHS = COMPILING.replace("compiles_per_shape = True", "compiles_per_shape = False").replace("(case.seqlen_q, ", "(")
"""The same kernel, whose compiled code serves every length."""
RAISING = """
import torch
from pytest_longca.mask import from_mask_mod

def pytest_longca_masks():
    eight = torch.zeros(8, dtype=torch.bool)
    return [from_mask_mod("mine", lambda b, h, q_idx, kv_idx: eight[q_idx] & (kv_idx >= 0), two_runs_a_row=True)]
"""
WHERE = ("--longca-kernels=compiling", "--longca-masks=causal", "--longca-preset=smoke", "--longca-json=records.jsonl")


@pytest.fixture
def warmed(run: RunPytest, pytester: pytest.Pytester) -> RunPytest:
    """Run the suite with a kernel that compiles."""
    pytester.makeconftest(COMPILING)
    return lambda *args: run(*WHERE, *args)


def compiled() -> dict[str, str]:
    """The process that compiled each shape."""
    return {path.name: path.read_text() for path in Path("cache").iterdir()}


def ran_by_items() -> list[str]:
    """A process id for each time that the kernel was bound after the first item began."""
    ahead, marker, later = Path("ran").read_text().partition("items")
    assert ahead and marker
    return later.split()


def test_each_timed_case_is_compiled_ahead_once_in_several_processes(warmed: RunPytest) -> None:
    result = warmed("-k", "timing", "--longca-seqlens=16,32,48,64", "--longca-compile-workers=2")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["compiled ahead: 8 of 8 cases in * s, 2 processes", "longca: compiled ahead: 8 of 8 cases*"])
    assert len(compiled()) == 8 and len(set(compiled().values())) == 2
    records = [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()]
    assert all(150 < record["compile_ms"] < 1500 for record in records), "what it took ahead; the items found everything compiled"


def test_code_that_serves_every_length_is_compiled_ahead_at_the_shortest_and_told_of_all(run: RunPytest, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FOR_ALL_LENGTHS)
    result = run(*WHERE, "-k", "timing", "--longca-seqlens=80,16,48,32", "--longca-compile-workers=1")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["longca: compiled ahead: 4 of 4 cases*"])  # 32 tokens are a multiple of another power of two
    assert len(compiled()) == 2 and len(set(compiled().values())) == 1
    records = [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()]
    took = {(record["shape"]["seqlen_q"], record["direction"]): record["compile_ms"] for record in records}
    for direction in ("fwd", "bwd"):
        assert 150 < took[16, direction] == took[48, direction] == took[80, direction] < 1500, "what the alike case took that was measured"


def test_of_cases_that_compile_alike_the_one_with_the_fewest_visible_pairs_runs(run: RunPytest, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FOR_ALL_LENGTHS.replace("print(os.getpid(), file=file)", "print(case.mask.block_map.density, file=file)"))
    where = (WHERE[0], "--longca-masks=uniform_block", *WHERE[2:], "--longca-seqlens=128", "--longca-block-sizes=16")
    run(*where, "-k", "timing", "--longca-passes=fwd", "--longca-densities=0.8,0.2,0.5", "--longca-compile-workers=1").assert_outcomes(
        passed=3
    )
    assert set(Path("ran").read_text().partition("items")[0].split()) == {"0.2"}


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        (Causal(64 * K, 64 * K), Causal(128 * K, 128 * K), True),
        (Causal(64 * K, 64 * K), Causal(64 * K + 64, 64 * K + 64), False),
        (Causal(128 * K, 128 * K), Causal(256 * K, 256 * K), False),  # 2**31 elements of q: a stride of 64 bits
        (CausalSlidingWindow(64 * K, 64 * K, 1023), CausalSlidingWindow(128 * K, 128 * K, 1023), True),
        (CausalSlidingWindow(2 * K, 2 * K, 4095), CausalSlidingWindow(8 * K, 8 * K, 4095), False),  # the shorter one is plainly causal
        (CausalDocument((64 * K,)), CausalDocument((64 * K, 64 * K)), False),
        (CausalDocument((60 * K, 4 * K)), CausalDocument((64 * K,) * 2), True),
        (UniformBlock.default(64 * K, block_size=128), UniformBlock.default(128 * K, seed=1, density=0.1, block_size=128), True),
        (UniformBlock.default(64 * K, block_size=128), UniformBlock.default(64 * K, block_size=64), False),
    ],
)
def test_what_is_compiled_depends_on_the_form_of_a_mask_and_hardly_on_its_length(one: Mask, other: Mask, is_alike: bool) -> None:
    first, second = (code_of(Case(mask=mask, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")) for mask in (one, other))
    assert (first == second) == is_alike


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_case_that_compiles_has_time_for_it_beyond_the_time_out(warmed: RunPytest, num_ahead: int) -> None:
    args = ("-k", "timing", "--longca-seqlens=16", "--longca-passes=fwd", "--longca-timeout=0.1s")
    warmed(*args, f"--longca-compile-workers={num_ahead}").assert_outcomes(passed=1)
    (record,) = map(json.loads, Path("records.jsonl").read_text().splitlines())
    assert (record["compile_ms"] > 150) == (num_ahead == 1), "ahead it is a process's first run that is timed; else verifying compiled it"


def test_probes_and_drawn_examples_are_the_very_ones_that_the_suite_runs(warmed: RunPytest) -> None:
    warmed("-k", "probes or examples", "--benchmark-skip", "--longca-examples=6", "--longca-compile-workers=2").assert_outcomes(passed=2)
    cached = compiled()
    assert len(cached) > 6 and len(set(cached.values())) == 2, "what the items compiled themselves would carry a third process"
    assert not ran_by_items(), "what passed ahead is not run again"


def test_processes_of_their_own_run_every_case_again(warmed: RunPytest) -> None:
    args = ("-k", "probes", "--benchmark-skip", "--longca-compile-workers=2", "--longca-isolate=kernel")
    warmed(*args).assert_outcomes(passed=1)
    assert ran_by_items()


def test_what_is_wrong_ahead_is_judged_again_by_its_item(run: RunPytest, pytester: pytest.Pytester) -> None:
    twice = "return super().bind(dataclasses.replace(case, scale=2 * case.scale), inputs)"
    pytester.makeconftest(
        COMPILING.replace("return super().bind(case, inputs)", twice).replace("import os", "import dataclasses\nimport os")
    )
    run(*WHERE, "-k", "probes", "--benchmark-skip", "--longca-compile-workers=2").assert_outcomes(failed=1)
    assert ran_by_items()


def test_a_budget_does_not_pay_for_it_and_what_an_earlier_run_has_is_left_out(warmed: RunPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[float] = []
    monkeypatch.setattr(Budget, "add", lambda _, seconds: added.append(seconds))
    args = ("-k", "timing", "--longca-seqlens=16,32", "--longca-passes=fwd", "--longca-compile-workers=1", "--longca-budget=9m")
    warmed(*args, "--longca-resume=records.jsonl").assert_outcomes(passed=2)
    assert len(added) == 1 and added[0] > 2 * 0.2
    warmed(*args, "--longca-resume=records.jsonl").stdout.no_fnmatch_line("*compiled ahead*")


@pytest.mark.parametrize("args", [("--longca-compile-workers=0",), ("--longca-isolate=off",), ("--collect-only",)], ids="".join)
def test_nothing_runs_ahead_where_nothing_should(warmed: RunPytest, args: tuple[str, ...]) -> None:
    result = warmed("-k", "timing", "--longca-passes=fwd", *args)
    result.stdout.no_fnmatch_line("*compiled ahead*")


def test_a_case_that_dies_ahead_is_told_by_its_own_item_and_costs_the_others_nothing(warmed: RunPytest) -> None:
    result = warmed("-k", "timing", "--longca-seqlens=8,16,24", "--longca-passes=fwd", "--longca-compile-workers=2")
    result.assert_outcomes(passed=2, failed=1)
    assert len(compiled()) == 2


def test_a_mask_whose_predicate_raises_is_told_by_its_own_items(run: RunPytest, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FOR_ALL_LENGTHS + RAISING)
    result = run(WHERE[0], "--longca-masks=causal,mine", *WHERE[2:], "-k", "timing", "--longca-seqlens=16,48", "--longca-passes=fwd")
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*mask 'mine' raised IndexError: index 8 is out of bounds*"])


def test_on_a_cpu_no_kernel_of_ours_compiles_ahead(run: RunPytest) -> None:
    result = run("--longca-kernels=naive,flex,flashmask", *WHERE[1:], "-k", "timing", "--longca-passes=fwd")
    result.stdout.no_fnmatch_line("*compiled ahead*")


def test_as_many_processes_as_were_asked_for_and_as_fit_the_device() -> None:
    short, long = (Run("flex", Case(mask=Causal(n, n), heads_q=64, heads_kv=64, head_dim=128, dtype="bf16")) for n in (1024, 131072))
    assert num_processes(7, [short] * 20, H200) == 7
    assert num_processes(7, [short] * 3, H200) == 3
    assert num_processes(12, [short, long] * 20, H200) == 2, "128K tokens take 17 GB, thrice"
    assert num_processes(None, [long] * 20, CPU) >= 1


@pytest.mark.parametrize(("kernel", "run", "num"), [("flashmask", [64 * K], 10), ("flex", [64 * K, 128 * K], 5)])
def test_a_long_case_that_a_shorter_one_serves_limits_no_processes(kernel: str, run: list[int], num: int) -> None:
    sizes: dict[str, Any] = {"heads_q": 64, "heads_kv": 8, "head_dim": 128, "dtype": "bf16"}
    runs = [Run(kernel, Case(mask=Causal(n, n), **sizes)) for n in (128 * K, 64 * K)]
    served = cheapest_of_alike(runs, lambda name: load(KERNELS[name])())
    assert sorted(one.case.seqlen_q for one in served) == run
    assert sorted(case.seqlen_q for cases in served.values() for case in cases) == [64 * K, 128 * K], "each case is served once"
    assert num_processes(12, list(served) * 20, H200) == num
