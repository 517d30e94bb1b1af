"""Adapters of block-sparse packages: what they declare, and what they pass on, against stand-ins with upstream's argument rules."""

import dataclasses
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_longca.block_map import BlockMap, ExplicitMap
from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.checks import Verification
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import make_inputs
from pytest_longca.kernel import Kernel
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Wrong
from pytest_longca.repro import repro_source
from tests.unit.standalone import loaded, same_as_adapter

A100 = Machine("cuda", (8, 0), "NVIDIA A100", 80 * 2**30)
B200 = Machine("cuda", (10, 0), "NVIDIA B200", 180 * 2**30)
FWD = Direction.FWD
UNIFORM = {size: UniformBlock(2 * size, 4 * size, size, BlockMap("topk", 0.5, heads=4, group=2)) for size in (32, 64, 128, 256)}
VARIABLE = VariableBlock((5, 100), (64, 3), BlockMap("topk", 0.5, heads=4, group=2))
EMPTY = UniformBlock(128, 128, 64, ExplicitMap.of([[[1, 0], [0, 0]]]))
NOTHING = UniformBlock(128, 128, 64, ExplicitMap.of([[[0, 0], [0, 0]]]))
MIXED = UniformBlock(128, 128, 64, ExplicitMap.of([[[1, 0], [0, 1]], [[0, 1], [0, 1]]] * 2))


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = load(KERNELS[name])()
    return kernel


def half(mask: Mask, **sizes: object) -> Case:
    return Case(mask=mask, **({"dtype": "bf16", "heads_q": 4, "heads_kv": 4, "head_dim": 128} | sizes))  # type: ignore[arg-type]  # a table's


ACCEPTED = [
    ("vsa", half(UNIFORM[64]), H200),
    ("vsa", half(UNIFORM[32], head_dim=64, batch=2), H200),
    ("vsa", half(VARIABLE), H200),
    ("vsa_fastvideo_triton", half(EMPTY, head_dim=32), A100),
    ("fa2_sparse", half(UNIFORM[256], heads_kv=2, head_dim=64, dtype="fp16", scale=0.5), A100),
    ("flashinfer", half(VARIABLE, heads_kv=2, direction=FWD), A100),
    ("flashinfer", half(EMPTY, heads_kv=1, direction=FWD), H200),
    ("cudnn_sparse", half(UNIFORM[128]), H200),
    ("cudnn_sparse", half(EMPTY), H200),
    ("cudnn_sparse", half(VARIABLE, heads_kv=2, head_dim=96, head_dim_v=64, dtype="fp16", direction=FWD), H200),
]

REFUSED = [
    ("vsa", half(UNIFORM[64], heads_kv=2), H200, "as many key/value heads"),
    ("vsa", half(UNIFORM[64], dtype="fp16"), H200, "bf16"),
    ("vsa", half(UNIFORM[64], head_dim=96), H200, "head_dim 96"),
    ("vsa", half(UNIFORM[64], scale=0.1), H200, "has the scale 0.0883883 built in, not 0.1"),
    ("vsa", half(EMPTY), H200, "selects no key block"),
    ("vsa", half(UNIFORM[64]), A100, "compute capability 9.0"),
    ("vsa", half(UNIFORM[64]), B200, "compute capability 9.0 only"),
    ("vsa", half(Causal(128, 128)), H200, "a block map"),
    ("vsa_fastvideo_triton", half(UNIFORM[64], scale=0.1), H200, "built in"),
    ("fa2_sparse", half(UNIFORM[64]), H200, "multiple of 128"),
    ("fa2_sparse", half(VARIABLE), H200, "multiple of 128"),
    ("flashinfer", half(UNIFORM[64]), H200, "no backward"),
    ("flashinfer", half(MIXED, heads_kv=2, direction=FWD), H200, "one map for the query heads of a group"),
    ("flashinfer", half(NOTHING, direction=FWD), H200, "selects nothing"),
    ("flashinfer", half(UniformBlock(64 * 8193, 64, 64, BlockMap(heads=4)), direction=FWD), H200, "room for 32768 rows of blocks"),
    ("cudnn_sparse", half(UNIFORM[64], heads_kv=2), H200, "as many key/value heads"),
    ("cudnn_sparse", half(UNIFORM[64], head_dim=64), H200, "head dims of 128"),
    ("cudnn_sparse", half(UNIFORM[64], dtype="fp16"), H200, "backward for bf16"),
    ("cudnn_sparse", half(UNIFORM[64]), B200, "9.0 only"),
    ("cudnn_sparse", half(UNIFORM[64]), CPU, "cuda only"),
]


@pytest.mark.parametrize(("name", "case", "machine"), ACCEPTED)
def test_cases_that_a_kernel_takes(name: str, case: Case, machine: Machine) -> None:
    assert kernel_named(name).supports(case, machine) is None


