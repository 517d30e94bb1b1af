"""Block-sparse attention in Triton's interpreter, against the reference and against a dense float64 computation of its own."""

import dataclasses

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.block_map import BlockMap, ExplicitMap
from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.checks import verify
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.kernels import vsa_triton
from pytest_longca.kernels.tile_widths import tile_widths
from pytest_longca.kernels.vsa_triton import CONFIGS, INTERPRETED, Config, Configs, VsaTriton, make_plan
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Passed

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton was imported for a GPU, not for its interpreter")

KERNEL = VsaTriton()
ON_GPU = Configs(*[Config(32, 32, tma=True, in_registers=True)] * 3)
"""The paths that only a GPU's configurations take, in the interpreter's tiles."""

ROUTES = ExplicitMap.of(
    [
        [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
        [[0, 1, 0, 1], [0, 1, 0, 0], [1, 1, 0, 1]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 1]],
    ]
)
"""Four heads: an empty row, a popular column (1), a key block that no head of its group selects (2 of the first), a full row."""


def results(case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    call = KERNEL.bind(case, inputs)
    out, lse = call.forward()
    assert lse is not None
    return out, lse, *call.backward(inputs.do)


def routed(sizes_q: tuple[int, ...] = (5, 40, 1), sizes_kv: tuple[int, ...] = (33, 1, 20, 64), **fields: object) -> Case:
    sizes = {"heads_q": 4, "heads_kv": 2, "head_dim": 32} | fields
    return Case(mask=VariableBlock(sizes_q, sizes_kv, ROUTES), **sizes)  # type: ignore[arg-type]  # the caller's fields


def test_every_number_agrees_with_a_dense_float64_computation() -> None:
    case = routed(batch=2, head_dim_v=16, scale=0.3)
    inputs = make_inputs(case)
    q, k, v, do = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads = [leaves[0], *(x.repeat_interleave(2, 2) for x in leaves[1:])]
    scores = torch.einsum("bihd,bjhd->bhij", heads[0], heads[1]) * case.scale
    visible = case.mask.dense()
    weights = torch.where(visible, scores, -torch.inf).logsumexp(-1)
    p = torch.where(visible, torch.exp(scores - weights.masked_fill(weights.isneginf(), 0.0)[..., None]), 0.0)
    wanted = torch.einsum("bhij,bjhd->bihd", p, heads[2])
    gradients = torch.autograd.grad(wanted, leaves, do)
    for name, found, true in zip(("out", "lse", "dq", "dk", "dv"), results(case, inputs), (wanted, weights, *gradients), strict=True):
        assert torch.allclose(found.double(), true, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    "case",
    [
        Case(mask=UniformBlock(96, 128, 32, BlockMap("topk", 0.5, heads=2, seed=1)), heads_q=2, heads_kv=2, head_dim=64),
        Case(mask=UniformBlock(96, 64, 32, BlockMap("random", 0.5, seed=2)), heads_q=2, heads_kv=1, head_dim=16, batch=2),
        Case(mask=UniformBlock(80, 60, 5, BlockMap("random", 0.2, seed=3)), head_dim=24, head_dim_v=7),
        Case(mask=UniformBlock(64, 128, 64, BlockMap("topk", 1.0)), head_dim=1, values=Values.PEAKED),
        routed(dtype="fp16"),
        routed(values=Values.LOW, head_dim=16),
        routed(values=Values.HIGH, head_dim=16, direction=Direction.FWD),
        routed((1, 1, 1), (1, 1, 1, 1), heads_kv=4, head_dim=16),
    ],
    ids=lambda case: f"{case.mask.name}-{case.dtype}-d{case.head_dim}-{case.values}",
)
def test_results_stay_within_the_limits_of_the_reference(case: Case) -> None:
    assert isinstance(verify(KERNEL, case, CPU, ("truth",)).outcome, Passed)


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_random_blocks_and_maps_stay_within_the_limits(data: st.DataObject) -> None:
    sizes = [tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3), label=side)) for side in ("sizes q", "sizes kv")]
    heads_kv, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]), label="heads")
    heads = heads_kv * group
    maps = data.draw(st.sampled_from([1, heads]), label="maps")
    bits = data.draw(st.integers(0, 2 ** (maps * len(sizes[0]) * len(sizes[1])) - 1), label="map")
    block_map = torch.tensor([bool(bits >> i & 1) for i in range(maps * len(sizes[0]) * len(sizes[1]))])
    mask = VariableBlock(sizes[0], sizes[1], ExplicitMap.of(block_map.view(maps, len(sizes[0]), len(sizes[1]))))
    case = Case(mask=mask, heads_q=heads, heads_kv=heads_kv, head_dim=16, seed=data.draw(st.integers(0, 99), label="seed"))
    assert isinstance(verify(KERNEL, case, CPU, ("truth",)).outcome, Passed)


