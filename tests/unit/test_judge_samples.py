"""Samples and identities: an honest result passes, and a wrong tile, column or head is found without the full reference."""

import dataclasses

import pytest
import torch

from pytest_longca.case import Case, Values
from pytest_longca.checks import verify
from pytest_longca.identities import check_identities
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.judge import Result
from pytest_longca.kernels.naive import Naive
from pytest_longca.limits import MATRIX_TERMS
from pytest_longca.machine import CPU
from pytest_longca.mask import Mask, PredicateMask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalDocument, SharedQuestion
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.outcome import Passed
from pytest_longca.picked import PickedKeys, PickedQueries
from pytest_longca.samples import Choice, choose, judge_samples
from pytest_longca.truth import ALL_ROWS, SAMPLED, VERIFIED, verdicts

CASE = Case(mask=Causal(1024, 1024), heads_q=4, heads_kv=2, head_dim=64, dtype="bf16")


def run(case: Case, inputs: Inputs) -> Result:
    call = Naive().bind(case, inputs)
    out, lse = call.forward()
    return Result(out.detach(), lse, *call.backward(inputs.do))


@pytest.fixture(scope="module")
def honest() -> tuple[Inputs, Result]:
    inputs = make_inputs(CASE)
    return inputs, run(CASE, inputs)


def wrong_names(case: Case, inputs: Inputs, result: Result, choice: Choice) -> set[str]:
    return {verdict.tensor for verdict in judge_samples(case, inputs, result, choice) if not verdict.ok}


@pytest.mark.parametrize(
    "mask", [CausalDocument((5, 0, 40, 1, 33)), SharedQuestion((9, 30, 14)), PredicateMask(lambda b, h, q, kv: (q + kv) % 3 > 0, 50, 50)]
)
def test_picked_rows_and_keys_see_what_they_saw(mask: Mask) -> None:
    picked = torch.tensor([0, 3, 4, 17, 40, 41, 49])
    dense = mask.dense()
    for view, expected in ((PickedQueries(mask, picked), dense[:, :, picked]), (PickedKeys(mask, picked), dense[..., picked])):
        assert torch.equal(view.dense(), expected)
        rows = view.row_intervals()
        if rows is not None:
            keys = torch.arange(expected.shape[-1])
            runs = (keys >= rows[..., :1]) & (keys < rows[..., 1:])  # [1, 1, rows, 2, keys]
            assert torch.equal(runs.any(-2), expected)
            assert bool((rows[..., 0, 1] >= rows[..., 1, 1].clamp(max=0)).all())


