"""The adapters of packages that are not here, over stand-ins that keep each backend's published semantics, against the reference.

A stand-in computes on the CPU what the backend's documentation says for the arguments it gets: how it counts a window, where its diagonal
lies, what it returns as lse. So a wrong argument gives a wrong answer, as it would on the GPU.
"""

import dataclasses
import importlib.metadata
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pytest_longca.block_map import ExplicitMap
from pytest_longca.case import Case, Direction, Layout
from pytest_longca.catalogue import KERNELS, MASKS, load
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import make_inputs
from pytest_longca.judge import Result, judge
from pytest_longca.kernel import Kernel
from pytest_longca.kernels.naive import naive_attention
from pytest_longca.machine import H200
from pytest_longca.mask import Form, PredicateMask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalDocument, FullDocument
from pytest_longca.masks.prefix import PrefixLmCausal, PrefixLmDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full, FullSlidingWindow
from pytest_longca.masks.window import GlobalSlidingWindow
from pytest_longca.outcome import Unsupported
from pytest_longca.reference import compute

REGULAR = ("full", "causal", "full_sliding_window", "causal_sliding_window", "full_document", "causal_document")
HETEROGENEOUS = (
    "shared_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_causal",
    "prefix_lm_document",
    "block_causal_document",
)
Visible = Callable[[int, int], Tensor]


def band(seqlen_q: int, seqlen_kv: int, left: int | None, right: int | None, offset: int) -> Tensor:
    """bool `[seqlen_q, seqlen_kv]`: i + offset - left <= j <= i + offset + right."""
    i, j = torch.arange(seqlen_q)[:, None] + offset, torch.arange(seqlen_kv)[None]
    visible = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if left is not None:
        visible &= j >= i - left
    return visible if right is None else visible & (j <= i + right)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """BSHD attention under bool `[seqlen_q, seqlen_kv]`: out and natural lse `[batch, heads, seqlen_q]`, -inf where nothing is seen."""
    empty = ~visible.any(-1, keepdim=True)
    return naive_attention(q, k, v, (~visible & ~empty)[None, None, None], empty[None, None, None], scale)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    """THD attention, document by document: out and lse `[heads, tokens]`."""
    assert cu_q.dtype is cu_k.dtype is torch.int32 and cu_q[0] == cu_k[0] == 0
    assert (cu_q[-1], cu_k[-1]) == (q.shape[0], k.shape[0])
    outs, lses = [], []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        out, lse = attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], visible(q1 - q0, k1 - k0), scale)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def flash_band(causal: bool, window_size: tuple[int, int]) -> Visible:
    """FlashAttention 2 and 3: bottom-right, inclusive, -1 is unlimited."""
    left, right = window_size[0], 0 if causal else window_size[1]
    return lambda sq, sk: band(sq, sk, None if left < 0 else left, None if right < 0 else right, sk - sq)


def flash_module(name: str, empty_lse: float, varlen_name: str = "flash_attn_varlen_func") -> types.ModuleType:
    module = types.ModuleType(name)

    def shown(lse: Tensor) -> Tensor:
        return lse.masked_fill(lse == float("-inf"), empty_lse)

    def dense(q, k, v, *, softmax_scale, causal, window_size, return_attn_probs):  # type: ignore[no-untyped-def]  # a stand-in
        out, lse = attend(q, k, v, flash_band(causal, window_size)(q.shape[1], k.shape[1]), softmax_scale)
        return out, shown(lse), None

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, return_attn_probs):  # type: ignore[no-untyped-def]  # a stand-in
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, flash_band(causal, window_size), softmax_scale)
        return out, shown(lse), None

    module.flash_attn_func = dense  # type: ignore[attr-defined]  # a stand-in
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]  # a stand-in
    return module


