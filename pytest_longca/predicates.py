"""Predicates: FlexAttention's mask_mod signature, and its evaluation into checked bool tensors."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_longca.errors import InvalidMask, LongcaError, is_out_of_memory, raised

if TYPE_CHECKING:
    from pytest_longca.mask import Mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (b, h, q_idx, kv_idx), int tensors that broadcast, to a bool tensor; True is visible."""

Device = torch.device | str


def evaluate(mask: "Mask", device: Device, rows: range | None = None, cols: range | None = None) -> Tensor:
    """The predicate on some rows and columns: bool `[batch or 1, heads or 1, rows, cols]`, all of them where None.

    Raises InvalidMask if the predicate raises, or returns anything but a bool tensor that broadcasts to that shape.
    """
    rows = range(mask.seqlen_q) if rows is None else rows
    cols = range(mask.seqlen_kv) if cols is None else cols
    axes = (range(mask.batch), range(mask.heads), rows, cols)
    shape = tuple(map(len, axes))
    b, h, q, kv = (
        torch.arange(axis.start, axis.stop, device=device).view([-1 if i == dim else 1 for i in range(4)]) for dim, axis in enumerate(axes)
    )
    visible = answer_of(mask, device, b, h, q, kv)
    check_predicate_result(mask.label, visible, shape)
    return visible.expand(shape)


def answer_of(mask: "Mask", device: Device, *indices: Tensor) -> Tensor:
    """What the predicate gives for the indices `b, h, q_idx, kv_idx`. Raises InvalidMask, with mask and place, if it raises."""
    try:
        return mask.predicate(device)(*indices)
    except Exception as error:
        if isinstance(error, LongcaError) or is_out_of_memory(error):
            raise
        what = raised(f"mask {mask.label!r}", error)
        raise InvalidMask(f"{what}: a mask_mod gets integer tensors that broadcast, of any length") from error


def check_predicate_result(name: str, visible: object, shape: tuple[int, ...]) -> None:
    """Raise InvalidMask unless `visible` is a bool tensor that broadcasts to `shape`."""
    if not isinstance(visible, Tensor):
        raise InvalidMask(f"mask {name!r} returned {type(visible).__name__}: a mask_mod returns a bool tensor")
    if visible.dtype is not torch.bool:
        raise InvalidMask(f"mask {name!r} returned {visible.dtype}: a mask_mod returns torch.bool, True where the key is visible")
    if not _broadcasts_to(visible.shape, shape):
        raise InvalidMask(
            f"mask {name!r} returned shape {tuple(visible.shape)}: it must broadcast to {shape}, one element for each (query, key)"
        )


def _broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` expands to exactly `target`."""
    tail = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(n in (1, m) for n, m in zip(shape, tail, strict=True))
