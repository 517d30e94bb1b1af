"""FlashMask's forward as compiled for Hopper where TMA cannot be used, as on expanded heads: elements loaded one by one."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.machine_code import disassembled, in_another_process, lost_operands, unset_registers

DIMS = ((40, 24, False), (72, 24, False), (200, 24, False), (128, 128, False), (128, 128, True))
"""Head dims, and whether q is kept in registers.

Values' own widths would have another order in shared memory than keys': under Triton 3.6 the first three then compute from nothing.
"""


def compiled(dim: int, dim_v: int, in_registers: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pytest_longca.kernels.flashmask import HOPPER
    from pytest_longca.kernels.flashmask_forward import forward_kernel
    from pytest_longca.kernels.tile_widths import tile_widths

    widths, tile = tile_widths(dim, dim_v), replace(HOPPER[max(64, 1 << (dim - 1).bit_length())][0], in_registers=in_registers)
    constants = {
        "DIM": dim, "DIM_V": dim_v, "BLOCK_M": tile.block, "BLOCK_N": tile.step, "BLOCK_D": widths[0], "BLOCK_DV": widths[1],
        "PIECES": 1, "IN_REGISTERS": in_registers, "TMA": False, "PRECISION": "ieee",
    }  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("rows", "runs", "items"), "*i32")
    types |= {"lse": "*fp32", "scale_log2": "fp32"}
    names = list(enumerate(forward_kernel.arg_names))
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for _, name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in names if signature[name].startswith("*")}
    source = ASTSource(forward_kernel, signature, {(i,): constants[name] for i, name in names if name in constants}, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers or None}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = disassembled(made.asm["cubin"])
    return {
        "dims": (dim, dim_v), "in_registers": in_registers, "products": code.count("HGMMA"),
        "from_memory": len(re.findall(r"HGMMA\S+ R\d+, gdesc", code)), "lost": lost_operands(code), "unset": unset_registers(code),
    }  # fmt: skip


def test_padded_head_dims_compute_from_nothing_unset(tmp_path: Path) -> None:
    for made in in_another_process(__file__, tmp_path):
        assert made["products"], made
        assert not made["lost"], made
        assert not made["unset"], made
        assert made["from_memory"] == 0 if made["in_registers"] else made["from_memory"] > 0, made


if __name__ == "__main__":
    sys.stdout.write(json.dumps([compiled(*dims) for dims in DIMS]) + "\n")