def aten_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, window_size_left, window_size_right):  # type: ignore[no-untyped-def]  # a stand-in
    """torch's own FA2: None is unlimited."""
    assert (dropout, debug) == (0.0, False)
    left, right = window_size_left, 0 if is_causal else window_size_right

    def visible(sq: int, sk: int) -> Tensor:
        return band(sq, sk, left, right, sk - sq)

    out, lse = attend(q, k, v, visible(max_q, max_k), scale) if cu_q is None else attend_packed(q, k, v, cu_q, cu_k, visible, scale)
    return out, lse.masked_fill(lse == float("-inf"), float("inf")), None, None, None


def cudnn_fwd(
    q,
    k,
    v,
    attn_scale,
    is_causal=False,
    causal_bottom_right=False,
    window_left=-1,
    window_right=-1,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    max_seqlen_q=0,
    max_seqlen_kv=0,
    return_lse=True,
):  # type: ignore[no-untyped-def]  # a stand-in
    """cuDNN: top-left unless told otherwise, the left window exclusive, BHSD when dense, stats with a last axis of one."""
    if is_causal and window_right > 0:
        raise ValueError("is_causal masks every future column")
    has_band = is_causal or window_left >= 0 or window_right >= 0
    if causal_bottom_right and not has_band:
        raise ValueError("causal_bottom_right only re-anchors an active diagonal band")
    left = None if window_left < 0 else window_left - 1
    right = 0 if is_causal else None if window_right < 0 else window_right

    def visible(sq: int, sk: int) -> Tensor:
        return band(sq, sk, left, right, sk - sq if causal_bottom_right else 0)

    if cu_seqlens_q is None:
        if has_band and q.shape[2] > k.shape[2]:
            raise ValueError("a band over more queries than keys needs padding")
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), visible(q.shape[2], k.shape[2]), attn_scale)
        return out.transpose(1, 2), lse[..., None]
    assert max_seqlen_q > 0 and max_seqlen_kv > 0
    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, visible, attn_scale)
    return out, lse.T[..., None]


def cute_modules() -> dict[str, types.ModuleType]:
    """flash_attn.cute and the parts of CuTe DSL that a mask_mod uses: bottom-right, inclusive, None is unlimited."""

    def window(causal: bool, window_size: tuple[int | None, int | None]) -> Visible:
        assert all(side is None or side >= 0 for side in window_size), "FA4 takes a negative side literally"
        left, right = window_size[0], 0 if causal else window_size[1]
        return lambda sq, sk: band(sq, sk, left, right, sk - sq)

    def dense(
        q,
        k,
        v,
        *,
        softmax_scale,
        return_lse,
        causal=False,
        window_size=(None, None),
        mask_mod=None,
        aux_tensors=None,
        block_sparse_tensors=None,
        block_sparse_tensors_bwd=None,
    ):  # type: ignore[no-untyped-def]  # a stand-in
        sq, sk = q.shape[1], k.shape[1]
        if block_sparse_tensors is None:
            return attend(q, k, v, window(causal, window_size)(sq, sk), softmax_scale)
        assert not causal and window_size == (None, None)
        by_query = listed(block_sparse_tensors, mask_mod, aux_tensors, sq, sk)
        by_key = listed(block_sparse_tensors_bwd, mask_mod, aux_tensors, sq, sk, transposed=True)
        assert torch.equal(by_query, by_key), "forward and backward see different masks"
        return attend(q, k, v, by_query, softmax_scale)

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, return_lse):  # type: ignore[no-untyped-def]  # a stand-in
        return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window(causal, window_size), softmax_scale)

    class BlockSparseTensorsTorch:
        def __init__(self, *lists: Tensor, block_size: tuple[int, int]) -> None:
            self.lists, self.block_size = lists, block_size

    flash_attn, cute, sparsity, utils = (
        types.ModuleType(n) for n in ("flash_attn", "flash_attn.cute", "flash_attn.cute.block_sparsity", "flash_attn.cute.utils")
    )
    cutlass, cutlass_cute = types.ModuleType("cutlass"), types.ModuleType("cutlass.cute")
    cute.flash_attn_func, cute.flash_attn_varlen_func, cute.utils = dense, varlen, utils  # type: ignore[attr-defined]  # stand-ins
    sparsity.BlockSparseTensorsTorch = BlockSparseTensorsTorch  # type: ignore[attr-defined]  # a stand-in
    utils.scalar_to_ssa = lambda scalar, dtype: scalar  # type: ignore[attr-defined]  # a stand-in
    cutlass.Int32, cutlass.cute, cutlass_cute.jit = int, cutlass_cute, lambda function: function  # type: ignore[attr-defined]  # stand-ins
    modules = (flash_attn, cute, sparsity, utils, cutlass, cutlass_cute)
    return {module.__name__: module for module in modules}


