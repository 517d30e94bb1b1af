"""A segment as a mask: what makes of row intervals everything that a mask has, block lists and a case among them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pytest_longca.mask import Device, Form, Mask, MaskMod
from pytest_longca.parallel.segment import Segment


@dataclass(frozen=True, eq=False)
class SegmentMask(Mask):
    """A segment's row intervals as a mask."""

    segment: Segment
    name: ClassVar[str] = "segment"
    forms: ClassVar[frozenset[Form]] = frozenset({Form.PREDICATE, Form.ROW_INTERVALS})
    unequal_lengths: ClassVar[bool] = True

    @property
    def seqlen_q(self) -> int:
        return self.segment.num_rows

    @property
    def seqlen_kv(self) -> int:
        return self.segment.num_keys

    def predicate(self, device: Device = "cpu") -> MaskMod:
        intervals = self.segment.intervals.to(device)
        first_start, first_stop, second_start, second_stop = (x.contiguous() for x in intervals.flatten(1).unbind(1))

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            first = (first_start[q_idx] <= kv_idx) & (kv_idx < first_stop[q_idx])
            return first | (second_start[q_idx] <= kv_idx) & (kv_idx < second_stop[q_idx])

        return visible

    def row_intervals(self, device: Device = "cpu") -> Tensor:
        return self.segment.intervals[None, None].to(device)
