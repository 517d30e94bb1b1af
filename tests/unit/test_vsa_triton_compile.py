"""The launch table of vsa_triton compiles for Hopper, and to its matrix instructions and tensor descriptors: seen without a GPU.

The interpreter accepts kernels that the compiler does not, and sees nothing of what NVIDIA's assembler makes of them. Another process
compiles, as this one may have imported Triton to interpret.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.machine_code import disassembled, in_another_process, lost_operands, unset_registers

POINTERS = dict.fromkeys(("q", "k", "v", "out", "do", "dq", "dk", "dv"), "*bf16") | {"lse": "*fp32", "delta": "*fp32", "indptr": "*i64"}
POINTERS |= dict.fromkeys(("order", "own_start", "own_stop", "own_block", "num_full", "start", "stop", "part"), "*i32")


def compiled(kernel: Any, config: Any, full: bool, grouped: bool, dim: int) -> dict[str, Any]:
    """What the compiler made of a kernel under a configuration, bf16, with strides of multiples of 16."""
    return made_of(kernel, config, full, grouped, (dim, dim), padded=False)


def made_of(kernel: Any, config: Any, full: bool, grouped: bool, widths: tuple[int, int], padded: bool) -> dict[str, Any]:
    """What the compiler made of a kernel with tiles of these widths of head_dim and head_dim_v.

    `padded`: head dims are smaller, and strides of no multiple of 16, so that elements are loaded one by one.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    other = config.block_n if "part" not in kernel.arg_names else config.block_m
    tma = config.tma and not padded
    constants: dict[str, Any] = {
        "HEAD_DIM": widths[0], "HEAD_DIM_V": widths[1], "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "FULL_OWN": full, "FULL_OTHER": full, "PAD_D": padded, "PAD_V": padded, "TMA": tma, "GROUPED": grouped,
        "IN_REGISTERS": all(config.keeps_in_registers(width) for width in widths),
    }  # fmt: skip
    constants |= ({"stop": None, "num_full": None} if full else {}) | ({} if grouped else {"part": None})
    read_by_tile = ("k_tiles", "v_tiles") if "part" not in kernel.arg_names else ("q_tiles", "do_tiles")
    types = dict(POINTERS, scale="fp32", scale_log2="fp32")
    types |= dict.fromkeys(read_by_tile, f"tensordesc<bf16[{other}, {widths[0]}]>" if tma else "*bf16")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    multiples = ("*",) if padded else ("*", "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith(multiples)}
    source = ASTSource(
        kernel, signature, {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}, attrs=aligned
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx, code = made.asm["ptx"], disassembled(made.asm["cubin"])
    return {
        "kernel": kernel.__name__, "wants_tma": tma, "tma": "cp.async.bulk.tensor" in ptx, "wgmma": "wgmma.mma_async" in ptx,
        "shared": made.metadata.shared, "lost": lost_operands(code), "unset": unset_registers(code),
    }  # fmt: skip


ROWS = ((1, 128), (64, 64), (64, 128), (128, 128))
"""Sizes of own blocks, as the launch table has them, and head dims."""


def builds(size: int, dim: int) -> list[tuple[str, Any, bool, bool, int]]:
    """What `compiled` is asked for a row: kernel, configuration, whether blocks are full, whether in groups, and head_dim."""
    from pytest_longca.kernels.vsa_triton import CONFIGS

    configs, full = CONFIGS[size], size > 1
    return [
        ("vsa_triton_forward", configs.forward, full, False, dim),
        ("vsa_triton_dq", configs.dq, full, False, dim),
        ("vsa_triton_dkdv", configs.dkdv, full, size == 1, dim),
    ]


def compile_table(size: int, dim: int) -> list[dict[str, Any]]:
    """A row's codes but for those that an earlier row has too: nothing of a size is in them but its configuration."""
    from pytest_longca.kernels import vsa_triton_kernels as kernels

    earlier = [build for row in ROWS[: ROWS.index((size, dim))] for build in builds(*row)]
    return [compiled(getattr(kernels, name), *others) for name, *others in builds(size, dim) if (name, *others) not in earlier]


@pytest.mark.parametrize(("size", "dim"), ROWS)
def test_the_launch_table_compiles_for_hopper(size: int, dim: int, tmp_path: Path) -> None:
    table = in_another_process(__file__, tmp_path, str(size), str(dim))
    assert table, "a row of its own for what another row has"
    for made in table:
        assert made["wgmma"], made
        assert made["tma"] == made["wants_tma"], made
        assert made["shared"] <= 227 * 1024, made
        assert not made["lost"], made
        assert not made["unset"], made


def compile_padded() -> list[dict[str, Any]]:
    """Kernels that computed from an unset register before their tiles had one order (`tile_widths`), under Triton 3.6."""
    from pytest_longca.kernels import vsa_triton_kernels as kernels
    from pytest_longca.kernels.tile_widths import tile_widths
    from pytest_longca.kernels.vsa_triton import CONFIGS

    forward, dq = kernels.vsa_triton_forward, kernels.vsa_triton_dq
    made = [made_of(forward, CONFIGS[1].forward, False, False, tile_widths(*dims), True) for dims in ((24, 8), (40, 24), (72, 24))]
    return [*made, made_of(dq, CONFIGS[64].dq, True, False, tile_widths(8, 24), True)]


def test_padded_head_dims_compute_from_nothing_unset(tmp_path: Path) -> None:
    for made in in_another_process(__file__, tmp_path, "padded"):
        assert made["wgmma"], made
        assert not made["lost"], made
        assert not made["unset"], made


if __name__ == "__main__":
    print(json.dumps(compile_padded() if sys.argv[1] == "padded" else compile_table(int(sys.argv[1]), int(sys.argv[2]))))
