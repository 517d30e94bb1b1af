"""The five mechanisms on real gloo ranks, forward and backward, fp64, against the single-device reference."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pytest_longca.case import Case
from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.parallel.check import run_parallel
from pytest_longca.parallel.mechanisms import MECHANISMS, Mesh
from pytest_longca.parallel.pool import Pool
from pytest_longca.parallel.setup import Sharing

LIMIT = 1e-10
Pools = Callable[[int], Pool]
LENGTHS = (1, 30, 3, 7, 26)


def a_case(mask: str = "causal_document", heads: tuple[int, int] = (8, 2), seqlen: int = 67, **options: Any) -> Case:
    built = load(MASKS[mask])(doc_lens=LENGTHS) if mask == "causal_document" else load(MASKS[mask]).sample(Random(5), seqlen)
    return Case(mask=built, heads_q=heads[0], heads_kv=heads[1], head_dim=4, dtype="fp64", **options)


def assert_exact(pools: Pools, case: Case, sharing: Sharing) -> None:
    errors = run_parallel(pools(sharing.world), case, sharing)["errors"]
    assert max(errors.values()) <= LIMIT, (case.id, sharing, errors)


@pytest.mark.parametrize("mask", MASK_GROUPS["static"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_mechanism_is_exact_on_every_static_mask(pools: Pools, mask: str, world: int) -> None:
    case = a_case(mask)
    for mechanism in MECHANISMS:
        assert_exact(pools, case, Sharing(mechanism, world))


@pytest.mark.parametrize("mesh", ["1x1x4", "1x4x1", "4x1x1", "2x2x1", "2x1x2", "1x2x2"])
def test_every_mesh_of_four_is_exact_degenerate_ones_too(pools: Pools, mesh: str) -> None:
    for mechanism in ("ring_p2p", "ring_allgather"):
        assert_exact(pools, a_case(), Sharing(mechanism, 4, Mesh.parse(mesh)))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_global", "balanced", "striped"])
def test_every_layout_is_exact_on_a_three_dimensional_mesh(pools: Pools, layout: str) -> None:
    assert_exact(pools, a_case("prefix_lm_document"), Sharing("loongtrain", 8, Mesh(2, 2, 2), layout))


@pytest.mark.parametrize(("mask", "layout"), [("causal", "striped"), ("causal_document", "zigzag"), ("causal_sliding_window", "striped")])
def test_kernel_of_runs_is_exact_where_blocks_leave_out_rows_and_keys(pools: Pools, mask: str, layout: str) -> None:
    for sharing in (Sharing("ring_p2p", 4), Sharing("ring_allgather", 4), Sharing("loongtrain", 8, Mesh(2, 2, 2))):
        case = a_case(mask)
        errors = run_parallel(pools(sharing.world), case, replace(sharing, layout=layout), "naive_rounds:NaiveRounds")["errors"]
        assert max(errors.values()) <= LIMIT, (case.id, sharing, errors)


@pytest.mark.parametrize(("heads", "mesh"), [((8, 1), "1x2x4"), ((8, 2), "1x1x8"), ((4, 4), "2x2x2"), ((12, 6), "1x4x2")])
def test_any_head_counts_are_exact_with_replication_and_groups(pools: Pools, heads: tuple[int, int], mesh: str) -> None:
    assert_exact(pools, a_case(heads=heads), Sharing("usp", 8, Mesh.parse(mesh)))


def test_unequal_head_dims_are_exact(pools: Pools) -> None:
    for mechanism in MECHANISMS:
        assert_exact(pools, a_case(head_dim_v=6), Sharing(mechanism, 4))


def test_as_many_tokens_as_ranks_are_exact(pools: Pools) -> None:
    for mechanism in MECHANISMS:
        assert_exact(pools, a_case("causal", seqlen=8), Sharing(mechanism, 8))


@pytest.mark.parametrize("mesh", ["1x4x1", "2x2x1", "4x1x1"])
def test_ids_travel_as_the_plan_says(pools: Pools, mesh: str) -> None:
    for mechanism in ("ring_p2p", "ring_allgather"):
        sharing = Sharing(mechanism, 4, Mesh.parse(mesh), "zigzag")
        answer = run_parallel(pools(4), a_case(), sharing, target="cp_faults:ids_travel")
        assert answer["same"] and all(answer["same"])


def expected_traffic(case: Case, mesh: Mesh, gathers: bool) -> dict[str, int]:
    """Bytes and messages that a rank sends in one forward and backward: the formulas of docs/context-parallel.md, for equal shares."""
    size = 8
    tokens, width = case.seqlen_q // mesh.size, case.head_dim
    q, kv = case.heads_q * width, max(case.heads_kv, mesh.heads) * width
    block = 2 * kv * tokens * size  # a block's bytes, before the exchange and after it
    ring, u = mesh.ring, mesh.heads
    found = {}
    if u > 1:
        groups = min(3, max(case.heads_kv, u) // u)
        found |= {"all_to_all_bytes": 2 * (u - 1) * tokens * size * (2 * q + 2 * kv) // u, "all_to_all_messages": 4 * groups * (u - 1)}
    else:
        groups = 1
    if gathers:
        return found | {
            "gather_bytes": 2 * (ring - 1) * block,
            "gather_messages": 2 * (ring - 1),
            "reduce_scatter_bytes": (ring - 1) * block,
            "reduce_scatter_messages": ring - 1,
        }
    if ring > 1:  # blocks forward and backward, and their gradients
        found |= {"shift_bytes": 3 * (ring - 1) * block, "shift_messages": groups * 3 * (ring - 1)}
    return found


@pytest.mark.parametrize("heads", [(8, 2), (16, 8)])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_bytes_and_messages_equal_the_formulas(pools: Pools, mechanism: str, heads: tuple[int, int]) -> None:
    case = Case(mask=load(MASKS["full"])(64, 64), heads_q=heads[0], heads_kv=heads[1], head_dim=4, dtype="fp64")
    sharing = Sharing(mechanism, 8)
    traffic = run_parallel(pools(8), case, sharing)["traffic"]
    wanted = expected_traffic(case, sharing.mesh_for(case), sharing.row.gathers)
    assert traffic == [wanted] * 8


@pytest.mark.parametrize(
    ("sharing", "hops"),
    [
        (Sharing("ring_p2p", 2), [1]),
        (Sharing("ring_p2p", 4), [1, 2, 1]),
        (Sharing("ring_p2p", 8), [1, 2, 2, 2, 2, 2, 1]),
        (Sharing("ring_p2p", 4, Mesh(2, 2, 1)), [1, 1, 1]),
        (Sharing("ring_p2p", 8, Mesh(2, 4, 1)), [*[1, 2, 2] * 2, 1]),
        (Sharing("ring_p2p", 8, Mesh(4, 2, 1)), [*[1] * 4, 2, 2, 1]),
    ],
    ids=str,
)
def test_gradient_travels_in_fp32_only_where_it_is_a_sum_that_is_added_to(pools: Pools, sharing: Sharing, hops: list[int]) -> None:
    """A hop with one share, and the last one home, are in the operands' own dtype: half the bytes."""
    case = Case(mask=load(MASKS["full"])(64, 64), heads_q=2, heads_kv=1, head_dim=4, dtype="bf16")
    block = 2 * case.heads_kv * case.head_dim * case.seqlen_q // sharing.world * 2
    traffic = run_parallel(pools(sharing.world), case, sharing)["traffic"]
    assert [sent["shift_bytes"] for sent in traffic] == [block * (2 * (sharing.world - 1) + sum(hops))] * sharing.world


def test_bf16_error_does_not_grow_with_the_world(pools: Pools) -> None:
    """Partial results are rounded to bf16 once, whatever the number of ranks; lse, in fp32, once more at every merge."""
    case = Case(mask=load(MASKS["full"])(256, 256), heads_q=2, heads_kv=1, head_dim=16, dtype="bf16")
    alone, two, eight = (run_parallel(pools(world), case, Sharing("ring_p2p", world))["rms"] for world in (1, 2, 8))
    for name in alone:
        assert eight[name] <= 2 * alone[name], (name, alone, eight)
        assert name == "lse" or eight[name] <= 1.25 * two[name], (name, two, eight)
