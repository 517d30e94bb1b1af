"""SDPA: torch.nn.functional.scaled_dot_product_attention, with one backend pinned for each case.

Algorithm: the backend's; the first of `backends` that takes the case, asked for at `bind`, pinned in the call and named in the record.
Nothing falls back silently: the torch dispatcher only ever sees one backend.
Mask: none for full; the causal flag where seqlen_q = seqlen_kv (torch's flag is aligned top-left); else a dense bool mask.
Layout: BSHD, transposed to BHSD without a copy. Dtypes, head dims: as the backend; the mask's memory is O(seqlen_q * seqlen_kv).
GQA: enable_gqa, except for the memory-efficient backend, whose keys and values are repeated inside the call.
Directions: forward and backward. No lse. Architectures: any. Determinism: on the CPU; the CUDA backends add dq or dk in any order.
Rows that see nothing: out 0 and gradients 0 with the CPU's flash and with math (seen on torch 2.13).
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_longca.backend import REFUSALS, BackendCall
from pytest_longca.case import Case, Layout
from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import TORCH_DTYPES, Inputs
from pytest_longca.kernel import SUMS_IN_DTYPE, Capabilities, Kernel
from pytest_longca.kernels.naive import too_long_for_scores
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.outcome import Unsupported
from pytest_longca.packing import band_of

FUSED_DTYPES = {"FLASH_ATTENTION": ("bf16", "fp16"), "EFFICIENT_ATTENTION": ("fp32", "bf16", "fp16"), "CUDNN_ATTENTION": ("bf16", "fp16")}
"""What each CUDA backend takes; the math backend takes everything."""
FRONTEND_REFUSES = "cuDNN Frontend error"
"""So begins what torch raises where cuDNN's frontend does not build the graph; of a graph that fails when it runs it says otherwise."""


class Sdpa(Kernel):
    """SDPA with the first backend that takes the case: fused ones in torch's own order, math last."""

    name = "sdpa"
    source = "torch"
    capabilities = Capabilities(masks=frozenset({Form.PREDICATE}))
    backends: ClassVar[tuple[str, ...]] = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    device_kernel_pattern = r"flash_fwd|fmha_cutlass|cudnn|gemm|softmax"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        reasons = [_refusal(backend, case, machine) for backend in self.backends]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        mask, is_causal = mask_arguments(case, inputs.q.device)
        backend = self._choose(case, inputs, mask, is_causal)
        gqa = case.group > 1 and backend is not SDPBackend.EFFICIENT_ATTENTION
        repeats = 1 if gqa else case.group

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel([backend]):
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=case.scale, enable_gqa=gqa)
            return out.transpose(1, 2), None

        form = "dense bool mask" if mask is not None else "causal flag" if is_causal else "no mask"
        facts = {"backend": backend.name, "mask_form": form}
        if backend is SDPBackend.FLASH_ATTENTION and inputs.q.device.type == "cpu":
            facts[SUMS_IN_DTYPE] = "gradients, block by block"
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts, REFUSALS, FRONTEND_REFUSES)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        backends = [facts["backend"]] if "backend" in facts else list(self.backends)
        repeats = case.group > 1 and backends == ["EFFICIENT_ATTENTION"]
        is_causal = not needs_dense_mask(case) and mask_arguments(case, torch.device("cpu"))[1]
        repeated = "    k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, 2) for x in (k, v))\n" if repeats else ""
        return f"""\
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v):
{repeated}    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([{", ".join(f"SDPBackend.{name}" for name in backends)}]):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask={"VISIBLE" if needs_dense_mask(case) else None}, is_causal={is_causal}, scale=SCALE,
            enable_gqa={case.group > 1 and not repeats},
        )
    return out.transpose(1, 2), None
"""

    def _choose(self, case: Case, inputs: Inputs, mask: Tensor | None, is_causal: bool) -> SDPBackend:
        """The first declared backend that torch itself would run for these tensors. Raises DidNotRun if there is none."""
        machine = Machine(inputs.q.device.type)
        for name in self.backends:
            backend: SDPBackend = getattr(SDPBackend, name)
            if _refusal(name, case, machine) is None and _takes(backend, case, inputs, mask, is_causal):
                return backend
        raise DidNotRun(Unsupported(f"torch has no {' or '.join(self.backends)} backend for this case on this device"))


class _Pinned(Sdpa):
    """SDPA with one CUDA backend. On the CPU `sdpa` is all there is: flash, and math where flash does not go."""

    capabilities = dataclasses.replace(Sdpa.capabilities, devices=frozenset({"cuda"}))


class SdpaMath(_Pinned):
    """SDPA's unfused backend."""

    name = "sdpa_math"
    backends = ("MATH",)
    device_kernel_pattern = r"gemm|softmax|cutlass"