def test_a_short_case_is_judged_in_full_and_a_long_one_by_samples() -> None:
    assert choose(CASE).is_full
    choice = choose(Case(mask=Causal(524288, 524288), heads_q=64, heads_kv=8, head_dim=128))
    assert not choice.is_full and choice.heads_kv == (0,)
    tiles = (choice.queries // 128).unique()
    assert len(tiles) == 4096 and {0, 524287} <= set(choice.queries.tolist())
    assert 2**31 // (64 * 128) in choice.queries.tolist()
    assert choose(CASE, budget=CASE.area / 2).heads_kv == (0,)


@pytest.mark.parametrize("values", [Values.NORMAL, Values.BIASED, Values.PEAKED])
@pytest.mark.parametrize("mask", [Causal(512, 640), CausalDocument((200, 1, 0, 300, 11)), Full(300, 300)], ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_honest_result_passes(mask: Mask, values: Values, dtype: str) -> None:
    case = Case(mask=mask, batch=2, heads_q=4, heads_kv=2, head_dim=32, dtype=dtype, values=values)
    inputs = make_inputs(case)
    result = run(case, inputs)
    wrong = [verdict for verdict in judge_samples(case, inputs, result, choose(case, budget=case.area / 4)) if not verdict.ok]
    assert not wrong
    if dtype == "bf16":
        assert not [identity for identity in check_identities(case, inputs, result) if not identity.ok]


def without_tile(inputs: Inputs, head: int, row: int, key: int, size: int) -> Result:
    """CASE as a kernel gives it that skips one tile of one head, in the forward and in the backward."""
    causal = CASE.mask.predicate()

    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        tile = (h == head) & (q >= row) & (q < row + size) & (kv >= key) & (kv < key + size)
        return causal(b, h, q, kv) & ~tile

    return run(dataclasses.replace(CASE, mask=PredicateMask(mod, 1024, 1024, num_heads=4)), inputs)


def test_a_skipped_tile_anywhere_is_found_by_samples(honest: tuple[Inputs, Result]) -> None:
    inputs, _ = honest
    choice = dataclasses.replace(choose(CASE, budget=1), heads_kv=())
    generator = torch.Generator().manual_seed(5)
    for _ in range(6):
        tile = torch.randint(0, 8, (2,), generator=generator).sort(descending=True).values * 128
        result = without_tile(inputs, int(torch.randint(0, 4, (), generator=generator)), int(tile[0]), int(tile[1]), 128)
        assert {"out", "lse", "dv"} <= wrong_names(CASE, inputs, result, choice)


def test_a_skipped_tile_breaks_the_sum_of_dv_only_if_the_forward_has_it(honest: tuple[Inputs, Result]) -> None:
    inputs, right = honest
    skipped = without_tile(inputs, 1, 512, 256, 128)
    forward_only = dataclasses.replace(right, out=skipped.out)
    broken = {identity.name for identity in check_identities(CASE, inputs, forward_only) if not identity.ok}
    assert "<do, out> = <v, dv>" in broken
    backward_only = dataclasses.replace(right, dv=skipped.dv, dk=skipped.dk)
    broken = {identity.name for identity in check_identities(CASE, inputs, backward_only) if not identity.ok}
    assert {"<do, out> = <v, dv>", "<q, dq> = <k, dk>"} <= broken


def test_identities_see_one_wrong_key_column_and_a_lost_head(honest: tuple[Inputs, Result]) -> None:
    inputs, right = honest
    dv = right.dv.clone()
    dv[0, 600:728, 1] = 0
    broken = {identity.name: identity for identity in check_identities(CASE, inputs, dataclasses.replace(right, dv=dv))}
    assert not broken["sum of dv = sum of do"].ok and broken["sum of dv = sum of do"].head_kv == 1
    dk = right.dk.clone()
    dk[0, 600:728, 0] *= 2
    assert not {i.name: i for i in check_identities(CASE, inputs, dataclasses.replace(right, dk=dk))}["sum of dk = 0"].ok


def truncated(x: torch.Tensor) -> torch.Tensor:
    """fp64 cut off to fp32 towards 0, as matrix units do after each step."""
    nearest = x.float().double()
    return torch.where(nearest.abs() > x.abs(), torch.nextafter(nearest.float(), torch.zeros(())).double(), nearest)


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x[None, :, None].bfloat16()


@pytest.fixture(scope="module")
def long_sums() -> tuple[Case, Inputs, Result, torch.Tensor]:
    """A case whose dv are sums of 2^18 terms, added up by matrix units that cut off; and what one tile of 128 x 128 adds to dv."""
    num_queries, num_keys = 2**18, 512
    case = Case(mask=Full(num_queries, num_keys), heads_q=1, heads_kv=1, head_dim=16, dtype="bf16")
    inputs = make_inputs(case)
    q, k, v, do = (x[0, :, 0].double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    out, dv = torch.empty_like(q), torch.zeros_like(k)
    for rows in torch.arange(num_queries).split(2**13):
        p = (q[rows] @ k.T * case.scale).softmax(-1)
        out[rows] = p @ v
        p = p.bfloat16().double()
        for step in torch.arange(len(rows)).split(MATRIX_TERMS):
            dv = truncated(dv + p[step].T @ do[rows[step]])
    tile = (q[:128] @ k.T * case.scale).softmax(-1)[:, :128].T @ do[:128]
    dk, dq = torch.zeros_like(k), torch.zeros_like(q)  # right or not, they are not looked at
    return case, inputs, Result(as_given(out), None, as_given(dq), as_given(dk), as_given(dv)), tile


def test_the_sum_of_dv_allows_what_matrix_units_cut_off(long_sums: tuple[Case, Inputs, Result, torch.Tensor]) -> None:
    case, inputs, result, tile = long_sums
    identities = {identity.name: identity for identity in check_identities(case, inputs, result)}
    assert identities["sum of dv = sum of do"].ok and identities["<do, out> = <v, dv>"].ok
    dv = result.dv.clone()
    dv[0, :128, 0] -= tile.to(dv.dtype)
    broken = {identity.name: identity for identity in check_identities(case, inputs, dataclasses.replace(result, dv=dv))}
    assert broken["sum of dv = sum of do"].error_over_limit > 5


def test_a_sampled_fault_has_the_place_of_the_whole(honest: tuple[Inputs, Result]) -> None:
    inputs, right = honest
    choice = dataclasses.replace(choose(CASE, budget=1), heads_kv=())
    row = int(choice.queries[5])
    dq = right.dq.clone()
    dq[0, row, 2] += 1
    (verdict,) = (verdict for verdict in judge_samples(CASE, inputs, dataclasses.replace(right, dq=dq), choice) if not verdict.ok)
    assert verdict.place is not None and (verdict.place.row, verdict.place.head) == (row, 2)
    assert f"row {row}" in verdict.message


def test_keys_are_judged_without_a_kernels_lse(honest: tuple[Inputs, Result]) -> None:
    inputs, right = honest
    without = dataclasses.replace(right, lse=None)
    assert not wrong_names(CASE, inputs, without, choose(CASE, budget=CASE.area / 2))


def test_verify_judges_a_long_case_by_samples_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    full = verify(Naive(), CASE, CPU, ["truth"])
    assert full.outcome == Passed() and full.facts[VERIFIED] == ALL_ROWS
    monkeypatch.setattr("pytest_longca.truth.CPU_BUDGET_PAIRS", CASE.area / 2)
    sampled = verify(Naive(), CASE, CPU, ["truth"])
    assert sampled.outcome == Passed() and sampled.facts[VERIFIED] == SAMPLED
    assert set(sampled.worst) == {"out", "lse", "dq", "dk", "dv"}


def test_a_broken_identity_is_a_verdict(honest: tuple[Inputs, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_longca.truth.CPU_BUDGET_PAIRS", 1)
    inputs, right = honest
    dv = right.dv.clone()
    unseen = [key for key in range(600, 728) if key not in set(choose(CASE, 1).keys.tolist())]
    dv[0, unseen, 1] = 0
    (verdict,) = (v for v in verdicts(CASE, inputs, dataclasses.replace(right, dv=dv)) if not v.ok)
    assert verdict.tensor == "dv" and "does not hold in batch 0, key/value head 1" in verdict.message


def test_heads_with_masks_of_their_own_are_judged_by_samples() -> None:
    block_map = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    case = Case(mask=UniformBlock(512, 512, 64, block_map), heads_q=4, heads_kv=2, head_dim=32, dtype="bf16")
    inputs = make_inputs(case)
    result = run(case, inputs)
    choice = dataclasses.replace(choose(case, budget=1), heads_kv=(1,))
    assert not wrong_names(case, inputs, result, choice)
    dk = result.dk.clone()
    dk[0, int(choice.keys[3]), 1] *= 1.5
    (verdict,) = (v for v in judge_samples(case, inputs, dataclasses.replace(result, dk=dk), choice) if not v.ok)
    assert verdict.place is not None and (verdict.place.head, verdict.place.row) == (1, int(choice.keys[3]))
