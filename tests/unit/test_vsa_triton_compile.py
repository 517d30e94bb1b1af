"""The launch table of vsa_triton compiles for Hopper, and to its matrix instructions and tensor descriptors: seen without a GPU.

The interpreter accepts kernels that the compiler does not, and sees nothing of what NVIDIA's assembler makes of them. Another process
compiles, as this one may have imported Triton to interpret.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
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
        "FULL_OWN": full, "FULL_OTHER": full, "PAD_D": padded, "PAD_V": padded, "TMA": tma, "GROUPED": grouped, "EARLY": config.early,
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


def disassembled(cubin: bytes) -> str:
    """The machine code, by the disassembler that Triton brings along."""
    from triton.backends.nvidia.compiler import __file__ as backend

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(backend).parent / "bin" / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lost_operands(code: str) -> list[int]:
    """Registers that a matrix product in a loop reads before the loop writes them: the second round has lost the first one's operand.

    Our loops carry no such operand from round to round: it is made in the round, or before the loop and kept.
    """
    labels, steps = parsed(code)
    lost: set[int] = set()
    for end, step in enumerate(steps):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", step)
        body = steps[labels.get(jump[1], end) : end] if jump else []
        if not any("EXIT" in inner for inner in body):  # else it is no loop: rare branches lie behind the end, and jump back
            lost |= _lost_in_loop(body)
    return sorted(lost)


def parsed(code: str) -> tuple[dict[str, int], list[str]]:
    """(which step each label stands before, the steps)."""
    labels: dict[str, int] = {}
    steps: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(steps)
        elif step := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line):
            steps.append(step[1])
    return labels, steps


def unset_registers(code: str) -> list[int]:
    """Uniform registers (UR) that a step computes from although some way to it never writes them: they hold what other work left."""
    labels, steps = parsed(code)
    unset: dict[int, set[int]] = {0: set(range(64))}  # before each step that is reached
    found: set[int] = set()
    waiting = [0]
    while waiting:
        at = waiting.pop()
        read, written = _uniform(steps[at])
        found |= read & unset[at]
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", steps[at])
        ends = "EXIT" in steps[at] or (jump and not re.search(r"@|BRA\S* !?U?P\d", steps[at]))
        for then in ([labels[jump[1]]] if jump else []) + ([] if ends and "@" not in steps[at] else [at + 1]):
            before = unset.get(then)
            after = (unset[at] - written) | (before or set())
            if then < len(steps) and after != before:
                unset[then] = after
                waiting.append(then)
    return sorted(found)


def _uniform(step: str) -> tuple[set[int], set[int]]:
    """The uniform registers that a step reads as 32 bits to compute with, and those that it writes."""
    name, _, rest = re.sub(r"^@!?U?P\w+ +", "", step).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P[T\d]", operands[0]):
        operands.pop(0)
    registers = [int(found[1]) if (found := re.fullmatch(r"[-~|]*UR(\d+)\|?(?:\.\w+)?", operand)) else None for operand in operands]
    wide = ".64" in name or "WIDE" in name
    first = registers[0] if registers else None
    written = set() if first is None else {first, first + 1} if wide else {first}
    sources = registers[1:] if first is not None else registers
    return {x for x in sources if x is not None} if name.startswith("U") and not wide else set(), written


def _lost_in_loop(body: list[str]) -> set[int]:
    written: dict[int, int] = {}  # where each register is first written, but by a matrix product
    for at, step in enumerate(body):
        if target := re.match(r"(?:@!?U?P\d+ )?(?!HGMMA|ST|BAR|SYNCS)[A-Z0-9_.]+(?: !?U?PT?\d*,)? R(\d+)(?:\.\w+)?,", step):
            written.setdefault(int(target[1]), at)
    reads = ((at, int(read[1])) for at, step in enumerate(body) if (read := re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", step)))
    return {register for at, first in reads for register in range(first, first + 4) if written.get(register, at) > at}


def compile_table(size: int, dim: int) -> list[dict[str, Any]]:
    from pytest_longca.kernels import vsa_triton_kernels as kernels
    from pytest_longca.kernels.vsa_triton import CONFIGS

    configs, full = CONFIGS[size], size > 1
    return [
        compiled(kernels.vsa_triton_forward, configs.forward, full, False, dim),
        compiled(kernels.vsa_triton_dq, configs.dq, full, False, dim),
        compiled(kernels.vsa_triton_dkdv, configs.dkdv, full, size == 1, dim),
    ]


@pytest.mark.parametrize(("size", "dim"), [(1, 128), (64, 64), (64, 128), (128, 128)])
def test_the_launch_table_compiles_for_hopper(size: int, dim: int, tmp_path: Path) -> None:
    for made in in_another_process(tmp_path, str(size), str(dim)):
        assert made["wgmma"], made
        assert made["tma"] == made["wants_tma"], made
        assert made["shared"] <= 227 * 1024, made
        assert not made["lost"], made
        assert not made["unset"], made


def compile_padded() -> list[dict[str, Any]]:
    """Kernels that computed from an unset register before their tiles had one order (`tile_widths`), under Triton 3.6."""
    from pytest_longca.kernels import vsa_triton_kernels as kernels
    from pytest_longca.kernels.vsa_triton import CONFIGS
    from pytest_longca.kernels.vsa_triton_launch import tile_widths

    forward, dq = kernels.vsa_triton_forward, kernels.vsa_triton_dq
    made = [made_of(forward, CONFIGS[1].forward, False, False, tile_widths(*dims), True) for dims in ((24, 8), (40, 24), (72, 24))]
    return [*made, made_of(dq, CONFIGS[64].dq, True, False, tile_widths(8, 24), True)]


def test_padded_head_dims_compute_from_nothing_unset(tmp_path: Path) -> None:
    for made in in_another_process(tmp_path, "padded"):
        assert made["wgmma"], made
        assert not made["lost"], made
        assert not made["unset"], made


def in_another_process(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(cache), TRITON_INTERPRET="0")
    ran = subprocess.run([sys.executable, __file__, *arguments], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    made: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return made


LOOP = """
.L_x_3:
        /*2660*/                   MOV R9, RZ ;
        /*27a0*/                   HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR20], RZ, !UPT ;
        /*27b0*/                   HGMMA.64x64x16.F32.BF16 R24, R96, gdesc[UR20], R24, gsb0 ;
        /*3440*/                   F2FP.BF16.F32.PACK_AB R{own}, R25, R24 ;
        /*3450*/                   HGMMA.64x64x16.F32.BF16 R56, R{own}, gdesc[UR20].tnspB, R56 ;
        /*39a0*/               @P0 BRA `(.L_x_3) ;
"""


def test_an_operand_that_the_loop_overwrites_is_found_in_machine_code() -> None:
    assert lost_operands(LOOP.replace("{own}", "88")) == []
    assert lost_operands(LOOP.replace("{own}", "100")) == [100]


WAYS = """
        /*0030*/                   ULDC.64 UR32, c[0x0][0x208] ;
        /*0040*/                   S2UR UR14, SR_CTAID.X ;
        /*1e60*/              @!P1 BRA `(.L_x_1) ;
        /*2140*/                   UIADD3 UR{own}, UP0, UR14, 0x40, URZ ;
        /*2150*/                   UIADD3.64 UR20, UR32, 0x2, URZ ;
.L_x_1:
        /*4ea0*/                   UIADD3 UR38, UP0, UR34, 0x40, URZ ;
        /*4eb0*/                   UISETP.GE.AND UP1, UPT, UR33, UR38, UPT ;
        /*4ec0*/               @P1 BRA `(.L_x_1) ;
        /*9a80*/                   EXIT ;
"""


def test_a_register_that_a_way_leaves_unwritten_is_found_in_machine_code() -> None:
    assert unset_registers(WAYS.replace("{own}", "36").replace("UR34", "UR33")) == []
    assert unset_registers(WAYS.replace("{own}", "36")) == [34]
    assert unset_registers(WAYS.replace("{own}", "34")) == [34], "one of two ways"
    assert unset_registers(WAYS.replace("{own}", "34").replace("@!P1 ", "")) == [34], "no way"
    assert unset_registers(WAYS.replace("{own}", "34").replace("@!P1 BRA `(.L_x_1)", "NOP")) == []


if __name__ == "__main__":
    print(json.dumps(compile_padded() if sys.argv[1] == "padded" else compile_table(int(sys.argv[1]), int(sys.argv[2]))))
