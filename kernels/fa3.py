"""FA3: FlashAttention-3 for Hopper, as flash_attn_interface gives it.

Algorithm: warp-specialised online softmax with WGMMA and TMA. Masks: regular ones, by band and cu_seqlens.
Layout: BSHD for one document, THD for more; other strides than multiples of 16 bytes, and stride 0, are copied. Dtypes: bf16, fp16.
Head dims: multiples of 8 up to 256, as far as the build has them; head_dim_v = head_dim. GQA: yes.
Directions: forward, and backward if the build has it (its flash_attn_config says so; the packages on PyPI do not). lse: yes.
Architectures: sm90. Determinism: forward; not dq.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pytest_longca.backend import BackendCall
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.kernels.fa2 import minus_infinity
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import Packing, aligned, copied, dense_or_varlen, packing_of
from pytest_longca.snippets import flash_attention_call

HEAD_DIMS = (64, 96, 128, 192, 256)


class Fa3(Kernel):
    """FlashAttention-3 on the regular masks."""

    name = "fa3"
    source = "flash_attn_interface"
    requires = (
        Requirement(distribution="tokenspeed-fa3", alternatives=("fa3-fwd", "flash_attn_3"), how="pip install 'pytest-longca[fa3]'"),
    )
    capabilities = Capabilities(
        masks=frozenset({Form.VARLEN}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=range(8, 257, 8),
        devices=frozenset({"cuda"}),
        capability=(9, 0),
        unequal_head_dims=False,
    )
    device_kernel_pattern = r"FlashAttnFwdSm90|FlashAttnBwdSm90"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        flags = build_flags()
        built = [size for size in HEAD_DIMS if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")]
        has_backward = not flags.get("FLASHATTENTION_DISABLE_BACKWARD")
        rules = (
            (machine.capability is not None and machine.capability[0] != 9, "runs on Hopper (compute capability 9.x) only"),
            (
                case.direction.needs_backward and not has_backward,
                "this build of FlashAttention-3 is forward only (its flash_attn_config says so)",
            ),
            (case.dtype == "fp16" and bool(flags.get("FLASHATTENTION_DISABLE_FP16")), "this build of FlashAttention-3 has no fp16"),
            (case.head_dim > max(built, default=0), f"this build has head dims up to {max(built, default=0)}"),
        )
        return next((reason for broken, reason in rules if broken), None)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        packing = packing_of(case, inputs.q.device)
        kernel = interface_attention(packing, case.scale)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = kernel(*(packing.pack(aligned(x)) for x in (q, k, v)))[:2]
            return packing.unpack(out), minus_infinity(packing.unpack_lse(lse), packing)

        facts = {"source": f"flash_attn_interface {self.version()}", "mask_form": packing.form}
        facts |= {"copies": copied({"q": inputs.q, "k": inputs.k, "v": inputs.v}, packing)}
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        return flash_attention_call(case, "flash_attn_interface", "return_attn_probs=True", -1)


def interface_attention(packing: Packing, scale: float) -> Callable[..., Any]:
    """flash_attn_interface's function of `(q, k, v)`, giving `(out, lse)`."""
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    band = packing.band
    options = {"softmax_scale": scale, "causal": band.is_causal, "window_size": band.sides(-1), "return_attn_probs": True}
    return dense_or_varlen(packing, flash_attn_func, flash_attn_varlen_func, options)


def build_flags() -> Mapping[str, bool]:
    """What the installed build left out; empty if it is not installed. The file holds a dict and imports nothing."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return {}
    flags: Mapping[str, bool] = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return flags
