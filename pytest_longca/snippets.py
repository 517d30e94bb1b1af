"""What the calls in standalone files have in common: FlashAttention's interface with a band and cu_seqlens, our own kernels' beginning."""

from pytest_longca.case import Case
from pytest_longca.packing import Packing, packing_of

MINUS_INFINITY = "lse.masked_fill(lse == torch.inf, -torch.inf)"
"""What FlashAttention writes as +inf for rows that see nothing, as it is meant."""

OWN_TRITON = """\
import os

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
"""
"""How the file of one of our own Triton kernels begins: it imports the kernel from here, which is the kernel's package."""


def flash_attention_call(case: Case, module: str, options: str, unlimited: int | None) -> str:
    """A call of `flash_attn_func`, or of its varlen twin for several documents, of a module with FlashAttention's interface.

    `options` are further arguments; `unlimited` is the backend's word for a side of the window without limit.
    """
    packing = packing_of(case, "cpu")
    window = (None, None) if unlimited is None and packing.band.is_causal else packing.band.sides(unlimited)
    mask = f"causal={packing.band.is_causal}, window_size={window}"
    arguments = f"softmax_scale=SCALE, {mask}, {options}"
    name = "flash_attn_varlen_func" if packing.is_packed else "flash_attn_func"
    given = f"{documents_arguments(packing)}, {arguments}" if packing.is_packed else arguments
    return f"""\
from {module} import {name}

{documents(packing)}
def attention(q, k, v):
    out, lse = {name}({operands(packing)}, {given})[:2]
{results(packing)}
"""


def documents(packing: Packing) -> str:
    """Lines that define CU_SEQLENS_Q and CU_SEQLENS_KV, none where there is one document."""
    if packing.cu_seqlens_q is None or packing.cu_seqlens_kv is None:
        return ""
    both = (("Q", packing.cu_seqlens_q), ("KV", packing.cu_seqlens_kv))
    return "".join(f"CU_SEQLENS_{name} = torch.tensor({x.tolist()}, dtype=torch.int32, device=DEVICE)\n" for name, x in both) + "\n"


def documents_arguments(packing: Packing) -> str:
    """FlashAttention's arguments for several documents."""
    longest = f"max_seqlen_q={packing.max_seqlen_q}, max_seqlen_k={packing.max_seqlen_kv}"
    return f"cu_seqlens_q=CU_SEQLENS_Q, cu_seqlens_k=CU_SEQLENS_KV, {longest}"


def operands(packing: Packing) -> str:
    """The operands as arguments, packed where there are several documents."""
    return f"*(aligned(x){'.flatten(0, 1)' if packing.is_packed else ''} for x in (q, k, v))"


def results(packing: Packing) -> str:
    """The function's last lines: `out` and `lse` in BSHD again."""
    if not packing.is_packed:
        return f"    return out, {MINUS_INFINITY}"
    unpacked = "    out, lse = out.unflatten(0, (BATCH, -1)), lse.unflatten(1, (BATCH, -1)).transpose(0, 1)"
    return f"{unpacked}\n    return out, {MINUS_INFINITY}"
