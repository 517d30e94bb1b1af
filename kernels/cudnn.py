"""cuDNN's fused attention through the operators of nvidia-cudnn-frontend (torch.ops.cudnn.sdpa_fwd and its autograd).

Algorithm: cuDNN's, chosen by its heuristics when the graph of a shape is built (the first call of that shape).
Masks: regular ones. Dense for one document, THD with cu_seqlens for more, without padding; also THD where there are more queries than
keys below a band, which cuDNN's dense form refuses. A document with queries and no keys is refused. cuDNN's left window is exclusive and
its diagonal top-left unless told otherwise.
Layout: BSHD transposed to BHSD without a copy, or THD. Dtypes: bf16, fp16. Head dims: multiples of 8 up to 256. GQA: yes.
Directions: forward and backward. lse: yes. Architectures: sm80 and later. Determinism: only under torch.use_deterministic_algorithms.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_longca.backend import REFUSALS, BackendCall
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.kernels.fa2 import minus_infinity
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.packing import Packing, aligned, copied, packing_of, regular_form
from pytest_longca.snippets import MINUS_INFINITY, documents, operands

FRONTEND = Requirement(distribution="nvidia-cudnn-frontend", at_least="1.32", how="pip install 'pytest-longca[cudnn]'")


class Cudnn(Kernel):
    """cuDNN's fused attention on the regular masks."""

    name = "cudnn"
    source = "nvidia-cudnn-frontend"
    requires = (FRONTEND,)
    capabilities = Capabilities(
        masks=frozenset({Form.VARLEN}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=range(8, 257, 8),
        devices=frozenset({"cuda"}),
        capability=(8, 0),
    )
    compiles_per_shape = True  # half a second for a graph, six for one with a window or cu_seqlens (H200)
    device_kernel_pattern = r"cudnn"

    def compiles_to_disk(self, machine: Machine) -> bool:
        return False  # a graph lives as long as its process

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        varlen = regular_form(case)
        rules = (
            (
                any(kv == 0 < q for q, kv in zip(varlen.lens_q, varlen.lens_kv, strict=True)),
                "takes no queries whose document has no keys: their out would be garbage and their lse 0",
            ),
            (
                case.direction.needs_backward and max(case.head_dim, case.head_dim_v) > 128 and _below_hopper(machine),
                "has no backward above head_dim 128 before Hopper",
            ),
            (
                case.direction.needs_backward and case.head_dim == 192 and case.head_dim_v != 128,
                "has a backward of head_dim 192 with head_dim_v 128 only",
            ),
        )
        return next((reason for broken, reason in rules if broken), None)

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        import cudnn.sdpa.fwd.torch_op  # noqa: F401  # registers the operators

        packing = packing_of(case, inputs.q.device, always_packed=needs_packing(case))
        arguments = operator_arguments(packing)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (_operand(aligned(x), packing) for x in (q, k, v))
            out, stats = torch.ops.cudnn.sdpa_fwd(q, k, v, case.scale, return_lse=True, **arguments)
            if packing.is_packed:
                return packing.unpack(out), minus_infinity(packing.unpack_lse(stats[..., 0].T), packing)
            return out.transpose(1, 2), minus_infinity(stats[..., 0], packing)

        facts = {"source": f"nvidia-cudnn-frontend {self.version()}, cuDNN {torch.backends.cudnn.version()}", "mask_form": packing.form}
        facts |= {"copies": copied({"q": inputs.q, "k": inputs.k, "v": inputs.v}, packing)}
        types = (*REFUSALS, "cudnn:cudnnGraphNotSupportedError")
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts, types)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        packing = packing_of(case, "cpu", always_packed=needs_packing(case))
        given = {name: x for name, x in operator_arguments(packing).items() if not isinstance(x, Tensor)}
        arguments = [f"{name}={x}" for name, x in given.items()]
        arguments += ["cu_seqlens_q=CU_SEQLENS_Q", "cu_seqlens_kv=CU_SEQLENS_KV"] if packing.is_packed else []
        back = "lse[..., 0].T.unflatten(1, (BATCH, -1)).transpose(0, 1)" if packing.is_packed else "lse[..., 0]"
        out = "out.unflatten(0, (BATCH, -1))" if packing.is_packed else "out.transpose(1, 2)"
        return f"""\
import cudnn.sdpa.fwd.torch_op  # registers the operators

{documents(packing)}
def attention(q, k, v):
    q, k, v = {operands(packing)[1:] if packing.is_packed else "(aligned(x).transpose(1, 2) for x in (q, k, v))"}
    out, lse = torch.ops.cudnn.sdpa_fwd(q, k, v, SCALE, return_lse=True, {", ".join(arguments)})
    lse = {back}
    return {out}, {MINUS_INFINITY}
"""


def needs_packing(case: Case) -> bool:
    """Whether one document goes through THD as well: the dense form has no band over more queries than keys."""
    return case.seqlen_q > case.seqlen_kv and not packing_of(case, "cpu").band.is_full


def operator_arguments(packing: Packing) -> dict[str, Any]:
    """The mask as cuDNN's operator takes it: the left side counts the first key that is hidden, the right side the last that is not."""
    left, right = packing.band.left, packing.band.right
    arguments: dict[str, Any] = {
        "is_causal": right == 0,
        "causal_bottom_right": packing.lens_q != packing.lens_kv and not packing.band.is_full,
        "window_left": -1 if left is None else left + 1,
        "window_right": -1 if right in (None, 0) else right,
    }
    if packing.is_packed:
        arguments |= {"cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_kv": packing.cu_seqlens_kv}
        arguments |= {"max_seqlen_q": packing.max_seqlen_q, "max_seqlen_kv": packing.max_seqlen_kv}
    return arguments


def _operand(x: Tensor, packing: Packing) -> Tensor:
    return packing.pack(x) if packing.is_packed else x.transpose(1, 2)


def _below_hopper(machine: Machine) -> bool:
    return machine.capability is not None and machine.capability < (9, 0)
