"""What NVIDIA's assembler made of a Triton kernel, read without a GPU: operands and registers that it lost on the way."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def in_another_process(script: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a script prints as JSON in a process where Triton compiles: this one may have imported it to interpret."""
    env = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(cache), TRITON_INTERPRET="0")
    ran = subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    made: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return made


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