def listed(sparse: Any, mask_mod: Any, aux: Any, sq: int, sk: int, transposed: bool = False) -> Tensor:
    """What FA4 sees of lists of tiles: all of the full ones, mask_mod of the partial ones, which asks about whole tiles of queries."""
    partial_count, partial_index, full_count, full_index = (x[0, 0] for x in sparse.lists)
    assert sparse.block_size == (128, 128) and partial_count.dtype is partial_index.dtype is torch.int32
    visible = torch.zeros(sq, sk, dtype=torch.bool)
    for count, index, is_full in ((partial_count, partial_index, False), (full_count, full_index, True)):
        for tile, others in enumerate(index):
            for other in others[: int(count[tile])].tolist():
                q_tile, kv_tile = (other, tile) if transposed else (tile, other)
                rows, keys = slice(q_tile * 128, q_tile * 128 + 128), slice(kv_tile * 128, kv_tile * 128 + 128)
                assert not visible[rows, keys].any(), "a tile is listed twice"
                asked = torch.arange(rows.start, rows.stop)[:, None], torch.arange(keys.start, keys.stop)[None]
                cell = torch.ones(128, 128, dtype=torch.bool) if is_full else mask_mod(None, None, asked[0][None], asked[1], None, aux)
                part = visible[rows, keys]
                part |= cell[: part.shape[0], : part.shape[1]]
    return visible


def cudnn_flex_modules() -> dict[str, types.ModuleType]:
    """cudnn.flex_attention: endpoint rows `[heads, functions, batch * seqlen_q]`."""

    def create_mask_plan(rows: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Tensor:
        print("Compiled mask-plan")
        heads, functions, total_q = rows.shape
        assert (
            rows.dtype is torch.int32
            and rows.is_contiguous()
            and functions % 2 == 1
            and heads in (1, q.shape[2])
            and total_q == q.shape[0] * q.shape[1]
        )
        assert bool(((rows >= 0) & (rows <= k.shape[1])).all()) and bool((rows.diff(dim=1) >= 0).all())
        key = torch.arange(k.shape[1])
        visible = key < rows[:, 0, :, None]
        for low, high in zip(rows[:, 1::2].unbind(1), rows[:, 2::2].unbind(1), strict=True):
            visible |= (key >= low[..., None]) & (key < high[..., None])
        return visible[0].unflatten(0, (q.shape[0], -1))

    def flex_attn_func(q, k, v, *, mask_plan, softmax_scale, return_lse):  # type: ignore[no-untyped-def]  # a stand-in
        results = [attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask_plan[b], softmax_scale) for b in range(q.shape[0])]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    api = types.ModuleType("cudnn.flex_attention.api")
    api.create_mask_plan, api.flex_attn_func = create_mask_plan, flex_attn_func  # type: ignore[attr-defined]  # stand-ins
    names = ("cudnn", "cudnn.flex_attention", "cudnn.sdpa", "cudnn.sdpa.fwd", "cudnn.sdpa.fwd.torch_op")
    return {"cudnn.flex_attention.api": api} | {name: types.ModuleType(name) for name in names}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All packages' stand-ins; `flash_attn_2_cuda` is what tells FA2's package from torch's own copy."""
    modules = cute_modules() | cudnn_flex_modules()
    flash_attn = flash_module("flash_attn", float("inf"))
    modules["flash_attn"].__dict__.update(
        flash_attn_func=flash_attn.flash_attn_func, flash_attn_varlen_func=flash_attn.flash_attn_varlen_func
    )
    modules["flash_attn_interface"] = flash_module("flash_attn_interface", float("-inf"))
    extension = types.ModuleType("flash_attn_2_cuda")
    extension.__spec__ = types.SimpleNamespace(origin=None)  # type: ignore[assignment]  # all that find_spec gives back
    modules["flash_attn_2_cuda"] = extension
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pytest_longca.kernels.fa4_mask", raising=False)
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.8.3" if name == "flash-attn" else real(name))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_flash)
    monkeypatch.setattr(torch.ops.cudnn, "sdpa_fwd", cudnn_fwd, raising=False)
    yield
    sys.modules.pop("pytest_longca.kernels.fa4_mask", None)


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = load(KERNELS[name])()
    return kernel