def test_empty_rows_and_unselected_blocks_are_exactly_empty() -> None:
    case = routed()
    out, lse, dq, dk, dv = results(case, make_inputs(case))
    seen = case.mask.dense()[0]
    empty = ~seen.any(2)
    assert bool((lse[0][empty] == -torch.inf).all())
    assert bool((lse[0][~empty] > -torch.inf).all())
    for x in (out, dq):
        assert not x[0].transpose(0, 1)[empty].any()
    unselected = ~seen.unflatten(0, (2, 2)).any(2).any(1)
    assert unselected.any()
    for x in (dk, dv):
        assert not x[0].transpose(0, 1)[unselected].any()


def test_a_head_group_may_share_one_map_or_have_its_own() -> None:
    own = ExplicitMap.of(ROUTES.expand(3, 4)[:1].repeat(4, 1, 1))
    one = ExplicitMap.of(ROUTES.expand(3, 4)[:1])
    cases = [Case(mask=VariableBlock((5, 40, 1), (33, 1, 20, 64), m), heads_q=4, heads_kv=2, head_dim=16) for m in (own, one)]
    for a, b in zip(*(results(case, make_inputs(case)) for case in cases), strict=True):
        assert torch.equal(a, b)


def test_results_are_the_same_bits_in_every_run() -> None:
    case = routed(dtype="fp16")
    inputs = make_inputs(case)
    for a, b in zip(results(case, inputs), results(case, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", [x for x in Layout if x is not Layout.CONTIGUOUS])
def test_strides_do_not_change_a_bit(layout: Layout) -> None:
    sizes = {"mask": UniformBlock(32, 64, 16, ExplicitMap.of([[[1, 0, 1, 1], [0, 1, 0, 1]]])), "heads_q": 2, "heads_kv": 2, "head_dim": 16}
    case = Case(**sizes, layouts=(layout,) * 4)  # type: ignore[arg-type]  # the fields above
    inputs = make_inputs(case)
    plain = Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v, inputs.do)))
    for a, b in zip(results(case, inputs), results(case, plain), strict=True):
        assert torch.equal(a, b)


def test_operands_as_wide_as_a_tile_of_keys_stay_in_shared_memory() -> None:
    config = Config(64, 64, in_registers=True)
    assert [dim for dim in (16, 32, 64, 128) if config.keeps_in_registers(dim)] == [16, 32, 128]
    assert not Config(64, 64).keeps_in_registers(128)


@pytest.mark.parametrize(
    ("dims", "widths"),
    [
        ((40, 24), (64, 64)),
        ((24, 8), (32, 32)),
        ((72, 24), (128, 64)),
        ((128, 64), (128, 64)),
        ((24, 40), (64, 64)),
        ((8, 128), (64, 128)),
        ((1, 1), (16, 16)),
    ],
)
def test_keys_and_values_have_one_order_in_shared_memory(dims: tuple[int, int], widths: tuple[int, int]) -> None:
    assert tile_widths(*dims) == widths


@pytest.mark.parametrize(("layout", "heads_kv"), [(Layout.CONTIGUOUS, 1), (Layout.BHSD, 2), (Layout.FUSED, 2), (Layout.EXPANDED, 1)])
@pytest.mark.parametrize("uniform", [True, False])
def test_descriptors_and_register_operands_give_what_pointers_give(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, heads_kv: int, uniform: bool
) -> None:
    block_map = ExplicitMap.of([[[1, 0, 1], [0, 1, 1]], [[0, 0, 1], [0, 1, 0]]])
    mask = UniformBlock(64, 96, 32, block_map) if uniform else VariableBlock((50, 14), (31, 33, 70), block_map)
    case = Case(mask=mask, batch=2, heads_q=2, heads_kv=heads_kv, head_dim=64, dtype="fp16", layouts=(layout,) * 4)
    inputs = make_inputs(case)
    through_pointers = results(case, inputs)
    monkeypatch.setattr(vsa_triton, "INTERPRETED", ON_GPU)
    for a, b in zip(results(case, inputs), through_pointers, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((2, 8, 3, 64), (1536, 192, 64, 1), True),  # BSHD
        ((2, 8, 3, 64), (1536, 64, 512, 1), True),  # BHSD
        ((2, 8, 3, 64), (4608, 576, 64, 1), True),  # one of three fused
        ((1, 8, 1, 64), (7, 64, 5, 1), True),  # strides of axes of one element mean nothing
        ((2, 8, 3, 64), (1536, 192, 0, 1), True),  # expanded heads
        ((2, 8, 3, 64), (1540, 192, 64, 1), False),  # a batch that starts between two rows
        ((2, 8, 3, 64), (0, 0, 64, 1), False),  # expanded tokens
        ((2, 8, 3, 64), (1536, 68, 516, 1), False),  # rows of no multiple of 16 bytes
        ((2, 8, 2, 64), (1536, 128, 96, 1), False),  # the second head runs over the row's end
        ((2, 8, 3, 48), (1152, 144, 48, 1), False),  # a head_dim that is padded
    ],
)
def test_descriptors_are_made_only_of_strides_that_allow_them(shape: tuple[int, ...], strides: tuple[int, ...], fits: bool) -> None:
    from pytest_longca.kernels.vsa_triton_launch import descriptor

    x = torch.zeros(20_000, dtype=torch.float16).as_strided(shape, strides)
    assert (descriptor(x, 4) is not None) == fits


