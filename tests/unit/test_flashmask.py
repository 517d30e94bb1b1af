"""FlashMask in Triton's interpreter against a dense float64 computation: every static mask, awkward sizes, every operand layout."""

import dataclasses
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_longca import catalogue
from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.kernels.flashmask import HOPPER, IEEE, PORTABLE, FlashMask, choose_launch, plan_case
from pytest_longca.kernels.flashmask_forward import place
from pytest_longca.kernels.flashmask_plan import Launch
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Mask, PredicateMask
from pytest_longca.masks.document import CausalDocument, FullDocument, SharedQuestion
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full, FullSlidingWindow

STATIC = catalogue.MASK_GROUPS["static"]
NAMES = ("out", "lse", "dq", "dk", "dv")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton was imported for a GPU, not for its interpreter")


def sampled(name: str, seqlen: int, seed: int = 0) -> Mask:
    mask: Mask = catalogue.load(catalogue.MASKS[name]).sample(Random(f"{name}:{seqlen}:{seed}"), seqlen)
    return mask


def heads_first(x: Tensor, group: int = 1) -> Tensor:
    return x.double().transpose(1, 2).repeat_interleave(group, 1)


def over_group(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


def dense_attention(case: Case, x: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(values, limits) of out, lse, dq, dk, dv in float64, BHSD.

    A limit is the sum of the absolute terms that make an element, times what rounding can change in them: inputs' dtype once for P,
    dS, out and the result, fp32 for every sum, and in P the error of the score, which grows with |q| |k| and with |lse|.
    """
    group, u = case.group, 2.0**-24
    half = {"fp32": u, "fp16": 2.0**-11}[case.dtype]
    q, do, k, v = heads_first(x.q), heads_first(x.do), heads_first(x.k, group), heads_first(x.v, group)
    visible = case.mask.dense()
    score = (q @ k.mT * case.scale).masked_fill(~visible, float("-inf"))
    lse = score.logsumexp(-1)
    p = torch.exp(score - lse[..., None]).nan_to_num(0.0)
    out = p @ v
    dp = do @ v.mT
    ds = p * (dp - (do * out).sum(-1, keepdim=True))
    values = {
        "out": out,
        "lse": lse,
        "dq": ds @ k * case.scale,
        "dk": over_group(ds.mT @ q, group) * case.scale,
        "dv": over_group(p.mT @ do, group),
    }
    size = q.abs() @ k.abs().mT * case.scale
    score_error = (2 * (case.head_dim + 8) * u * size + 8 * u * lse.abs().nan_to_num(posinf=0.0)[..., None]).amax(-1, keepdim=True)
    p_error = p * (2 * score_error + (case.seqlen_kv + 16) * u + 2 * half)
    ds_error = (p_error + p * ((case.head_dim_v + 8) * u + 2 * half)) * (do.abs() @ v.abs().mT + (do * out).abs().sum(-1, keepdim=True))
    sums = (case.seqlen_q * group + 16) * u + 2 * half
    limits = {
        "out": p_error @ v.abs() + half * out.abs(),
        "lse": score_error[..., 0] + (case.seqlen_kv + 16) * u * (1 + lse.abs().nan_to_num(posinf=0.0)),
        "dq": (ds_error @ k.abs()) * case.scale + half * values["dq"].abs(),
        "dk": over_group((ds_error + sums * ds.abs()).mT @ q.abs(), group) * case.scale + half * values["dk"].abs(),
        "dv": over_group((p_error + sums * p).mT @ do.abs(), group) + half * values["dv"].abs(),
    }
    return values, limits


def run(case: Case, x: Inputs) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of the kernel, BHSD."""
    call = FlashMask().bind(case, x)
    out, lse = call.forward()
    assert lse is not None
    dq, dk, dv = call.backward(x.do)
    assert out.dtype is dq.dtype is dk.dtype is dv.dtype is x.q.dtype and lse.dtype is torch.float32
    return {"lse": lse.detach().double()} | {n: heads_first(t.detach()) for n, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}


def worst(case: Case, x: Inputs, got: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor as a fraction of its limit; inf for what is not equal where the limit is 0 or infinite."""
    values, limits = dense_attention(case, x)
    fractions = {}
    for name in NAMES:
        error, equal = (got[name] - values[name]).abs(), got[name] == values[name]
        fractions[name] = float(torch.where(equal, 0.0, error / limits[name]).nan_to_num(float("inf")).amax())
    return fractions


def judge(case: Case, x: Inputs | None = None) -> None:
    x = x or make_inputs(case)
    fractions = worst(case, x, run(case, x))
    assert max(fractions.values()) <= 1.0, f"{case}: error over limit {fractions}"


@interpreted
@pytest.mark.parametrize("seqlen", [1, 33, 63])
@pytest.mark.parametrize("name", STATIC)
def test_out_lse_and_gradients_are_those_of_the_dense_mask(name, seqlen):
    judge(Case(mask=sampled(name, seqlen), heads_q=2, heads_kv=1, head_dim=16, seed=seqlen))


@interpreted
@pytest.mark.parametrize("name", STATIC)
def test_fp16_is_right_on_every_static_mask(name):
    judge(Case(mask=sampled(name, 40, seed=1), heads_q=1, head_dim=32, dtype="fp16", seed=7))


@interpreted
@pytest.mark.parametrize(
    "mask",
    [
        Causal(40, 70),
        Causal(70, 40),  # the first 30 queries see nothing
        FullSlidingWindow(33, 65, 9),
        CausalSlidingWindow(64, 32, 0),
        Full(1, 64),
        FullDocument((20, 0, 30), (0, 25, 31)),  # queries without keys, and keys without queries
        CausalDocument((0, 40, 1, 0, 9), (7, 33, 0, 2, 20)),
    ],
    ids=str,
)
def test_unequal_lengths_and_empty_documents_are_right(mask):
    judge(Case(mask=mask, heads_q=2, heads_kv=1, head_dim=16))


@interpreted
def test_rows_that_see_nothing_are_exact_zeros_with_lse_minus_infinity():
    case = Case(mask=Causal(70, 40), head_dim=16)
    got = run(case, make_inputs(case))
    assert (got["out"][:, :, :30] == 0).all() and (got["dq"][:, :, :30] == 0).all()
    assert (got["lse"][:, :, :30] == float("-inf")).all() and got["lse"][:, :, 30:].isfinite().all()


@interpreted
@pytest.mark.parametrize(("heads_q", "heads_kv", "batch"), [(2, 2, 1), (4, 2, 2), (3, 1, 1)])
def test_heads_and_batches_keep_to_themselves(heads_q, heads_kv, batch):
    judge(Case(mask=CausalDocument((15, 18)), heads_q=heads_q, heads_kv=heads_kv, batch=batch, head_dim=16))


@interpreted
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 24), (40, 40), (72, 72), (32, 64), (72, 24), (128, 128), (256, 256)])
def test_head_dims_are_padded_and_may_differ(head_dim, head_dim_v):
    judge(Case(mask=Causal(35, 35), heads_q=2, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v))


@interpreted
@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_of_every_operand_is_right(layout):
    judge(Case(mask=Causal(33, 40), heads_q=4, heads_kv=2, head_dim=16, layouts=(layout,) * 4))


@interpreted
@pytest.mark.parametrize("values", list(Values))
def test_hostile_values_are_right(values):
    judge(Case(mask=SharedQuestion((9, 20, 11)), head_dim=16, values=values))


@interpreted
def test_an_expanded_gradient_is_right():
    case = Case(mask=Causal(20, 20), head_dim=16)
    x = make_inputs(case)
    judge(case, dataclasses.replace(x, do=torch.ones(()).expand(x.do.shape)))


@interpreted
def test_a_batch_of_masks_gives_each_batch_its_own():
    lens = torch.tensor([40, 13])

    class PerBatch(PredicateMask):
        @property
        def batch(self) -> int:
            return 2

        def dense(self, device="cpu"):
            b, i, j = torch.arange(2)[:, None, None, None], torch.arange(40)[:, None], torch.arange(40)
            return self.mod(b, torch.zeros(()), i, j)

        def row_intervals(self, device="cpu"):
            end = lens[:, None].minimum(torch.arange(1, 41))
            rows = torch.zeros(2, 1, 40, 2, 2, dtype=torch.int32)
            rows[:, 0, :, 0, 1] = end
            return rows

    mask = PerBatch(lambda b, h, i, j: (j <= i) & (j < lens[b]), 40, 40)
    judge(Case(mask=mask, batch=2, heads_q=4, heads_kv=2, head_dim=16))


@interpreted
def test_two_runs_give_the_same_bits():
    case = Case(mask=sampled("shared_question", 50), heads_q=2, heads_kv=1, head_dim=16)
    first, second = (run(case, make_inputs(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@interpreted
def test_key_blocks_split_over_their_query_heads_sum_to_the_same_gradients():
    from pytest_longca.kernels.flashmask_attention import attention_backward, attention_forward

    case = Case(mask=sampled("shared_question", 60), heads_q=4, heads_kv=2, head_dim=16)
    x = make_inputs(case)
    launch = dataclasses.replace(choose_launch(16, torch.float32, torch.device("cpu")), processors=500)
    plan = plan_case(case, launch, torch.device("cpu"))
    assert plan.dkdv is not None and plan.dkdv.slots > 0
    out, lse = attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    dq, dk, dv = attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, launch)
    got = {"lse": lse.double()} | {n: heads_first(t) for n, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    assert max(worst(case, x, got).values()) <= 1.0


@pytest.mark.parametrize("table", [HOPPER, PORTABLE, IEEE], ids=["hopper", "portable", "ieee"])
def test_the_tiles_of_every_class_of_head_dims_can_be_launched_together(table):
    assert [Launch(*tiles).dq.block % tiles[2].step for tiles in table.values()] == [0, 0, 0]


@interpreted
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (16, 24)])
@pytest.mark.parametrize("name", ["causal_document", "global_sliding_window"])
def test_the_tiles_of_hopper_are_right_on_lengths_that_fill_none(name, head_dim, head_dim_v):
    from pytest_longca.kernels.flashmask_attention import attention_backward, attention_forward

    case = Case(mask=sampled(name, 150), heads_q=2, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v)
    x, launch = make_inputs(case), Launch(*HOPPER[128], processors=4)
    plan = plan_case(case, launch, torch.device("cpu"))
    out, lse = attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    dq, dk, dv = attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, launch)
    got = {"lse": lse.double()} | {n: heads_first(t) for n, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    assert max(worst(case, x, got).values()) <= 1.0


@interpreted
def test_gradients_of_parts_under_the_merged_softmax_add_up_to_the_whole():
    """What context parallelism does: each part sees some keys, and gets the out and lse of all."""
    from pytest_longca.kernels.flashmask_attention import attention_backward

    whole = Case(mask=Causal(60, 60), heads_q=2, heads_kv=1, head_dim=16)
    x = make_inputs(whole)
    call = FlashMask().bind(whole, x)
    out, lse = call.forward()
    launch = choose_launch(16, torch.float32, torch.device("cpu"))
    parts = []
    for first, last in ((0, 37), (37, 60)):
        mask = PredicateMask(lambda b, h, i, j, first=first: j + first <= i, 60, last - first)
        case = dataclasses.replace(whole, mask=mask)
        plan = plan_case(case, launch, torch.device("cpu"))
        k, v = x.k[:, first:last], x.v[:, first:last]
        parts.append(attention_backward(x.do, x.q, k, v, out.detach(), lse, plan, whole.scale, launch))
    grads = parts[0][0] + parts[1][0], torch.cat([p[1] for p in parts], 1), torch.cat([p[2] for p in parts], 1)
    got = {"lse": lse.double(), "out": heads_first(out.detach())} | dict(zip(("dq", "dk", "dv"), map(heads_first, grads), strict=True))
    assert max(worst(whole, x, got).values()) <= 1.0


@interpreted
@pytest.mark.parametrize("wrong", [Causal(64, 64), CausalSlidingWindow(64, 64, 21), FullSlidingWindow(64, 64, 20)], ids=str)
def test_the_limits_catch_a_mask_that_is_wrong_by_little(wrong):
    right = Case(mask=CausalSlidingWindow(64, 64, 20), head_dim=16)
    x = make_inputs(right)
    fractions = worst(right, x, run(dataclasses.replace(right, mask=wrong), x))
    assert min(fractions.values()) > 100


@triton.jit
def placed_kernel(seen, items, num_items, bulk, head_block, heads, blocks):
    """Writes (entry, block, batch, head) of each program."""
    _item, entry, block, batch, head = place(items, num_items, bulk, head_block, heads, blocks)
    at = seen + 4 * tl.program_id(0)
    tl.store(at, entry)
    tl.store(at + 1, block)
    tl.store(at + 2, batch)
    tl.store(at + 3, head)


@interpreted
@pytest.mark.parametrize(("bulk", "head_block"), [(0, 1), (0, 2), (3, 1), (3, 2), (5, 1), (5, 4)])
def test_every_head_of_every_batch_takes_every_item_once_in_any_order(bulk, head_block):
    batch, heads, blocks = 2, 4, 5
    items = torch.zeros(blocks, 16, dtype=torch.int32)
    items[:, 0] = torch.tensor([4, 1, 0, 3, 2])
    seen = torch.full((blocks * batch * heads, 4), -1, dtype=torch.int32)
    placed_kernel[(len(seen),)](seen, items, blocks, bulk, head_block, heads, blocks)
    turns = [tuple(row) for row in seen.tolist()]
    assert sorted(turns) == [(i, i, b, h) for i in range(blocks) for b in range(batch) for h in range(heads)]
    late = turns[bulk * batch * heads :]
    assert [turn[0] for turn in late] == [entry for entry in items[bulk:, 0].tolist() for _ in range(batch * heads)]
    early = turns[: bulk * head_block]
    assert [turn[0] for turn in early] == [entry for entry in items[:bulk, 0].tolist() for _ in range(head_block)]


@interpreted
@pytest.mark.parametrize("early", [False, True])
def test_split_key_blocks_behind_whole_ones_are_right_in_either_order_of_the_products(early):
    from pytest_longca.kernels.flashmask_attention import _placement, attention_backward, attention_forward

    case = Case(mask=Causal(130, 130), heads_q=4, heads_kv=2, head_dim=16)
    x = make_inputs(case)
    launch = choose_launch(16, torch.float32, torch.device("cpu"))
    launch = dataclasses.replace(launch, processors=4, dkdv=dataclasses.replace(launch.dkdv, early=early))
    plan = plan_case(case, launch, torch.device("cpu"))
    assert plan.dkdv is not None and 0 < plan.dkdv.whole < len(plan.dkdv.items)
    assert _placement(plan.dkdv, 1, 1, 2, 1, launch, tail=1.0)[1][1] == plan.dkdv.whole
    out, lse = attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    dq, dk, dv = attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, launch)
    got = {"lse": lse.double()} | {n: heads_first(t) for n, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    assert max(worst(case, x, got).values()) <= 1.0


@interpreted
@pytest.mark.parametrize("early", [False, True])
def test_rows_that_are_kept_in_registers_give_the_same_bits(early):
    from pytest_longca.kernels.flashmask_attention import attention_backward, attention_forward

    case = Case(mask=CausalDocument((70, 60)), heads_q=2, heads_kv=1, head_dim=24)
    x = make_inputs(case)
    launch = choose_launch(24, torch.float32, torch.device("cpu"))
    results = []
    for in_registers in (0, 1, 2):
        tiles = {part: dataclasses.replace(getattr(launch, part), in_registers=in_registers) for part in ("fwd", "dq", "dkdv")}
        tiles["dkdv"] = dataclasses.replace(tiles["dkdv"], early=early)
        of_tiles = dataclasses.replace(launch, **tiles)
        plan = plan_case(case, of_tiles, torch.device("cpu"))
        out, lse = attention_forward(x.q, x.k, x.v, plan, case.scale, of_tiles)
        results.append((out, lse, *attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, of_tiles)))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("in_registers", [1, 2])
def test_rows_that_are_kept_in_registers_give_right_results(in_registers):
    from pytest_longca.kernels.flashmask_attention import attention_backward, attention_forward

    case = Case(mask=CausalDocument((70, 60)), heads_q=4, heads_kv=2, head_dim=24, head_dim_v=40)
    x = make_inputs(case)
    launch = choose_launch(40, torch.float32, torch.device("cpu"))
    tiles = {part: dataclasses.replace(getattr(launch, part), in_registers=in_registers) for part in ("fwd", "dq", "dkdv")}
    launch = dataclasses.replace(launch, **tiles)
    plan = plan_case(case, launch, torch.device("cpu"))
    out, lse = attention_forward(x.q, x.k, x.v, plan, case.scale, launch)
    dq, dk, dv = attention_backward(x.do, x.q, x.k, x.v, out, lse, plan, case.scale, launch)
    got = {"lse": lse.double()} | {n: heads_first(t) for n, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    assert max(worst(case, x, got).values()) <= 1.0


def test_unsupported_cases_are_refused_with_a_reason():
    def refusal(machine: Machine = CPU, **changes: object) -> str:
        return str(FlashMask().supports(dataclasses.replace(Case(mask=Causal(8, 8)), **changes), machine))

    assert refusal() == "None"
    assert refusal(H200, dtype="bf16") == "None"
    assert "interpreter computes it wrongly" in refusal(dtype="bf16")
    assert "TRITON_INTERPRET=1" in refusal(dataclasses.replace(CPU, interpret=False))
    assert "8.0" in refusal(Machine("cuda", (7, 5)))
    assert "not fp64" in refusal(dtype="fp64")
    assert "in steps of 8" in refusal(head_dim=20)
    assert "in steps of 8" in refusal(H200, head_dim=264)
    assert "positive scale" in refusal(scale=-0.5)
    assert "one mask for all heads" in refusal(mask=sampled_block_mask_with_row_intervals(), heads_q=2)
    assert "has no such form" in refusal(mask=catalogue.load(catalogue.MASKS["uniform_block"]).default(512))


def sampled_block_mask_with_row_intervals() -> Mask:
    class PerHead(Causal):
        __slots__ = ()

        @property
        def heads(self) -> int:
            return 2

    return PerHead(8, 8)


def test_a_mask_of_three_intervals_is_refused_when_bound():
    mask = PredicateMask(lambda b, h, i, j: (i >= 0) & (j % 3 == 0), 12, 12)
    case = Case(mask=mask, head_dim=16, direction=Direction.FWD)
    with pytest.raises(DidNotRun, match="two intervals in a row or column at most"):
        FlashMask().bind(case, make_inputs(case))
