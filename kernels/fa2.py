"""FA2: FlashAttention-2, from the flash-attn package, else the copy that torch carries. The record's `source` says which.

Algorithm: tiled online softmax on sm80 instructions; dq is added up with fp32 atomics. Masks: regular ones, by band and cu_seqlens.
Layout: BSHD for one document, THD for more; any strides that are multiples of 16 bytes. Dtypes: bf16, fp16.
Head dims: multiples of 8 up to 256 whose kernel is compiled in; head_dim_v = head_dim. GQA: yes.
Directions: forward and backward. lse: yes; FA2's +inf in rows that see nothing is turned into -inf.
Architectures: sm80 and later. Determinism: forward; not dq.
"""

import functools
import importlib.metadata
import importlib.util
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_longca.backend import BackendCall
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import Packing, aligned, band_of, copied, dense_or_varlen, packing_of, regular_form
from pytest_longca.snippets import documents, flash_attention_call, operands, results

EXTENSION = "flash_attn_2_cuda"
INSTANCE = b"run_mha_fwd_IN7cutlass10bfloat16_tELi%dE"
"""The mangled name of the forward for one head dimension: whether it is in the library says whether that size was built."""
SIZES = (32, 64, 96, 128, 192, 256)
"""What FA2 rounds a head dimension up to, to choose a kernel and the layout of its buffers."""
OLDER_SIZES = (160, 224)
"""More of them, in releases before 2.7."""


class Fa2(Kernel):
    """FlashAttention-2 on the regular masks."""

    name = "fa2"
    source = "flash-attn, else torch"
    capabilities = Capabilities(
        masks=frozenset({Form.VARLEN}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=range(8, 257, 8),
        devices=frozenset({"cuda"}),
        capability=(8, 0),
        unequal_head_dims=False,
    )
    device_kernel_pattern = r"flash::flash_(fwd|bwd)"

    def version(self) -> str | None:
        return importlib.metadata.version("flash-attn" if is_package() else "torch")

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        varlen, missing = regular_form(case), missing_size(case.head_dim)
        band = band_of(varlen)
        max_q, max_kv = max(varlen.lens_q), max(varlen.lens_kv)
        rules = (
            (
                missing is not None,
                f"head_dim {case.head_dim} runs in the kernel for {missing}, which this build of flash-attn lacks: "
                f"it has those for {', '.join(map(str, compiled_sizes()))}",
            ),
            (
                band.right is not None and not band.is_causal and band.right >= max_kv,
                f"takes a right window of {band.right} over {max_kv} keys as unlimited, but the first queries must not see all keys",
            ),
            (max_q == 1 and 0 in varlen.lens_q and case.group > 1, "takes no empty document among one-query documents with grouped heads"),
        )
        return next((reason for broken, reason in rules if broken), None)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        packing = packing_of(case, inputs.q.device)
        kernel = (package_attention if is_package() else torch_attention)(packing, case.scale)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = kernel(*(packing.pack(aligned(x)) for x in (q, k, v)))[:2]
            return packing.unpack(out), minus_infinity(packing.unpack_lse(lse), packing)

        facts = {"source": f"{'flash-attn' if is_package() else 'torch'} {self.version()}", "mask_form": packing.form}
        facts |= {"copies": copied({"q": inputs.q, "k": inputs.k, "v": inputs.v}, packing)}
        if packing.has_empty_rows:
            facts["empty_rows"] = "lse +inf turned into -inf"
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        if is_package():
            return flash_attention_call(case, "flash_attn", "return_attn_probs=True", -1)
        packing = packing_of(case, "cpu")
        left, right = packing.band.sides(None)
        cu_seqlens = "CU_SEQLENS_Q, CU_SEQLENS_KV" if packing.is_packed else "None, None"
        longest = f"{packing.max_seqlen_q}, {packing.max_seqlen_kv}"
        return f"""\
{documents(packing)}
def attention(q, k, v):
    out, lse = torch.ops.aten._flash_attention_forward(
        {operands(packing)}, {cu_seqlens}, {longest}, 0.0, {packing.band.is_causal}, False,
        scale=SCALE, window_size_left={left}, window_size_right={right},
    )[:2]
{results(packing)}
"""


def is_package() -> bool:
    """Whether flash-attn is installed: its extension, as FlashAttention-4 shares the name flash_attn."""
    return importlib.util.find_spec(EXTENSION) is not None


def package_attention(packing: Packing, scale: float) -> Callable[..., Any]:
    """flash-attn's function of `(q, k, v)`, giving `(out, lse, ...)`."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    band = packing.band
    options = {"softmax_scale": scale, "causal": band.is_causal, "window_size": band.sides(-1), "return_attn_probs": True}
    return dense_or_varlen(packing, flash_attn_func, flash_attn_varlen_func, options)


def torch_attention(packing: Packing, scale: float) -> Callable[..., Any]:
    """The same function from torch's own copy: an operator with autograd, below SDPA, that has cu_seqlens and windows."""
    left, right = packing.band.sides(None)
    max_seqlens = (packing.max_seqlen_q, packing.max_seqlen_kv)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            *max_seqlens,
            0.0,
            packing.band.is_causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )

    return attend


def minus_infinity(lse: Tensor, packing: Packing) -> Tensor:
    """`lse` with -inf where the backend writes +inf: in rows that see nothing. Costs nothing where there are none."""
    return lse.masked_fill(lse == float("inf"), float("-inf")) if packing.has_empty_rows else lse


def missing_size(head_dim: int) -> int | None:
    """The kernel size that a head dimension is rounded up to, if this build lacks it.

    Such a build goes on with another kernel over buffers of the wrong size, or with none: wrong results and no word.
    """
    compiled = compiled_sizes()
    size = min((size for size in {*SIZES, *compiled} if size >= head_dim), default=None)
    return size if compiled and size not in compiled else None


@functools.lru_cache(maxsize=1)
def compiled_sizes() -> tuple[int, ...]:
    """The head dimensions of the installed build, told by the names in its library without loading it; empty where nothing can be told."""
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None or not spec.origin:
        return ()
    with open(spec.origin, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return tuple(size for size in sorted(SIZES + OLDER_SIZES) if library.find(INSTANCE % size) >= 0)