def check(name: str, case: Case) -> dict[str, str]:
    """Run the adapter on the CPU and compare everything with the reference; its facts."""
    kernel = kernel_named(name)
    assert kernel.supports(case, H200) is None
    inputs = make_inputs(case)
    call = kernel.bind(case, inputs)
    out, lse = call.forward()
    grads = call.backward(inputs.do) if case.direction.needs_backward else ()
    assert lse is not None
    verdicts = judge(case, inputs, compute(case, inputs), Result(out.detach(), lse.detach(), *grads))
    assert all(verdict.ok for verdict in verdicts), [verdict.message for verdict in verdicts if not verdict.ok]
    return call.facts


@st.composite
def half_cases(draw: st.DrawFn, masks: tuple[str, ...], max_seqlen: int = 40) -> Case:
    cls = load(MASKS[draw(st.sampled_from(masks))])
    rng = random.Random(draw(st.integers(0, 9999)))
    seqlen = draw(st.integers(1, max_seqlen))
    seqlen_kv = draw(st.integers(1, max_seqlen)) if cls.unequal_lengths else None
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 4)]))
    return Case(
        mask=cls.sample(rng, seqlen, seqlen_kv),
        batch=draw(st.integers(1, 3)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=16,
        dtype=draw(st.sampled_from(["bf16", "fp16"])),
        layouts=(draw(st.sampled_from(list(Layout))),) * 4,
        seed=draw(st.integers(0, 99)),
    )


def supported(name: str, case: Case) -> bool:
    return kernel_named(name).supports(case, H200) is None


ONCE = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", ["fa2", "fa4", "cudnn", "cudnn_flex"])
@given(case=half_cases(REGULAR))
@ONCE
def test_regular_masks_reach_the_backend_as_they_are(name: str, case: Case) -> None:
    if supported(name, case):
        check(name, case)


@given(case=half_cases(REGULAR))
@ONCE
def test_torchs_own_fa2_gets_the_same_mask(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "flash_attn_2_cuda")
        if supported("fa2", case):
            assert check("fa2", case)["source"].startswith("torch ")


@given(case=half_cases(REGULAR))
@ONCE
def test_regular_masks_reach_fa3_as_they_are(case: Case) -> None:
    case = dataclasses.replace(case, direction=Direction.FWD)
    if supported("fa3", case):
        check("fa3", case)


@pytest.mark.parametrize("name", ["fa4", "cudnn_flex"])
@given(case=half_cases(HETEROGENEOUS, max_seqlen=300))
@settings(ONCE, max_examples=20)
def test_heterogeneous_masks_reach_the_backend_as_they_are(name: str, case: Case) -> None:
    assume(case.seqlen_q > 1 or name != "cudnn_flex")  # which refuses a sequence of one token
    check(name, case)


def packing_for(mask: Any, **sizes: Any) -> Any:
    """What the adapter's packing says for a mask."""
    from pytest_longca.packing import packing_of

    return packing_of(Case(mask=mask, dtype="bf16", **sizes), "cpu")


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [
        (Full(9, 5), None, None),
        (Causal(9, 5), None, 0),
        (Causal(1, 5), None, 0),
        (FullSlidingWindow(9, 9, 3), 3, 3),
        (FullSlidingWindow(9, 9, 8), None, None),
        (FullSlidingWindow(9, 9, 10**6), None, None),
        (FullSlidingWindow(9, 5, 6), None, 6),
        (FullSlidingWindow(5, 9, 6), 6, None),
        (CausalSlidingWindow(9, 9, 0), 0, 0),
        (CausalSlidingWindow(9, 9, 8), None, 0),
        (FullDocument((4, 0, 5)), None, None),
        (CausalDocument((4, 0, 5)), None, 0),
    ],
    ids=str,
)
def test_band_has_only_sides_that_hide_something(mask: Any, left: int | None, right: int | None) -> None:
    found = packing_for(mask).band
    assert (found.left, found.right) == (left, right)


