"""--longca-mechanisms: cells shared among ranks, judged as a whole; what does not fit says why, a rank that dies is an outcome."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_longca.parallel.mechanisms import MECHANISMS
from tests.plugin.conftest import Run

USAGE = pytest.ExitCode.USAGE_ERROR
MECHANISM = """
from pytest_longca.parallel.mechanisms import Mechanism, Mesh

def pytest_longca_mechanisms():
    return [Mechanism("ring_of_pairs", "pairs share heads", lambda world, heads, ranks_per_node: Mesh(inner=world // 2, heads=2))]
"""
OWN = """
from pytest_longca.kernels.naive import Naive
from pytest_longca.mask import from_mask_mod
from pytest_longca.parallel.kernel import NaiveBlock

class Mine(Naive, NaiveBlock):
    name = "mine"

class Dying(Mine):
    name = "dying"

    def block_backward(self, *operands):
        import os
        os._exit(7)

class Wrong(Mine):
    name = "wrong"

    def block_backward(self, *operands):
        dq, dk, dv = super().block_backward(*operands)
        return dq, dk * 1.05, dv

def pytest_longca_kernels():
    return [Mine(), Dying(), Wrong()]

def pytest_longca_masks():
    return [from_mask_mod("ring_mask", lambda b, h, q, kv: (q >= kv) & (kv % 7 < 7), two_runs_a_row=True)]
"""


@pytest.fixture
def shared(run: Run) -> Run:
    """Share fp64 cells of naive between two ranks."""

    def shared(*args: str) -> pytest.RunResult:
        given = " ".join(args)
        defaults = {"kernels": "naive", "dtypes": "fp64", "world-sizes": "2", "masks": "causal_document"}
        return run(*(f"--longca-{name}={value}" for name, value in defaults.items() if f"--longca-{name}" not in given), *args)

    return shared


def said(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines + result.errlines)


def records() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("cp.jsonl").read_text().splitlines()]


def test_every_mechanism_is_a_cell_with_a_record_and_nothing_else_runs(shared: Run) -> None:
    result = shared(f"--longca-mechanisms={','.join(MECHANISMS)}", "--longca-masks=full,prefix_lm_document", "--longca-json=cp.jsonl")
    result.assert_outcomes(passed=2 * len(MECHANISMS))
    found = records()
    assert {record["mechanism"] for record in found} == set(MECHANISMS)
    assert all(record["world_size"] == 2 and record["comm_bytes"] and record["stage"] == "parallel" for record in found)
    assert all(verdict["error_over_limit"] <= 1 for record in found for verdict in record["verdicts"])
    assert all({verdict["tensor"] for verdict in record["verdicts"]} == {"out", "lse", "dq", "dk", "dv"} for record in found)


def test_the_papers_preset_checks_every_mechanism_and_ends_with_the_predicted_table(shared: Run, pytester: pytest.Pytester) -> None:
    result = shared("--longca-preset=paper-cp", "--longca-masks=full", "--longca-md=summary.md", "--longca-html=page.html")
    result.assert_outcomes(passed=len(MECHANISMS))
    for text in (said(result), (pytester.path / "summary.md").read_text(), (pytester.path / "page.html").read_text()):
        assert "Predictions, fa2 on an H200: context parallel" in text and "causal_document bwd loongtrain" in text
        assert "Predictions, not measurements" in text


def test_a_row_of_the_table_comes_from_a_conftest(shared: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(MECHANISM)
    shared("--longca-mechanisms=ring_of_pairs", "--longca-json=cp.jsonl").assert_outcomes(passed=1)
    assert [record["mechanism"] for record in records()] == ["ring_of_pairs"]


def test_strangers_reach_the_ranks_and_one_that_dies_or_is_wrong_costs_the_others_nothing(shared: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(OWN)
    kernels = "--longca-kernels=dying,wrong,mine"
    result = shared("--longca-mechanisms=ring_allgather", kernels, "--longca-masks=ring_mask", "--longca-json=cp.jsonl")
    result.assert_outcomes(passed=1, failed=2)
    outcomes = {record["kernel"]: record["outcome"] for record in records()}
    assert outcomes["dying"]["kind"] == "crashed" and "exited with status 7" in outcomes["dying"]["reason"]
    assert outcomes["wrong"]["kind"] == "wrong" and outcomes["mine"]["kind"] == "passed"
    message = next(line for line in result.outlines if "wrong shared by ring_allgather among 2 ranks" in line)
    assert "dk:" in message and "dq:" not in message


def test_a_mesh_of_another_size_than_the_world_is_skipped_with_its_reason(shared: Run) -> None:
    result = shared("--longca-mechanisms=usp", "--longca-mesh=1x65x1", "--longca-world-sizes=2,65", "-rs")
    result.assert_outcomes(skipped=2)
    assert "mesh 1x65x1 has 65 ranks and the world 2" in said(result)


def test_what_cannot_be_shared_is_skipped_with_its_reason(shared: Run) -> None:
    masks, kernels = "--longca-masks=causal,uniform_block", "--longca-kernels=naive,sdpa"
    result = shared("--longca-mechanisms=ulysses,ring_p2p", "--longca-world-sizes=65", masks, kernels, "-rs")
    result.assert_outcomes(skipped=2 * 2 * 2)
    for words in (
        "65 ranks on the heads axis and 8 query heads",
        "64 tokens and 65 ranks",
        "uniform_block has no such form",
        "sdpa offers no",
    ):
        assert words in said(result)
    offers = next(line for line in said(result).splitlines() if "SKIPPED" in line and "sdpa offers no" in line)
    assert "flashmask" in offers and "fa2_torch" not in offers, "what --longca-kernels does not know is not recommended"


def test_what_a_block_kernel_refuses_is_told_before_any_rank_starts(shared: Run) -> None:
    result = shared("--longca-mechanisms=ulysses", "--longca-kernels=flex", "--longca-dtypes=fp32", "-rs")
    result.assert_outcomes(skipped=1)
    assert "as a block kernel, flex runs on cuda only" in said(result)


def test_without_names_a_cpu_shares_what_it_does_not_interpret(run: Run) -> None:
    result = run("--longca-mechanisms=ulysses", "--longca-world-sizes=2", "--longca-masks=causal,full", "--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        f"longca/test_parallel.py::test_shared[ulyssesx2-naive-{mask}]" for mask in ("causal", "full")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--longca-mechanisms=usb", "did you mean 'usp'"),
        ("--longca-mesh=2x2", "--longca-mesh: mesh '2x2': three sizes, outer ring x inner ring x heads, as in 2x2x2"),
        ("--longca-mesh=2x2x2", "--longca-mesh: 2x2x2 are 8 ranks, and --longca-world-sizes has none but 2: their product must be one"),
    ],
)
def test_what_names_nothing_ends_the_run_before_it_starts(shared: Run, arguments: str, words: str) -> None:
    result = shared("--longca-mechanisms=usp", arguments)
    assert result.ret == USAGE and words in said(result)


@pytest.mark.parametrize(
    ("conftest", "words"),
    [
        ("def pytest_longca_mechanisms(): return ['ring']", "return pytest_longca.parallel.mechanisms.Mechanism"),
        (MECHANISM.replace("ring_of_pairs", "usp"), "two mechanisms are named 'usp'"),
    ],
)
def test_a_wrong_row_is_refused(shared: Run, pytester: pytest.Pytester, conftest: str, words: str) -> None:
    pytester.makeconftest(conftest)
    result = shared("--longca-mechanisms=usp")
    assert result.ret == USAGE and words in said(result)


def test_ranks_with_different_options_fail_with_that_reason_and_do_not_hang(pytester: pytest.Pytester) -> None:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = str(sock.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    cells = ("--longca-mechanisms=usp", "--longca-kernels=naive", "--longca-dtypes=fp64", "-p", "no:cacheprovider")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *cells, f"--longca-masks={masks}"],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=pytester.path, stdout=subprocess.PIPE, text=True,
        )
        for rank, masks in enumerate(("full,causal", "causal"))
    ]  # fmt: skip
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "the ranks were started with different options; give every rank the same command line" in said[0]
    assert "2 failed" in said[0] and "failed" not in said[1]


def test_under_torchrun_the_sessions_own_ranks_share_and_rank_0_reports(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(OWN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    cells = ("--longca-mechanisms=usp", "--longca-kernels=mine,wrong", "--longca-masks=ring_mask", "--longca-dtypes=fp64")
    result = pytester.run(*command, "-m", "pytest", "-p", "no:cacheprovider", *cells, "--longca-json=cp.jsonl")
    assert result.ret == 1
    assert sum("1 failed, 1 passed" in line for line in result.outlines) == 1
    assert {record["kernel"]: record["outcome"]["kind"] for record in records()} == {"mine": "passed", "wrong": "wrong"}
    assert len(records()) == 2 and {record["world_size"] for record in records()} == {2}
