"""The launch table of vsa_triton compiles for Hopper, and to its matrix instructions and tensor descriptors: seen without a GPU.

The interpreter accepts kernels that the compiler does not. Another process compiles, as this one may have imported Triton to interpret.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
POINTERS = dict.fromkeys(("q", "k", "v", "out", "do", "dq", "dk", "dv"), "*bf16") | {"lse": "*fp32", "delta": "*fp32", "indptr": "*i64"}
POINTERS |= dict.fromkeys(("order", "own_start", "own_stop", "own_block", "start", "stop", "part"), "*i32")


def compiled(kernel: Any, config: Any, full: bool, grouped: bool) -> dict[str, Any]:
    """What the compiler made of a kernel under a configuration, head_dim 128, bf16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    other = config.block_n if "part" not in kernel.arg_names else config.block_m
    tma = config.tma and full
    constants: dict[str, Any] = {
        "HEAD_DIM": 128, "HEAD_DIM_V": 128, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "FULL_OWN": full, "FULL_OTHER": full,
        "PAD_D": False, "PAD_V": False, "TMA": tma, "IN_REGISTERS": config.in_registers, "GROUPED": grouped,
    }  # fmt: skip
    constants |= ({"stop": None} if full else {}) | ({} if grouped else {"part": None})
    read_by_tile = ("k", "v") if "part" not in kernel.arg_names else ("q", "do")
    types = dict(POINTERS, scale="fp32", scale_log2="fp32")
    types |= {name: f"tensordesc<bf16[{other}, 128]>" for name in read_by_tile if tma}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith(("*", "i32"))}
    source = ASTSource(
        kernel, signature, {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}, attrs=aligned
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__, "wants_tma": tma, "tma": "cp.async.bulk.tensor" in ptx, "wgmma": "wgmma.mma_async" in ptx,
        "shared": made.metadata.shared,
    }  # fmt: skip


def compile_table(size: int) -> list[dict[str, Any]]:
    from pytest_longca.kernels import vsa_triton_kernels as kernels
    from pytest_longca.kernels.vsa_triton import CONFIGS

    configs, full = CONFIGS[size], size > 1
    return [
        compiled(kernels.vsa_triton_forward, configs.forward, full, grouped=False),
        compiled(kernels.vsa_triton_dq, configs.dq, full, grouped=False),
        compiled(kernels.vsa_triton_dkdv, configs.dkdv, full, grouped=size == 1),
    ]


@pytest.mark.parametrize("size", [1, 64, 128])
def test_the_launch_table_compiles_for_hopper(size: int, tmp_path: Path) -> None:
    env = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    ran = subprocess.run([sys.executable, __file__, str(size)], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for made in json.loads(ran.stdout.splitlines()[-1]):
        assert made["wgmma"], made
        assert made["tma"] == made["wants_tma"], made
        assert made["shared"] <= 227 * 1024, made


if __name__ == "__main__":
    print(json.dumps(compile_table(int(sys.argv[1]))))
