"""Pictures of masks for the report: the predicate at a grid of points, whatever the length."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_longca.errors import LongcaError
from pytest_longca.report.record import Record

if TYPE_CHECKING:
    from pytest_longca.mask import Mask

GRID = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """A mask as rows of "1" (visible) and "0": row is a query, column a key. `density` is the visible share, exact where known."""

    mask: str
    source: str
    rows: tuple[str, ...]
    density: float | None = None


def gallery(records: Iterable[Record], masks: "Mapping[str, type[Mask]] | None" = None) -> list[Picture]:
    """One picture for each mask that a record has a case of: of its longest case, which shows the mask as it is used.

    Records of masks that are not known here (a third party's) have no picture.
    """
    longest: dict[str, Record] = {}
    for record in records:
        if record.case and _length(record) >= _length(longest.get(record.mask)):
            longest[record.mask] = record
    pictures = (_picture(record, masks) for record in longest.values())
    return [picture for picture in pictures if picture]


def _length(record: Record | None) -> int:
    return int(record.shape.get("seqlen_q") or 0) if record else 0


def _picture(record: Record, masks: "Mapping[str, type[Mask]] | None") -> Picture | None:
    from pytest_longca.ids import format_mask, parse_case

    try:
        mask = parse_case(record.case or "", masks).mask
        rows = draw(mask)
    except LongcaError:
        return None
    area = record.area / (record.shape["batch"] * record.shape["heads_q"]) if record.area and record.shape else None
    cells = mask.seqlen_q * mask.seqlen_kv
    return Picture(record.mask, format_mask(mask), rows, area / cells if area and cells else None)


def draw(mask: "Mask", grid: int = GRID) -> tuple[str, ...]:
    """The first head and batch of the mask at `grid` evenly spaced queries and keys (fewer where it is shorter)."""
    import torch

    from pytest_longca.predicates import answer_of

    zero = torch.zeros((), dtype=torch.int64)
    queries, keys = (_points(length, grid) for length in (mask.seqlen_q, mask.seqlen_kv))
    q_idx, kv_idx = torch.tensor(queries, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64)
    visible = answer_of(mask, "cpu", zero, zero, q_idx[:, None], kv_idx[None, :]).expand(len(queries), len(keys))
    return tuple("".join("01"[bit] for bit in row) for row in visible.tolist())


def _points(length: int, grid: int) -> list[int]:
    """Positions at the middle of equal parts."""
    count = min(length, grid)
    return [(2 * part + 1) * length // (2 * count) for part in range(count)]
