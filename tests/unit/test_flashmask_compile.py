"""FlashMask's kernels as compiled for Hopper: the forward where TMA cannot be used, as on expanded heads, and rows kept in registers."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.machine_code import disassembled, in_another_process, lost_operands, parsed, unset_registers

BUILDS = (
    ("fwd", 40, 24, 0), ("fwd", 72, 24, 0), ("fwd", 200, 24, 0), ("fwd", 128, 128, 0), ("fwd", 128, 128, 1), ("dq", 128, 128, 2),
    ("dkdv", 128, 128, 1),
)  # fmt: skip
"""Kernels, head dims, and how many of a program's own operands are kept in registers.

Values' own widths would have another order in shared memory than keys': under Triton 3.6 the first three then compute from nothing.
"""

OWN_OPERANDS = {"fwd": 1, "dq": 2, "dkdv": 2}
"""How many operands a program owns rows of, and multiplies again in each round."""


def compiled(part: str, dim: int, dim_v: int, in_registers: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pytest_longca.kernels.flashmask import HOPPER
    from pytest_longca.kernels.flashmask_backward import dkdv_kernel, dq_kernel
    from pytest_longca.kernels.flashmask_forward import forward_kernel
    from pytest_longca.kernels.tile_widths import tile_widths

    kernel = {"fwd": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}[part]
    number = ("fwd", "dq", "dkdv").index(part)
    widths, tile = tile_widths(dim, dim_v), replace(HOPPER[max(64, 1 << (dim - 1).bit_length())][number], in_registers=in_registers)
    blocks = (tile.step, tile.block) if part == "dkdv" else (tile.block, tile.step)
    constants = {
        "DIM": dim, "DIM_V": dim_v, "BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "BLOCK_D": widths[0], "BLOCK_DV": widths[1],
        "PIECES": 1, "IN_REGISTERS": in_registers, "TMA": False, "PRECISION": "ieee",
    } | ({"EARLY": tile.early} if part == "dkdv" else {})  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "out", "do", "dq", "dk", "dv"), "*bf16")
    types |= dict.fromkeys(("rows", "columns", "runs", "items"), "*i32") | {"scale_log2": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(("lse", "stats", "dk_parts", "dv_parts"), "*fp32")
    names = list(enumerate(kernel.arg_names))
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for _, name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in names if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(i,): constants[name] for i, name in names if name in constants}, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers or None}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = disassembled(made.asm["cubin"])
    return {
        "part": part, "dims": (dim, dim_v), "in_registers": in_registers, "products": code.count("HGMMA"),
        "from_memory": len(re.findall(r"HGMMA\S+ R\d+, gdesc", code)), "reloads": reloads(code), "lost": lost_operands(code),
        "unset": unset_registers(code),
    }  # fmt: skip


def reloads(code: str) -> int:
    """Loads of matrices from shared memory in loops that multiply."""
    labels, steps = parsed(code)
    jumps = ((at, re.search(r"BRA `\((\.L_x_\d+)\)", step)) for at, step in enumerate(steps))
    bodies = [steps[labels.get(jump[1], at) : at] for at, jump in jumps if jump]
    loops = [body for body in bodies if any("HGMMA" in step for step in body) and not any("EXIT" in step for step in body)]
    assert loops, "no loop that multiplies"
    return sum("LDSM" in step for body in loops for step in body)


def test_padded_head_dims_compute_from_nothing_unset(tmp_path: Path) -> None:
    for made in in_another_process(__file__, tmp_path):
        assert made["products"], made
        assert not made["lost"], made
        assert not made["unset"], made
        assert (made["from_memory"] == 0) == (made["in_registers"] == OWN_OPERANDS[made["part"]]), made
        assert not made["reloads"], made


if __name__ == "__main__":
    sys.stdout.write(json.dumps([compiled(*build) for build in BUILDS]) + "\n")
