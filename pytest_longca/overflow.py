"""P13: operands whose element offsets pass 2^31 and 2^32, in memory of which only their own elements are ever touched."""

import torch
from torch import Tensor

from pytest_longca.errors import DidNotRun
from pytest_longca.inputs import Inputs
from pytest_longca.outcome import Unsupported
from pytest_longca.subject import Finding, Subject

FAR_ELEMENTS = 5 * 2**30
"""The offset that the last token exceeds: beyond 2^31 and 2^32 elements, so that tokens lie on both sides of each."""
ALIGNMENT = 64
"""Elements that a token's start is a multiple of: what vector loads and tensor maps ask for."""


def overflow(subject: Subject) -> list[Finding]:
    """The same values with tokens so far apart that 32-bit offsets wrap: the truth stays the same."""
    subject.result  # noqa: B018  # first, in ordinary memory
    pairs = ((subject.inputs.q, subject.inputs.do), (subject.inputs.k, subject.inputs.v))
    needed = sum(buffer_elements(pair) * pair[0].element_size() for pair in pairs)
    free = free_bytes(subject.machine.device)
    if needed > free:
        what = f"offsets past 2^32 elements take {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free: run on a larger device"
        raise DidNotRun(Unsupported(what))
    (q, do), (k, v) = (far_apart(pair) for pair in pairs)
    result = subject.run(subject.case, Inputs(q, k, v, do))
    return subject.findings("overflow", result, "with tokens whose offsets pass 2^31 and 2^32 elements")


def free_bytes(device: str) -> int:
    """What may be allocated: of a GPU what nobody holds; of a CPU 4 GiB, whatever there is."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 4 * 2**30


def token_elements(pair: tuple[Tensor, Tensor]) -> int:
    """From one token to the next: all batch elements of both operands lie in between, and the last token is far away."""
    batch, seqlen = pair[0].shape[:2]
    widths = sum(_aligned(x.shape[2] * x.shape[3]) for x in pair)
    return max(batch * widths, _aligned(-(-FAR_ELEMENTS // max(seqlen - 1, 1))))


def buffer_elements(pair: tuple[Tensor, Tensor]) -> int:
    """The size of the buffer that holds both operands of a pair."""
    return token_elements(pair) * pair[0].shape[1]


def far_apart(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Copies of two operands `[batch, seqlen, heads, width]` in one buffer that is never filled, tokens `token_elements` apart."""
    step = token_elements(pair)
    buffer = torch.empty(buffer_elements(pair), dtype=pair[0].dtype, device=pair[0].device)
    views, start = [], 0
    for x in pair:
        batch, _, heads, width = x.shape
        of_batch = _aligned(heads * width)
        view = buffer.as_strided(x.shape, (of_batch, step, width, 1), start)
        view.copy_(x)
        views.append(view)
        start += batch * of_batch
    return views


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
