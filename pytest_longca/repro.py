"""A standalone Python file for a failure: one call of the kernel on one case, judged by a float64 reference.

Nothing of ours is in it or needed by it, but for a kernel that is ours: that is imported, and the header says so.
"""

import hashlib
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_longca import repro_text
from pytest_longca.case import Case
from pytest_longca.errors import InvalidArgument, asked
from pytest_longca.kernel import Kernel
from pytest_longca.repro_mask import mask_text
from pytest_longca.repro_operands import operands_text

if TYPE_CHECKING:
    from pytest_longca.checks import Verification
    from pytest_longca.machine import Machine

WIDTH = 120
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
UNITS = {"fp32": 2**-24, "bf16": 2**-9, "fp16": 2**-12, "fp64": 2**-53}
"""A quarter of the dtype's spacing at 1, as in `limits`."""


NO_CALL_YET = "The call is not in this file:"
OWN = "The kernel is pytest-longca's own and is imported from it: operands, mask, reference and comparison are spelled out here."


def write_repro(
    folder: str, kernel: Kernel, case: Case, verification: "Verification", machine: "Machine", versions: Mapping[str, str]
) -> Path:
    """Write the file of a failure and give its path.

    Raises InvalidArgument if it cannot be written, the mask is too long for it or the kernel's snippet raises.
    """
    text = repro_source(kernel, case, verification, machine, versions)
    path = Path(folder) / f"{kernel.name}_{hashlib.sha256(case.id.encode()).hexdigest()[:8]}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--longca-repro: {path} cannot be written ({error.strerror}): name a folder that can") from None
    return path


def repro_source(kernel: Kernel, case: Case, verification: "Verification", machine: "Machine", versions: Mapping[str, str]) -> str:
    """The file's text."""
    snippet = _call_of(kernel, case, verification.facts)
    call = repro_text.NO_CALL.format(kernel=kernel.name) if snippet is None else textwrap.dedent(snippet).strip()
    copies_do = "aligned(" in call  # what takes aligned operands only takes such a gradient only
    parts = [
        _header(kernel, case, verification, machine, versions, snippet),
        repro_text.IMPORTS,
        _constants(case, machine.device),
        mask_text(case.mask),
        operands_text(case),
        *([repro_text.ALIGNED] if copies_do else []),
        f"# The call.\n{call}",
        repro_text.REFERENCE,
        repro_text.AGREES,
        repro_text.MAIN.replace("GRADIENT", "aligned(do)" if copies_do else "do"),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _call_of(kernel: Kernel, case: Case, facts: Mapping[str, str]) -> str | None:
    """The kernel's snippet, or None where it inherits one and has a `bind` of its own: that of another kernel would judge the other."""
    snippet_of, bind_of = (next(cls for cls in type(kernel).__mro__ if name in vars(cls)) for name in ("snippet", "bind"))
    if not issubclass(snippet_of, bind_of):
        return None
    # Somebody's code: that it raises is told beside the failure that it is about.
    return asked(f"--longca-repro: the snippet of {kernel.name}", lambda: kernel.snippet(case, facts))


def is_without_call(path: Path) -> bool:
    """Whether a written file waits for somebody to put the call in."""
    return NO_CALL_YET in path.read_text(encoding="utf-8")


def _header(
    kernel: Kernel, case: Case, verification: "Verification", machine: "Machine", versions: Mapping[str, str], snippet: str | None
) -> str:
    """What is wrong, on which case, with which versions, as comments."""
    is_own = "pytest_longca" in (snippet or "")
    needs = " and ".join(["torch", *(["pytest-longca"] if is_own else []), *(need.distribution for need in kernel.requires)])
    lines = [f"{kernel.name}: {verification.outcome}", *(str(finding) for finding in verification.findings)]
    lines += ["", f"case: {case.id}", f"seen with: {', '.join(' '.join(pair) for pair in versions.items())}, on {machine.name}"]
    lines += ["", f"Needs {needs}. Makes one call and compares it with the formulas in float64; exits with 1 while a tensor is wrong."]
    lines += [OWN] if is_own else []
    lines += [] if snippet is not None else [f"{NO_CALL_YET} until it is written into attention(), running it says so and exits with 2."]
    if others := sorted({finding.check for finding in verification.findings} - {"truth"}):
        lines += [f"Found by {', '.join(others)}: that looks at other calls than the one on these operands, so this file may see nothing."]
    return "\n".join(_comment(line) for line in lines)


def _comment(line: str) -> str:
    pieces = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(f"# {piece}".rstrip() for piece in pieces)


def _constants(case: Case, device: str) -> str:
    return textwrap.dedent(f"""\
        DEVICE, DTYPE, SEED = "{device}", torch.{TORCH_NAMES[case.dtype]}, {case.seed}
        BATCH, HEADS_Q, HEADS_KV = {case.batch}, {case.heads_q}, {case.heads_kv}
        SEQLEN_Q, SEQLEN_KV = {case.seqlen_q}, {case.seqlen_kv}
        HEAD_DIM, HEAD_DIM_V = {case.head_dim}, {case.head_dim_v}
        SCALE = {case.scale!r}
        BACKWARD = {case.direction.needs_backward}
        UNIT, SCORE_UNIT = {UNITS[case.dtype]!r}, {UNITS["fp64" if case.dtype == "fp64" else "fp32"]!r}  # of rounding: operands, scores""")