def test_a_descriptor_finds_every_head_of_every_layout() -> None:
    from pytest_longca.kernels.vsa_triton_launch import descriptor

    for layout in (Layout.CONTIGUOUS, Layout.BHSD, Layout.FUSED, Layout.PADDED, Layout.EXPANDED):
        case = Case(mask=Causal(8, 8), batch=2, heads_q=3, heads_kv=3, head_dim=64, dtype="fp16", layouts=(layout,) * 4)
        x = make_inputs(case).q
        made = descriptor(x, 4)
        assert made is not None, layout
        matrix = made.base.as_strided(made.shape, made.strides)
        stride_b, stride_s, stride_h, _ = x.stride()
        for b, s, h in ((0, 0, 0), (1, 4, 2), (1, 0, 1)):
            row, column = b * (stride_b // stride_s) + h * (stride_h // stride_s) + s, h * (stride_h % stride_s)
            assert torch.equal(matrix[row : row + 4, column : column + 64], x[b, s : s + 4, h]), (layout, b, s, h)


def test_long_lists_are_started_first() -> None:
    sizes = (32,) * 4
    block_map = torch.tensor([[[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]], dtype=torch.bool)
    plan = make_plan(block_map, sizes, sizes, 1, 1, INTERPRETED)
    assert plan.forward.order.tolist() == [[1, 3, 0, 2]]
    assert plan.dkdv is not None
    assert plan.dkdv.order.tolist() == [[0, 1, 2, 3]]
    assert plan.dq is plan.forward


@pytest.mark.parametrize(("size", "row"), [(128, 128), (256, 128), (64, 64), (192, 64), (32, 1), (100, 1)])
def test_the_launch_table_goes_by_what_divides_every_block(size: int, row: int) -> None:
    assert vsa_triton.choose_configs((size,) * 2, (size,) * 3) is CONFIGS[row]
    assert vsa_triton.choose_configs((size, 1), (size,)) is CONFIGS[1]


def test_the_launch_table_uses_every_switch_of_a_configuration() -> None:
    table = [config for configs in CONFIGS.values() for config in (configs.forward, configs.dq, configs.dkdv)]
    switches = [field for field in dataclasses.fields(Config) if field.default is not dataclasses.MISSING]
    assert [field.name for field in switches if all(getattr(config, field.name) == field.default for config in table)] == []


MASK = UniformBlock(128, 128, 64, BlockMap())
BARE_CPU = Machine("cpu", name="CPU")


@pytest.mark.parametrize(
    ("mask", "machine", "fields", "says"),
    [
        (MASK, H200, {"dtype": "bf16", "head_dim": 128}, None),
        (MASK, H200, {"dtype": "fp16", "head_dim": 80, "heads_q": 4}, None),
        (MASK, CPU, {"dtype": "fp32"}, None),
        (MASK, H200, {"dtype": "fp32"}, "bf16 and fp16 on a GPU"),
        (MASK, H200, {"dtype": "bf16", "head_dim": 192}, "head_dim 192"),
        (MASK, CPU, {"dtype": "bf16"}, "no bf16 in Triton's interpreter"),
        (MASK, BARE_CPU, {}, "TRITON_INTERPRET=1"),
        (MASK, CPU, {"scale": -1.0}, "not negative"),
        (Causal(8, 8), CPU, {}, "a block map"),
    ],
)
def test_what_it_declares(mask: Mask, machine: Machine, fields: dict[str, object], says: str | None) -> None:
    refusal = KERNEL.supports(Case(mask=mask, **fields), machine)  # type: ignore[arg-type]  # a table's values
    assert (refusal is None) if says is None else (refusal is not None and says in refusal.reason)
