"""How often our Triton kernels are compiled: for strides that are all multiples of 16, and once more for any others.

By itself Triton compiles a kernel anew for every integer argument that is 1, or a multiple of 16, where it was not before. The examples of
a cell have hundreds of such combinations, at a second or more for each. Only strides tell the compiler something: whether it may load
several elements at once. A stride that is no multiple of 16 has all of its operand loaded one by one; here it has the other operands, too,
but for those that TMA reads.

Importing this module imports triton.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import triton

SIZES = (
    "seqlen_q", "seqlen_kv", "heads", "heads_q", "heads_kv", "parts", "num_items", "bulk", "head_block", "blocks", "mask_stride",
    "num_tiles", "num_blocks", "map_stride",
)  # fmt: skip
"""Arguments that differ from case to case and tell the compiler nothing: one code serves all their values.

Not `group`: where it is 1 there is no division, and a register more is free in FlashMask's forward, which has none to spare.
"""

OPERANDS = ("q", "k", "v", "out", "do", "dq", "dk", "dv", "grad")
STRIDES = tuple(f"{operand}_{axis}" for operand in OPERANDS for axis in ("sb", "ss", "sh"))
"""Strides of batch, sequence and heads of the operands."""

MULTIPLE = 16
"""What Triton asks of an integer to compile for it."""


def for_strides(kernel: Any, strides: Sequence[int]) -> Any:
    """The kernel that serves these strides: itself if all are multiples of 16, else its code for any strides."""
    return _for_any_strides(kernel.fn) if any(stride % MULTIPLE for stride in strides) else kernel


@functools.cache
def _for_any_strides(function: Callable[..., None]) -> Any:
    return triton.jit(function, do_not_specialize=(*SIZES, *STRIDES))
