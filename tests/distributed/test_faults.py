"""What must not pass: misbehaving communicators are seen, ranks that die or hang are outcomes, nothing is left behind."""

import os
from collections.abc import Callable

import pytest
import torch

from pytest_longca.case import Case
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import DidNotRun, InvalidArgument
from pytest_longca.outcome import Crashed, TimedOut
from pytest_longca.parallel.check import run_parallel
from pytest_longca.parallel.mechanisms import Mesh
from pytest_longca.parallel.pool import Pool
from pytest_longca.parallel.setup import Sharing

Pools = Callable[[int], Pool]
RING = Sharing("ring_p2p", 4)


def a_case(seqlen: int = 64, **options: int) -> Case:
    return Case(mask=load(MASKS["full"])(seqlen, seqlen), **{"heads_q": 4, "heads_kv": 2, "head_dim": 4, "dtype": "fp64", **options})


@pytest.mark.parametrize(
    ("fault", "tensors"),
    [("local_keys", {"dq", "dk", "dv"}), ("one_rank_off", {"dk", "dv"}), ("bf16_accumulation", {"out", "dq"})],
)
def test_fault_is_caught_in_the_tensors_that_it_spoils(pools: Pools, fault: str, tensors: set[str]) -> None:
    errors = run_parallel(pools(4), a_case(), RING, target=f"cp_faults:{fault}")["errors"]
    assert tensors <= {name for name, error in errors.items() if error > 1e-6}


def test_honest_run_after_a_fault_is_exact(pools: Pools) -> None:
    assert max(run_parallel(pools(4), a_case(), RING)["errors"].values()) <= 1e-10


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        ("rank_1_dies", Crashed, "rank 1 of 2 exited with status 7"),
        ("rank_1_raises", Crashed, "rank 1 of 2 raised ValueError: no such thing"),
        ("rank_1_hangs", TimedOut, "of 2 within 3 s"),
    ],
)
def test_failing_rank_is_an_outcome_and_leaves_no_process(pools: Pools, fault: str, outcome: type, words: str) -> None:
    pool, sharing = pools(2), Sharing("ring_p2p", 2)
    run_parallel(pool, a_case(), sharing)
    pids = pool.pids
    with pytest.raises(DidNotRun) as stopped:
        run_parallel(pool, a_case(), sharing, timeout_s=3.0, target=f"cp_faults:{fault}")
    assert isinstance(stopped.value.outcome, outcome) and words in str(stopped.value.outcome)
    assert not any(_is_alive(pid) for pid in pids)
    assert max(run_parallel(pool, a_case(), sharing)["errors"].values()) <= 1e-10


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("case", "sharing", "words"),
    [
        (a_case(), Sharing("ring_p2p", 4, Mesh(1, 3, 1)), "mesh 1x3x1 has 3 ranks and the world 4"),
        (a_case(), Sharing("ulysses", 8), "8 ranks on the heads axis and 4 query heads"),
        (a_case(heads_q=9, heads_kv=3), Sharing("ulysses", 4), "9 query heads do not divide among 4 ranks"),
        (a_case(heads_q=12, heads_kv=3), Sharing("ulysses", 2), "3 key/value heads neither divide among 2 ranks nor into them"),
        (a_case(seqlen=3), RING, "3 tokens and 4 ranks"),
        (a_case(batch=2), RING, "batch is 2"),
        (a_case(), Sharing("ring", 4), "unknown mechanism 'ring'"),
        (a_case(), Sharing("ring_p2p", 4, layout="zigzags"), "did you mean 'zigzag'"),
        (Case(mask=load(MASKS["causal"])(8, 9), dtype="fp64"), RING, "seqlen_q 8 and seqlen_kv 9 must be equal"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(case: Case, sharing: Sharing, words: str) -> None:
    pool = Pool(sharing.world)
    with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
        run_parallel(pool, case, sharing)
    assert pool.pids == []


def test_ranks_with_different_options_are_seen(pools: Pools) -> None:
    for answer in pools(4).call("cp_faults:different_options", {}):
        assert answer["same"] == [True, True]


def test_torchs_context_gives_leaves_of_a_share_and_ends(pools: Pools) -> None:
    for answer in pools(2).call("cp_faults:torch_context", {"case": a_case(seqlen=16).id}):
        assert all(answer["same"])
        assert answer["shapes"] == [[1, heads, 8, 4] for heads in (4, 2, 2, 4)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_ranks_without_a_gpu_say_so() -> None:
    with Pool(2, "cuda") as pool, pytest.raises(DidNotRun, match="no GPU is visible to the ranks"):
        pool.call("cp_faults:different_options", {})
    assert pool.pids == []


def test_malformed_mesh_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="2x2x2"):
        Mesh.parse("2x2")


def test_kernel_that_refuses_the_case_says_why_and_the_world_lives(pools: Pools) -> None:
    pool = pools(2)
    run_parallel(pool, a_case(), Sharing("ring_p2p", 2))
    pids = pool.pids
    with pytest.raises(DidNotRun, match="fa2 runs on cuda only"):
        run_parallel(pool, a_case(dtype="bf16", head_dim=64), Sharing("ring_p2p", 2), kernel="fa2_torch")
    assert pool.pids == pids