def test_batch_is_folded_into_the_packing() -> None:
    packing = packing_for(CausalDocument((4, 0, 5), (3, 2, 4)), batch=2)
    assert packing.cu_seqlens_q.tolist() == [0, 4, 4, 9, 13, 13, 18]
    assert packing.cu_seqlens_kv.tolist() == [0, 3, 5, 9, 12, 14, 18]
    assert (packing.max_seqlen_q, packing.max_seqlen_kv) == (5, 4)
    assert packing.has_empty_rows
    assert not packing_for(CausalDocument((4, 0, 5))).has_empty_rows
    assert not packing_for(Causal(9, 9)).is_packed


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(9, 5), {"is_causal": False, "causal_bottom_right": False, "window_left": -1, "window_right": -1}),
        (Causal(9, 9), {"is_causal": True, "causal_bottom_right": False, "window_left": -1, "window_right": -1}),
        (Causal(5, 9), {"is_causal": True, "causal_bottom_right": True, "window_left": -1, "window_right": -1}),
        (FullSlidingWindow(9, 9, 3), {"is_causal": False, "causal_bottom_right": False, "window_left": 4, "window_right": 3}),
        (CausalSlidingWindow(9, 9, 3), {"is_causal": True, "causal_bottom_right": False, "window_left": 4, "window_right": -1}),
    ],
    ids=str,
)
def test_cudnn_gets_its_exclusive_left_window_and_alignment(mask: Any, expected: dict[str, Any]) -> None:
    from pytest_longca.kernels.cudnn import operator_arguments

    assert operator_arguments(packing_for(mask)) == expected


@pytest.mark.parametrize(
    ("mask", "num_endpoints"),
    [
        (PrefixLmCausal(300, 300, 7), 1),
        (PrefixLmDocument((100, 200), (7, 9)), 2),
        (GlobalSlidingWindow(300, 300, 20, 9), 3),
        (PredicateMask(lambda b, h, q, kv: ((kv > 5) & (kv < 9)) | (kv > 20) | (q > 200), 300, 300), 4),
    ],
    ids=["prefix", "document", "global", "custom"],
)
def test_fa4_reads_as_few_endpoints_as_the_mask_needs(mask: Any, num_endpoints: int) -> None:
    from pytest_longca.kernels.fa4 import mask_mod_endpoints

    endpoints = mask_mod_endpoints(mask.row_intervals())
    assert endpoints.shape == (num_endpoints, 300 + 256)
    assert not endpoints[:, 300:].any()


