"""The tensors of a case, drawn from its seed: values, dtypes and memory layouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.case import OPERANDS, Case, Layout, Values

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Inputs:
    """q `[batch, seqlen_q, heads_q, head_dim]`, k and v `[batch, seqlen_kv, heads_kv, head_dim(_v)]`, do like out."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


BATCH, HEADS, COLUMNS = 0, 2, 3
"""Axes of an operand."""


def shares_memory(x: Tensor, axis: int) -> bool:
    """Whether an operand is the same all along an axis, as an expanded one is."""
    return x.stride(axis) == 0 or x.shape[axis] == 1


def laid_alike(operand: Tensor) -> Tensor:
    """Memory of its own that is laid out as the operand, with any values."""
    once = operand[distinct(operand)]
    return torch.empty_strided(once.shape, once.stride(), dtype=operand.dtype, device=operand.device).expand(operand.shape)


def distinct(operand: Tensor) -> tuple[slice, ...]:
    """The part of an operand that has each element of its memory once: what heads or batch elements share cannot be written twice."""
    return tuple(slice(0, 1) if shares_memory(operand, axis) else slice(None) for axis in range(operand.ndim))


def shapes(case: Case) -> dict[str, tuple[int, int, int, int]]:
    """The logical BSHD shape of each operand of a case."""
    return {
        "q": (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        "k": (case.batch, case.seqlen_kv, case.heads_kv, case.head_dim),
        "v": (case.batch, case.seqlen_kv, case.heads_kv, case.head_dim_v),
        "do": (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v),
    }


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The case's operands on `device`: same seed, same device kind, same values, whatever the layouts."""
    generator = torch.Generator(device).manual_seed(case.seed)
    drawn = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes(case).items()}
    _VALUES[case.values](drawn, case)
    dtype = TORCH_DTYPES[case.dtype]
    laid = {name: _LAYOUTS[layout](drawn[name].to(dtype)) for name, layout in zip(OPERANDS, case.layouts, strict=True)}
    return Inputs(**laid)


def _set_logits(drawn: dict[str, Tensor], case: Case, logit: float) -> None:
    """Shift q and k along one direction so that every scaled score lies near `logit`."""
    product = logit / case.scale  # of a query and a key
    size = (abs(product) / case.head_dim) ** 0.5
    drawn["q"].mul_(0.1).add_(size)
    drawn["k"].mul_(0.1).add_(size if product > 0 else -size)


def _scale_do(drawn: dict[str, Tensor], factor: float) -> None:
    drawn["do"].mul_(factor)


def _biased(drawn: dict[str, Tensor], case: Case) -> None:
    drawn["k"].add_(2.0)
    drawn["v"].add_(3.0)


def _peaked(drawn: dict[str, Tensor], case: Case) -> None:
    drawn["q"].mul_(4.0)
    drawn["k"].mul_(4.0)


def _large(drawn: dict[str, Tensor], case: Case) -> None:
    drawn["k"].mul_(10.0)


_VALUES: dict[Values, Callable[[dict[str, Tensor], Case], None]] = {
    Values.NORMAL: lambda drawn, case: None,
    Values.BIASED: _biased,
    Values.PEAKED: _peaked,
    Values.LARGE: _large,
    Values.LOW: lambda drawn, case: _set_logits(drawn, case, -120.0),
    Values.HIGH: lambda drawn, case: _set_logits(drawn, case, 100.0),
    Values.SENTINEL: lambda drawn, case: _set_logits(drawn, case, -60000.0),
    Values.FAINT: lambda drawn, case: _scale_do(drawn, 2.0**-12),
    Values.LOUD: lambda drawn, case: _scale_do(drawn, 2.0**8),
}


def _fused(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    buffer = torch.full((b, s, 3, h, d), float("nan"), dtype=x.dtype, device=x.device)
    buffer[:, :, 1] = x
    return buffer[:, :, 1]


def _offset(x: Tensor) -> Tensor:
    buffer = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)
    view = buffer[64:].view(x.shape)
    view.copy_(x)
    return view


def _padded(x: Tensor) -> Tensor:
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


_LAYOUTS: dict[Layout, Callable[[Tensor], Tensor]] = {
    Layout.CONTIGUOUS: lambda x: x.contiguous(),
    Layout.BHSD: lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    Layout.FUSED: _fused,
    Layout.OFFSET: _offset,
    Layout.PADDED: _padded,
    Layout.EXPANDED: lambda x: x[:, :, :1].contiguous().expand(x.shape),
    Layout.SHARED: lambda x: x[:1].contiguous().expand(x.shape),
    Layout.SINGLE: lambda x: x[:1, :1, :1, :1].contiguous().expand(x.shape),
}