@pytest.mark.parametrize(("name", "case", "machine", "says"), REFUSED)
def test_cases_that_a_kernel_refuses_say_why(name: str, case: Case, machine: Machine, says: str) -> None:
    refusal = kernel_named(name).supports(case, machine)
    assert refusal is not None
    assert says in refusal.reason


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """BHSD operands and a mask that broadcasts to the scores, to (out, natural lse); differentiable, as accurate as its dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.where(visible, q @ k.mT * scale, -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.where(visible, torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None]), 0.0)
    return p @ v, lse


def listed(index: Tensor, num: Tensor, sizes: Tensor | None, block: int, num_blocks: int) -> Tensor:
    """The mask that padded lists [batch, heads, rows, capacity] and valid sizes of key blocks mean: [batch, heads, rows * block, keys].

    Sizes are `[blocks]`, or `[batch, heads or 1, blocks]`.
    """
    assert index.dtype == num.dtype == torch.int32
    assert index.is_contiguous() and num.is_contiguous()
    block_map = torch.zeros(*index.shape[:3], num_blocks, dtype=torch.bool)
    for b, h, row in torch.ones_like(num).nonzero().tolist():
        block_map[b, h, row, index[b, h, row, : num[b, h, row]].long()] = True
    visible = block_map.repeat_interleave(block, 2).repeat_interleave(block, 3)
    return visible if sizes is None else visible & (torch.arange(block) < sizes[..., None]).flatten(-2).unsqueeze(-2)


def fastvideo(name: str) -> Any:
    """Upstream's operator: BHSD, blocks of 64, its own lse."""

    def op(q: Tensor, k: Tensor, v: Tensor, index: Tensor, num: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        assert q.shape[2] % 64 == k.shape[2] % 64 == 0
        assert sizes.dtype == torch.int32
        assert sizes.shape == (k.shape[2] // 64,)
        assert index.shape == (q.shape[0], q.shape[1], q.shape[2] // 64, k.shape[2] // 64)
        out, lse = attention(q, k, v, listed(index, num, sizes, 64, k.shape[2] // 64), q.shape[3] ** -0.5)
        if name == "block_sparse_attn_triton":
            return out, lse / math.log(2)
        assert q.shape[0] == 1, "Batch size dim will be removed in the future, please set batch to 1"
        return out, (-math.sqrt(q.shape[3]) * lse)[..., None]

    return op


class CudnnStandIn:
    """cudnn.block_sparse_attention's two functions."""

    @staticmethod
    def _visible(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> Tensor:
        block, index, num = arguments["sparse_block_size"], arguments["q2k_block_index"], arguments["q2k_block_nums"]
        assert arguments["layout"] == "bshd"
        assert q.shape[1] % 64 == 0
        assert index.shape[:3] == num.shape == (q.shape[0], q.shape[2], -(-q.shape[1] // block))
        assert arguments.pop("allow_empty_block_nums", True) or num.min() > 0
        return listed(index, num, arguments["block_sizes"], block, k.shape[1] // block)

    @staticmethod
    def _check_sizes(arguments: dict[str, Any], *shape: int) -> None:
        sizes = arguments["block_sizes"]
        assert sizes is None or (sizes.dtype == torch.int32 and sizes.is_contiguous() and sizes.shape[:-1] == shape)

    @classmethod
    def _attend(cls, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        visible = cls._visible(q, k, arguments)
        out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), visible, arguments["softmax_scale"])
        return out.transpose(1, 2), lse

    @classmethod
    def block_sparse_attention_forward(cls, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> dict[str, Tensor]:
        cls._check_sizes(arguments, q.shape[0], q.shape[2])
        out, lse = cls._attend(q, k, v, arguments)
        return {"o_tensor": out, "lse_tensor": lse}

    @classmethod
    def block_sparse_attention_backward(
        cls, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **arguments: Any
    ) -> dict[str, Tensor]:
        assert out.shape == do.shape
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        cls._check_sizes(arguments, q.shape[0])
        if arguments["block_sizes"] is not None:
            arguments["block_sizes"] = arguments["block_sizes"][:, None]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again, _ = cls._attend(*leaves, arguments)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), torch.autograd.grad(again, leaves, do), strict=True))


def block_sparse_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, head_mask_type: Tensor, streaming_info: None, base_blockmask: Tensor,
    max_q: int, max_k: int, p_dropout: float, *, softmax_scale: float, return_attn_probs: bool,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Block-Sparse-Attention's function: THD, a map of 128 x 128 for each batch element and query head, lse +inf in empty rows."""
    batch = len(cu_q) - 1
    assert cu_q.tolist() == [i * max_q for i in range(batch + 1)] and cu_k.tolist() == [i * max_k for i in range(batch + 1)]
    assert cu_q.dtype == cu_k.dtype == head_mask_type.dtype == torch.int32
    assert head_mask_type.tolist() == [1] * q.shape[1]
    assert base_blockmask.shape == (batch, q.shape[1], max_q // 128, max_k // 128)
    assert (p_dropout, return_attn_probs) == (0.0, True)
    visible = base_blockmask.repeat_interleave(128, 2).repeat_interleave(128, 3)
    operands = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    out, lse = attention(*operands, visible, softmax_scale)
    return out.transpose(1, 2).flatten(0, 1), torch.where(lse.isneginf(), torch.inf, lse), None


class FlashInferWrapper:
    """What both of FlashInfer's wrappers share."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        self.scale = 0.0
        self.visible = torch.empty(0)

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        assert ints.numel() > 8 * 2**20

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q[None], k[None], v[None], self.visible, self.scale)
        return out[0], (lse[0] / math.log(2)).clamp(min=-5e4)  # its minus infinity


class BlockSparseAttentionWrapper(FlashInferWrapper):
    """One map in CSR for all heads; tokens first."""

    def plan(
        self, indptr: Tensor, indices: Tensor, rows: int, columns: int, block_q: int, block_kv: int, heads_q: int, heads_kv: int,
        head_dim: int, *, sm_scale: float, q_data_type: torch.dtype, o_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == torch.int32
        assert q_data_type == o_data_type
        block_map = torch.zeros(rows // block_q, columns // block_kv, dtype=torch.bool)
        for row in range(len(indptr) - 1):
            block_map[row, indices[indptr[row] : indptr[row + 1]].long()] = True
        self.visible = block_map.repeat_interleave(block_q, 0).repeat_interleave(block_kv, 1)
        self.scale = sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        out, lse = self.attend(*(x.transpose(0, 1) for x in (q, k, v)))
        return out.transpose(0, 1), lse.transpose(0, 1)


class VariableBlockSparseAttentionWrapper(FlashInferWrapper):
    """A map and sizes for each key/value head; heads first."""

    def plan(
        self, block_map: Tensor, sizes_q: Tensor, sizes_kv: Tensor, heads_q: int, heads_kv: int, head_dim: int, *,
        sm_scale: float, q_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert block_map.shape == (heads_kv, sizes_q.shape[1], sizes_kv.shape[1])
        assert sizes_q.shape[0] == sizes_kv.shape[0] == heads_kv
        per_head = [one.repeat_interleave(q, 0).repeat_interleave(kv, 1) for one, q, kv in zip(block_map, sizes_q, sizes_kv, strict=True)]
        self.visible = torch.stack(per_head).repeat_interleave(heads_q // heads_kv, 0)
        self.scale = sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and operators that the adapters import."""

    def module(name: str, **attributes: object) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, made)

    module("cudnn", __path__=[])
    cudnn_functions = ("block_sparse_attention_forward", "block_sparse_attention_backward")
    module("cudnn.block_sparse_attention", **{name: getattr(CudnnStandIn, name) for name in cudnn_functions})
    module("block_sparse_attn", block_sparse_attn_func=block_sparse_attn_func)
    wrappers = (BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper)
    module("flashinfer", **{wrapper.__name__: wrapper for wrapper in wrappers})
    module("fastvideo_kernel", __path__=[])
    module("fastvideo_kernel.block_sparse_attn")
    names = ("block_sparse_attn_sm90", "block_sparse_attn_triton")
    monkeypatch.setattr(torch.ops, "fastvideo_kernel", types.SimpleNamespace(**{name: fastvideo(name) for name in names}), raising=False)
    yield


PER_HEAD = ExplicitMap.of([[[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [1, 0, 0]], [[1, 1, 1], [0, 0, 1]], [[0, 0, 1], [1, 1, 0]]])
GROUPED = ExplicitMap.of([[[1, 0, 1], [0, 1, 0]]] * 2 + [[[1, 1, 1], [0, 0, 1]]] * 2)
ONE = ExplicitMap.of([[[1, 0, 1], [0, 1, 0]]])
ROW_EMPTY = ExplicitMap.of([[[1, 0, 1], [0, 0, 0]]])
SIZES = ((5, 70), (64, 3, 33))


def uniform(size: int, block_map: ExplicitMap) -> UniformBlock:
    return UniformBlock(2 * size, 3 * size, size, block_map)


RUNS = [
    ("vsa", half(uniform(64, PER_HEAD), head_dim=16, batch=2)),
    ("vsa", half(uniform(128, ONE), head_dim=16)),
    ("vsa", half(VariableBlock(*SIZES, PER_HEAD), head_dim=16, batch=2)),
    ("vsa_fastvideo_triton", half(uniform(64, ROW_EMPTY), head_dim=16, batch=2)),
    ("vsa_fastvideo_triton", half(VariableBlock(*SIZES, PER_HEAD), head_dim=16)),
    ("cudnn_sparse", half(uniform(64, PER_HEAD), head_dim=16, batch=2)),
    ("cudnn_sparse", half(uniform(128, ROW_EMPTY), head_dim=16, scale=0.3)),
    ("cudnn_sparse", half(VariableBlock(*SIZES, PER_HEAD), heads_kv=2, head_dim=16)),
    ("fa2_sparse", half(uniform(128, PER_HEAD), heads_kv=2, head_dim=16, batch=2)),
    ("fa2_sparse", half(uniform(256, ROW_EMPTY), head_dim=16, scale=0.3)),
    ("flashinfer", half(uniform(64, ROW_EMPTY), heads_kv=2, head_dim=16, batch=2, direction=FWD)),
    ("flashinfer", half(uniform(32, GROUPED), heads_kv=2, head_dim=16, direction=FWD)),
    ("flashinfer", half(VariableBlock(*SIZES, PER_HEAD), head_dim=16, batch=2, scale=0.3, direction=FWD)),
]


@pytest.mark.parametrize(("name", "case"), RUNS, ids=[f"{name}-{case.mask.name}-{i}" for i, (name, case) in enumerate(RUNS)])
def test_out_lse_and_gradients_come_back_as_the_contract_says(name: str, case: Case) -> None:
    case = dataclasses.replace(case, dtype="fp64")
    inputs = make_inputs(case)
    call = kernel_named(name).bind(case, inputs)
    out, lse = call.forward()
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    true_out, true_lse = attention(*(x.transpose(1, 2) for x in leaves), case.mask.dense(), case.scale)
    assert lse is not None
    assert torch.allclose(out, true_out.transpose(1, 2))
    assert torch.allclose(lse, true_lse)
    if case.direction.needs_backward:
        for found, true in zip(call.backward(inputs.do), torch.autograd.grad(true_out, leaves, inputs.do.transpose(1, 2)), strict=True):
            assert torch.allclose(found, true)


@pytest.mark.parametrize(("name", "case"), RUNS, ids=[f"{name}-{case.mask.name}-{i}" for i, (name, case) in enumerate(RUNS)])
def test_a_standalone_file_calls_the_package_as_the_adapter_does(name: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case = dataclasses.replace(case, dtype="fp64")
    kernel = kernel_named(name)
    text = repro_source(kernel, case, Verification(Wrong("")), CPU, {})
    assert "pytest" not in text
    same_as_adapter(kernel, case, loaded(text))
    assert capsys.readouterr().out.splitlines()[-1].startswith("right")


@pytest.mark.parametrize("name", ["vsa", "vsa_fastvideo_triton", "cudnn_sparse"])
def test_padding_is_told_and_only_done_where_needed(name: str) -> None:
    padded = half(VariableBlock(*SIZES, PER_HEAD), head_dim=16)
    plain = half(uniform(64, PER_HEAD), head_dim=16)
    said = [kernel_named(name).bind(case, make_inputs(case)).facts["padding"] for case in (padded, plain)]
    assert said == ["inside the call, 2.19 times the tokens", "none"]


@pytest.mark.parametrize(
    ("mask", "wrapper"),
    [
        (uniform(64, ONE), "BlockSparseAttentionWrapper"),
        (uniform(64, PER_HEAD), "VariableBlockSparseAttentionWrapper"),
        (VariableBlock(*SIZES, ONE), "VariableBlockSparseAttentionWrapper"),
        (uniform(2, ONE), "VariableBlockSparseAttentionWrapper"),
    ],
)
def test_flashinfer_takes_the_wrapper_that_fits_the_map(mask: Mask, wrapper: str) -> None:
    case = half(mask, head_dim=16, direction=FWD)
    assert kernel_named("flashinfer").bind(case, make_inputs(case)).facts["source"] == f"flashinfer.{wrapper}"


@pytest.mark.parametrize(("mask", "said"), [(uniform(64, ROW_EMPTY), "lse -50000 in base 2 turned into -inf"), (uniform(64, ONE), None)])
def test_what_flashinfer_writes_for_minus_infinity_is_said_where_a_row_is_empty(mask: Mask, said: str | None) -> None:
    case = half(mask, head_dim=16, direction=FWD)
    assert kernel_named("flashinfer").bind(case, make_inputs(case)).facts.get("empty_rows") == said


def test_a_refusal_of_flashinfers_plan_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("indices out of bound")

    monkeypatch.setattr(BlockSparseAttentionWrapper, "plan", refuse)
    case = half(uniform(64, ONE), head_dim=16, direction=FWD)
    with pytest.raises(DidNotRun, match="indices out of bound"):
        kernel_named("flashinfer").bind(case, make_inputs(case))
