"""Reference: Naive-Torch in high precision at any length, with what an honest kernel's rounding errors may amount to.

The scores of one row tile exist at a time, so memory is O(seqlen). Where nothing is visible, out is 0, lse -inf, gradients 0.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pytest_longca.arithmetic import Arithmetic, Exact, Split
from pytest_longca.backward import Backward
from pytest_longca.case import Case, Direction
from pytest_longca.forward import Forward
from pytest_longca.inputs import Inputs
from pytest_longca.limits import Bound, rounding_of
from pytest_longca.operands import Operands
from pytest_longca.spent import REFERENCE, spending
from pytest_longca.sweep import SMALL_CELLS

MAX_SPLIT_LOGIT = 1e-5 * 2**24
"""Where scores may be larger than this, their rounding to fp32 alone may cost more than 1e-5 of a probability: fp64 it is."""

COMPILED_AREA = 2**35
"""From so many visible pairs on (32K tokens of 64 causal heads) fusing the elementwise steps is worth compiling them."""

CACHED_BYTES = 4 * 2**30
"""What references that are kept may take together, on whatever machine."""

LEAST_KEPT = 2
"""So many of the newest are kept whatever their size: each kernel that is timed is verified before, and after it on other inputs."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The truth about a case, in fp64 or fp32: out, dq, dk, dv as their operands (BSHD), lse `[batch, heads_q, seqlen_q]`.

    `bounds` has for each of out, dq, dk, dv what its rows' rounding errors may amount to, `[batch, seqlen, heads]`, and for lse its scale.
    Gradients are None where the case has no backward.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    bounds: dict[str, Bound] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the reference."""
        yield from (x for x in (self.out, self.lse, self.dq, self.dk, self.dv) if x is not None)
        for bound in self.bounds.values():
            yield from bound.tensors()

    @property
    def num_bytes(self) -> int:
        """Memory that the reference holds."""
        return sum(x.numel() * x.element_size() for x in self.tensors())


@torch.no_grad()
def compute(case: Case, inputs: Inputs, arithmetic: Arithmetic | None = None) -> Reference:
    """The reference of a case on its inputs' device; the arithmetic is chosen by `choose_arithmetic` unless given."""
    ops = Operands(case, inputs, arithmetic or choose_arithmetic(case, inputs), rounding_of(case))
    # A small case is mostly the starts of its operations, which inference mode makes cheaper. Of others the mask is read on the way, and
    # what a mask keeps of it must not be inference tensors: no kernel could differentiate with them.
    with torch.inference_mode() if ops.visibility.small else torch.no_grad():
        forward = Forward(ops)
        backward = Backward(ops, forward) if case.direction.needs_backward else None
        for tile in ops.tiles():
            scores = forward.visit(tile)
            if backward:
                backward.visit(tile, scores)
        found = forward.finish() | (backward.finish() if backward else {})
    tensors = {name: value for name, (value, _) in found.items()}
    return Reference(**tensors, bounds={name: bound for name, (_, bound) in found.items()})


def choose_arithmetic(case: Case, inputs: Inputs) -> Arithmetic:
    """Halves on the matrix units for long bf16 and fp16 cases on a GPU, fp64 for everything else."""
    is_small = case.num_scores <= SMALL_CELLS
    if is_small or not inputs.q.is_cuda or not halves_suffice(case, inputs):
        return Exact()
    return Split(compiled=case.area >= COMPILED_AREA)


def halves_suffice(case: Case, inputs: Inputs) -> bool:
    """Whether `Split` stays within 2e-5 of each row's sum of absolute terms on these inputs."""
    if case.dtype not in ("bf16", "fp16"):
        return False
    return _largest_norm(inputs.q) * _largest_norm(inputs.k) * abs(case.scale) <= MAX_SPLIT_LOGIT


def _largest_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max())


class _Cache:
    """References by case and device, the newest last, with a running total of their bytes (a sum over thousands of them would cost more
    than a small reference)."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Reference] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def pop(self, key: Hashable) -> Reference | None:
        reference = self._kept.pop(key, None)
        self._bytes -= reference.num_bytes if reference else 0
        return reference

    def put(self, key: Hashable, reference: Reference) -> None:
        self._kept[key] = reference
        self._bytes += reference.num_bytes
        while self._bytes > CACHED_BYTES and len(self._kept) > LEAST_KEPT:
            self._bytes -= self._kept.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0


_cache = _Cache()


def cached_reference(case: Case, inputs: Inputs, device: torch.device | str = "cpu") -> Reference:
    """The reference of a case on its own inputs (those of its seed), computed once for all kernels; old ones are freed.

    One with gradients serves the forward alone too.
    """
    both = dataclasses.replace(case, direction=Direction.FWD_BWD)
    wanted = both if case.direction.needs_backward or (both, str(device)) in _cache else case
    return kept((wanted, str(device)), lambda: compute(wanted, inputs))


def kept(key: Hashable, make: Callable[[], Reference]) -> Reference:
    """The reference that is known under a key, made at the first time."""
    reference = _cache.pop(key) or _made(make)
    _cache.put(key, reference)
    return reference


def _made(make: Callable[[], Reference]) -> Reference:
    with spending(REFERENCE):
        reference = make()
        if reference.out.is_cuda:
            torch.cuda.synchronize()
        return reference


def forget_references() -> None:
    """Free every cached reference."""
    _cache.clear()
