"""Merging partial results: by lse in fp32, sums, empty rows, dtypes, slices; Triton as PyTorch; a segment's rounds as dense attention."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_longca.parallel import merge
from pytest_longca.parallel.kernel import NaiveBlock, find_block_kernel
from pytest_longca.parallel.merge import GradSum, OutSum, merge_into
from pytest_longca.parallel.segment import Segment
from tests.distributed.naive_rounds import NaiveRounds

INF = float("inf")


def partials(rows: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lse = torch.randn(heads, rows, generator=generator, dtype=torch.promote_types(dtype, torch.float32)) * 3
    lse[torch.rand(heads, rows, generator=generator) < 0.3] = -INF
    out = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    return out.masked_fill(lse.mT[..., None] == -INF, 0), lse


def expected(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logsumexp(torch.stack([part[1].double() for part in parts]), 0)
    finite = lse.masked_fill(lse == -INF, 0)
    return sum(part[0].double() * torch.exp(part[1].double() - finite).mT[..., None] for part in parts), lse


@given(count=st.integers(1, 5), rows=st.integers(1, 6), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_out_sum_equals_the_merge_of_all_partials(count: int, rows: int, seed: int) -> None:
    parts = [partials(rows, 2, 3, seed + i) for i in range(count)]
    total = OutSum(torch.zeros(rows, 2, 3, dtype=torch.float64), dim=3)
    for out, lse in parts:
        total.add(slice(0, rows), out.clone(), lse.clone())
    for found, truth in zip(total.result(), expected(parts), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_partials_of_some_rows_leave_the_others_alone() -> None:
    total = OutSum(torch.zeros(6, 2, 3), dim=3)
    (a, lse_a), (b, lse_b) = partials(4, 2, 3, 1, torch.float32), partials(3, 2, 3, 2, torch.float32)
    total.add(slice(1, 5), a.clone(), lse_a.clone())
    total.add(slice(3, 6), b.clone(), lse_b.clone())
    out, lse = total.result()
    assert (out[0] == 0).all() and (lse[:, 0] == -INF).all()
    assert torch.equal(out[1:3], a[:2]) and torch.equal(lse[:, 5], lse_b[:, 2])
    torch.testing.assert_close(out[3:5].double(), expected([(a[2:], lse_a[:, 2:]), (b[:2], lse_b[:, :2])])[0], rtol=1e-5, atol=1e-6)


def test_nothing_added_is_zero_and_minus_infinity() -> None:
    out, lse = OutSum(torch.zeros(4, 2, 3, dtype=torch.bfloat16), dim=5).result()
    assert out.shape == (4, 2, 5) and out.dtype is torch.bfloat16 and not out.any()
    assert lse.dtype is torch.float32 and (lse == -INF).all()
    assert not GradSum(torch.zeros(4, 2, 3)).result(torch.float32).any()


@pytest.mark.parametrize("whole", [True, False])
def test_bf16_partials_are_summed_in_fp32(whole: bool) -> None:
    rows = slice(0, 4) if whole else slice(1, 4)
    total = GradSum(torch.zeros(4, 1, 1, dtype=torch.bfloat16))
    for _ in range(257):
        total.add(rows, torch.ones(rows.stop - rows.start, 1, 1, dtype=torch.bfloat16))
    assert total.result(torch.float32)[-1].item() == 257.0  # bf16 alone would stop at 256


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_gradient_is_rounded_to_bf16_once(count: int, whole: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = slice(0, 6) if whole else slice(2, 6)
    parts = [torch.randn(rows.stop - rows.start, 2, 3, generator=generator).bfloat16() for _ in range(count)]
    total = GradSum(torch.zeros(6, 2, 3, dtype=torch.bfloat16))
    for part in parts:
        total.add(rows, part.clone())
    exact = torch.stack(parts).double().sum(0)
    found = total.result(torch.bfloat16)
    assert found.dtype is torch.bfloat16 and torch.equal(found[rows], exact.float().bfloat16()) and not found[: rows.start].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda rows: rows[0] < rows[1]), max_size=7), st.integers(0, 99))
def test_gradient_of_any_rows_in_any_order_is_their_sum(places: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [(slice(*rows), torch.randn(rows[1] - rows[0], 2, 3, generator=generator, dtype=torch.float64)) for rows in places]
    total, wanted = GradSum(torch.zeros(6, 2, 3, dtype=torch.float64)), torch.zeros(6, 2, 3, dtype=torch.float64)
    for rows, part in parts:
        wanted[rows] += part
        total.add(rows, part.clone())
    torch.testing.assert_close(total.result(torch.float64), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [OutSum, GradSum])
def test_partial_results_are_read_and_written_in_their_sums_only(monkeypatch: pytest.MonkeyPatch, kind: type[OutSum | GradSum]) -> None:
    """Eight partial results of the same rows are four sums, two more at a time; nothing is converted or copied apart from them."""
    name = "merge_into" if kind is OutSum else "sum_into"
    honest, sums, inside = getattr(merge, name), list[tuple[torch.dtype, list[torch.dtype]]](), False

    def counted(target: Any, parts: Sequence[Any]) -> None:
        nonlocal inside
        sums.append((_first(target).dtype, [_first(part).dtype for part in parts]))
        inside = True
        honest(target, parts)
        inside = False

    class Apart(TorchDispatchMode):
        """What else is done."""

        seen: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not inside and not func.is_view and isinstance(result, torch.Tensor):
                self.seen.add(func.overloadpacket.__name__)
            return result

    monkeypatch.setattr(merge, name, counted)
    like, parts = torch.zeros(4, 1, 1, dtype=torch.bfloat16), torch.ones(8, 4, 1, 1, dtype=torch.bfloat16).unbind()
    lses = torch.zeros(8, 1, 4).unbind()
    with Apart() as apart:
        if kind is OutSum:
            outs = OutSum(like, dim=1)
            for part, lse in zip(parts, lses, strict=True):
                outs.add(slice(0, 4), part, lse)
            out, lse = outs.result()
        else:
            grads = GradSum(like)
            for part in parts:
                grads.add(slice(0, 4), part)
            out = grads.result(torch.bfloat16)
    assert out.tolist() == [[[1.0 if kind is OutSum else 8.0]]] * 4
    wide, narrow = torch.float32, torch.bfloat16
    assert sums == [(wide, [narrow] * 2), *[(wide, [wide, narrow, narrow])] * 2, (narrow, [wide, narrow, narrow])]
    assert apart.seen <= {"empty_like"}


def test_partial_results_wait_for_neighbours_of_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loongtrain rank adds in a striped layout: one of all rows is kept as it came, the two of fewer rows are added in one go."""
    honest, sums = merge.sum_into, list[tuple[int, torch.dtype, int]]()

    def counted(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        sums.append((len(target), target.dtype, len(parts)))
        honest(target, parts)

    monkeypatch.setattr(merge, "sum_into", counted)
    total = GradSum(torch.zeros(6, 1, 1, dtype=torch.bfloat16))
    for start in (0, 1, 1, 0):
        total.add(slice(start, 6), torch.ones(6 - start, 1, 1, dtype=torch.bfloat16))
    assert total.result(torch.bfloat16).flatten().tolist() == [2.0, *[4.0] * 5]
    assert sums == [(5, torch.float32, 3), (6, torch.bfloat16, 2)]


def _first(part: Any) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else part[0]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the mechanisms' own tests run this kernel compiled")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (17, 8), (33, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_sum_equals_the_plain_one(count: int, rows: int, dim: int, dtype: torch.dtype) -> None:
    from pytest_longca.parallel.merge_triton import launch_sum

    generator = torch.Generator().manual_seed(count)
    wide, *narrow = (torch.randn(rows + 4, 3, 2 * dim, generator=generator) for _ in range(3))
    operands = [wide[2:-2, :, dim:], *(x.half()[2:-2, :, dim:] for x in narrow)][3 - count :]  # slices of rows and of a packed last axis
    found, plain = torch.zeros(rows, 3, dim, dtype=dtype), torch.zeros(rows, 3, dim, dtype=dtype)
    launch_sum(found, operands)
    merge.sum_into(plain, operands)
    torch.testing.assert_close(found, plain, rtol=1e-6 if dtype is torch.float32 else 1e-3, atol=1e-6)
    launch_sum(found, [x.mT.contiguous().mT for x in operands])  # a kernel may give its gradients in any layout
    torch.testing.assert_close(found, plain, rtol=1e-6 if dtype is torch.float32 else 1e-3, atol=1e-6)
    before = wide.clone()
    if count == 3:  # in place, beside what is left alone
        launch_sum(operands[0], operands)
        merge.sum_into(before[2:-2, :, dim:], [before[2:-2, :, dim:], *operands[1:]])
        torch.testing.assert_close(wide, before, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the mechanisms' own tests run this kernel compiled")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (17, 8), (33, 6)])
def test_triton_merge_equals_the_plain_one(count: int, rows: int, dim: int) -> None:
    from pytest_longca.parallel.merge_triton import launch

    parts = [partials(rows, 3, dim, seed, torch.float32) for seed in range(count)]
    target, plain = (tuple(torch.empty_like(x) for x in parts[0]) for _ in range(2))
    launch(target, parts)
    merge_into(plain, parts)
    torch.testing.assert_close(target, plain, rtol=1e-6, atol=1e-6)
    launch(parts[0], parts)  # in place
    torch.testing.assert_close(parts[0], plain, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the mechanisms' own tests run this kernel compiled")
@pytest.mark.parametrize("count", [2, 3])
def test_triton_merge_takes_slices_of_rows_and_other_head_strides(count: int) -> None:
    from pytest_longca.parallel.merge_triton import launch

    (out, lse), *others = (partials(rows, 3, 4, rows, torch.float32) for rows in (9, 5, 6)[:count])
    others = [(x[0][:5].transpose(0, 1).contiguous().transpose(0, 1), x[1][:, :5]) for x in others]
    wanted = out.clone(), lse.clone()
    part = wanted[0][2:7], wanted[1][:, 2:7]
    merge_into(part, [part, *others])
    part = out[2:7], lse[:, 2:7]
    launch(part, [part, *others])
    torch.testing.assert_close((out, lse), wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rounds_compute_what_dense_attention_does_forward_and_backward(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 9))
    cuts = data.draw(st.lists(st.lists(st.integers(0, keys), min_size=4, max_size=4).map(sorted), min_size=1, max_size=9))
    intervals = torch.tensor([[(a, b), (c, d)] if b < c else [(a, max(b, d)), (0, 0)] for a, b, c, d in cuts], dtype=torch.int32)
    segment = Segment(intervals, keys)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, do = (torch.randn(len(cuts), 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(keys, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    out, lse = NaiveBlock().block_forward(q, k, v, segment, 0.5)
    found = NaiveRounds().block_forward(q, k, v, segment, 0.5)
    torch.testing.assert_close(found, (out, lse), rtol=1e-10, atol=1e-10)
    grads = NaiveBlock().block_backward(do, q, k, v, out, lse, segment, 0.5)
    torch.testing.assert_close(NaiveRounds().block_backward(do, q, k, v, out, lse, segment, 0.5), grads, rtol=1e-10, atol=1e-10)


def test_unknown_block_kernel_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'cudnn_flex'"):
        find_block_kernel("cudnn_flx")