def test_fa4s_four_endpoints_say_the_same_as_the_mask() -> None:
    """No built-in mask has two runs that both start after key 0."""

    @dataclass(frozen=True)
    class TwoRuns(PredicateMask):
        forms = frozenset({Form.PREDICATE, Form.ROW_INTERVALS})

    mask = TwoRuns(lambda b, h, q, kv: ((kv > 5) & (kv < 9)) | ((kv > 20) & (kv <= q)) | (q > 200), 300, 300)
    check("fa4", Case(mask=mask, dtype="bf16", head_dim=16))
    check("cudnn_flex", Case(mask=mask, dtype="bf16", head_dim=16))


def test_fa4_takes_uniform_blocks_as_full_tiles_for_each_head() -> None:
    seen = {}

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.update(options)
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    mask = UniformBlock(256, 256, 128, ExplicitMap.of([[[1, 0], [1, 1]], [[0, 0], [0, 1]]]))
    case = Case(mask=mask, heads_q=2, heads_kv=1, dtype="bf16", head_dim=16, direction=Direction.FWD)
    assert supported("fa4", case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", dense)
        kernel_named("fa4").bind(case, make_inputs(case)).forward()
    partial_count, _, full_count, full_index = seen["block_sparse_tensors"].lists
    assert not partial_count.any() and "mask_mod" not in seen
    assert full_count.tolist() == [[[1, 2], [0, 1]]]
    assert full_index[0, 0].tolist() == [[0, 0], [0, 1]]
    assert seen["block_sparse_tensors_bwd"].lists[2].tolist() == [[[2, 1], [0, 1]]]


def test_plan_of_cudnn_flex_prints_nothing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    check("cudnn_flex", Case(mask=Causal(20, 20), dtype="bf16", head_dim=16))
    captured = capsys.readouterr()
    assert captured.out == "" and "Compiled mask-plan" in captured.err


@pytest.mark.parametrize("name", ["fa2", "fa4", "cudnn", "cudnn_flex"])
def test_copies_that_a_layout_costs_are_in_the_record(name: str) -> None:
    plain = Case(mask=Causal(20, 20), batch=2, heads_q=2, dtype="bf16", head_dim=16)
    assert check(name, plain)["copies"] == "none"
    expanded = Case(
        mask=Causal(20, 20), batch=2, heads_q=2, dtype="bf16", head_dim=16, layouts=(Layout.EXPANDED,) + (Layout.CONTIGUOUS,) * 3
    )
    assert check(name, expanded)["copies"] == "q"


def test_fa2_says_which_copy_ran() -> None:
    assert check("fa2", Case(mask=Causal(20, 20), dtype="bf16", head_dim=16))["source"] == "flash-attn 2.8.3"
    assert kernel_named("fa2").version() == "2.8.3"


def test_fa2_says_that_it_turned_the_lse_of_empty_rows() -> None:
    assert "empty_rows" not in check("fa2", Case(mask=Causal(20, 20), dtype="bf16", head_dim=16))
    assert check("fa2", Case(mask=Causal(20, 9), dtype="bf16", head_dim=16))["empty_rows"] == "lse +inf turned into -inf"


@pytest.mark.parametrize(
    ("error", "is_refusal"), [(ValueError, True), (NotImplementedError, True), (TypeError, False), (RuntimeError, False)]
)
def test_a_backends_refusal_is_an_outcome_and_its_fault_is_not(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], is_refusal: bool
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error("head_dim is odd")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", refuse)
    case = Case(mask=Causal(20, 20), dtype="bf16", head_dim=16)
    call = kernel_named("fa2").bind(case, make_inputs(case))
    with pytest.raises(DidNotRun if is_refusal else error, match="head_dim is odd") as caught:
        call.forward()
    if is_refusal:
        assert isinstance(caught.value, DidNotRun)
        assert caught.value.outcome == Unsupported(f"fa2 refused it: {error.__name__}: head_dim is odd")


def test_fa4s_assertions_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("only support Blackwell")

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", refuse)
    case = Case(mask=Causal(20, 20), dtype="bf16", head_dim=16)
    with pytest.raises(DidNotRun, match="only support Blackwell"):
        kernel_named("fa4").bind(case, make_inputs(case)).forward()