class SdpaFlash(_Pinned):
    """SDPA's FlashAttention-2."""

    name = "sdpa_flash"
    backends = ("FLASH_ATTENTION",)
    device_kernel_pattern = r"pytorch_flash::flash_(fwd|bwd)"


class SdpaEfficient(_Pinned):
    """SDPA's memory-efficient backend."""

    name = "sdpa_efficient"
    backends = ("EFFICIENT_ATTENTION",)
    device_kernel_pattern = r"fmha_cutlass"


class SdpaCudnn(_Pinned):
    """SDPA's cuDNN backend."""

    name = "sdpa_cudnn"
    backends = ("CUDNN_ATTENTION",)
    device_kernel_pattern = r"cudnn"


def needs_dense_mask(case: Case) -> bool:
    """Whether SDPA needs the mask as a tensor: all but full, and causal on a square."""
    varlen = case.mask.varlen()
    if varlen is None or varlen.is_packed:
        return True
    band = band_of(varlen)
    return not (band.is_full or (band.is_causal and case.seqlen_q == case.seqlen_kv))


def mask_arguments(case: Case, device: torch.device) -> tuple[Tensor | None, bool]:
    """`(attn_mask, is_causal)`: bool `[batch or 1, heads or 1, seqlen_q, seqlen_kv]` or None."""
    if needs_dense_mask(case):
        return case.mask.dense(device).contiguous(), False
    varlen = case.mask.varlen()
    return None, varlen is not None and not band_of(varlen).is_full


def has_out_across_heads(case: Case) -> bool:
    """Whether torch's cuDNN path lays out `out` with a last stride that is not 1: it orders its axes by q's strides, and 0 comes first.

    cuDNN builds no graph for that. torch then raises, but by its source (MHA.cpp) keeps a null pointer for the graph: the next call of
    these sizes was a segmentation fault (2.11).
    """
    shares_memory = {Layout.EXPANDED: case.heads_q > 1, Layout.SHARED: case.batch > 1}.get(case.layouts[0], False)
    return shares_memory and case.head_dim != case.head_dim_v


def _refusal(backend: str, case: Case, machine: Machine) -> str | None:
    """Why the backend cannot do the case, as far as sizes and dtypes tell, or None."""
    if backend == "MATH":
        return too_long_for_scores(case, machine)
    if machine.device == "cpu":
        return _cpu_refusal(backend, case)
    multiple = 4 if case.dtype == "fp32" else 8
    rules = (
        (case.dtype not in FUSED_DTYPES[backend], f"{backend} takes {', '.join(FUSED_DTYPES[backend])}, not {case.dtype}"),
        (backend == "FLASH_ATTENTION" and needs_dense_mask(case), "FLASH_ATTENTION takes no mask tensor"),
        (backend == "FLASH_ATTENTION" and case.head_dim != case.head_dim_v, "FLASH_ATTENTION needs head_dim_v = head_dim"),
        (backend == "FLASH_ATTENTION" and case.head_dim > 256, "FLASH_ATTENTION takes head_dim up to 256"),
        (backend == "CUDNN_ATTENTION" and max(case.head_dim, case.head_dim_v) > 128, "CUDNN_ATTENTION takes head_dim up to 128"),
        (
            backend == "CUDNN_ATTENTION" and has_out_across_heads(case),
            "CUDNN_ATTENTION has no graph for q of shared memory with another head_dim_v, and crashes when it is asked once more",
        ),
        (bool(case.head_dim % multiple or case.head_dim_v % multiple), f"{backend} takes head dims in steps of {multiple}"),
    )
    too_long = too_long_for_scores(case, machine) if needs_dense_mask(case) else None
    return next((reason for broken, reason in rules if broken), too_long)


def _cpu_refusal(backend: str, case: Case) -> str | None:
    if backend != "FLASH_ATTENTION":
        return f"{backend} runs on cuda only"
    return "FLASH_ATTENTION needs head_dim_v = head_dim" if case.head_dim != case.head_dim_v else None


def _takes(backend: SDPBackend, case: Case, inputs: Inputs, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch's own dispatcher would run the pinned backend on these tensors."""
    grad = case.direction.needs_backward
    repeats = case.group if backend is SDPBackend.EFFICIENT_ATTENTION else 1
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(grad) for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    assert q.dtype is TORCH_DTYPES[case.dtype]
    with sdpa_kernel([backend]):
        try:
            chosen = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=case.scale, enable_gqa=k.shape[1] != q.shape[1])
        except RuntimeError:  # "no viable backend": this torch raises where another returns ERROR
            return False
    return bool(chosen == backend.value)
