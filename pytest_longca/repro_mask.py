"""A mask spelled out for a standalone file: as a picture while it is small, else as runs of visible keys."""

import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_longca.errors import InvalidArgument
from pytest_longca.mask import Mask
from pytest_longca.predicates import evaluate

PICTURE_CELLS = 4096
"""The largest mask, over all its heads and batch elements, that is drawn cell by cell."""
MAX_RUNS = 50_000
"""The most lines that a mask may take."""
CHUNK_CELLS = 2**22
"""Cells of a mask without row intervals that are looked at at once."""

Run = tuple[int, int]
Rows = tuple[int, int, int, int, int, int]
"""Queries from, to; keys from, to of the first of these queries; and how much these two grow with each query."""

DRAWN = """
# The mask, query by query for each batch element and head (1 of either stands for all): # is a visible key.
MASK = [
{lines}
]
VISIBLE = torch.tensor([[[[key == "#" for key in row] for row in head] for head in element] for element in MASK], dtype=torch.bool)
VISIBLE = VISIBLE.view({batch}, {heads}, SEQLEN_Q, SEQLEN_KV).to(DEVICE)
"""

RUNS = '''
# The mask: visible keys for each batch element and head (1 of either stands for all), as
# (queries from, to, keys from, to, how much these two grow with each query).
MASK = [
{lines}
]


def visible(runs):
    """bool [seqlen_q, seqlen_kv]"""
    mask, key = torch.zeros(SEQLEN_Q, SEQLEN_KV, dtype=torch.bool, device=DEVICE), torch.arange(SEQLEN_KV, device=DEVICE)
    for first, last, start, stop, start_step, stop_step in runs:
        row = torch.arange(last - first, device=DEVICE)[:, None]
        mask[first:last] |= (key >= start + start_step * row) & (key < stop + stop_step * row)
    return mask


VISIBLE = torch.stack([torch.stack([visible(runs) for runs in heads]) for heads in MASK])
'''


def mask_text(mask: Mask) -> str:
    """Python text that makes VISIBLE, bool `[batch or 1, heads or 1, seqlen_q, seqlen_kv]`. Raises InvalidArgument if it gets too long."""
    axes = {"batch": mask.batch, "heads": mask.heads}
    if mask.batch * mask.heads * mask.seqlen_q * mask.seqlen_kv <= PICTURE_CELLS:
        return DRAWN.format(lines=_nested(mask, _drawn(mask)), **axes)
    lines: list[list[list[str]]] = [[[] for _ in range(mask.heads)] for _ in range(mask.batch)]
    total = 0
    for batch, head, rows in _row_runs(mask):
        found = linear(rows)
        total += len(found)
        if total > MAX_RUNS:
            raise InvalidArgument(f"no standalone file: mask {mask.label} has more than {MAX_RUNS} runs of visible keys; shrink the case")
        lines[batch][head] = [str(run) for run in found]
    return RUNS.format(lines=_nested(mask, lines))


def _drawn(mask: Mask) -> list[list[list[str]]]:
    return [[[f'"{_row(row)}"' for row in head] for head in element] for element in mask.dense().tolist()]


def _row(row: list[bool]) -> str:
    return "".join("#" if visible else "." for visible in row)


def _nested(mask: Mask, lines: list[list[list[str]]]) -> str:
    """A list for each batch element of a list for each head, one line each."""
    text = ""
    for element in lines:
        heads = "".join("    [\n" + "".join(f"        {line},\n" for line in head) + "    ],\n" for head in element)
        text += f"[\n{heads}],\n"
    return textwrap.indent(text, "    ").rstrip("\n")


def _row_runs(mask: Mask) -> Iterator[tuple[int, int, list[list[Run]]]]:
    """(batch, head, the runs of visible keys of each query)."""
    intervals = mask.row_intervals()
    for batch in range(mask.batch):
        for head in range(mask.heads):
            yield batch, head, _of_predicate(mask, batch, head) if intervals is None else _of_intervals(intervals, batch, head)


def _of_intervals(intervals: Tensor, batch: int, head: int) -> list[list[Run]]:
    rows = intervals[batch % intervals.shape[0], head % intervals.shape[1]].tolist()
    return [[(start, stop) for start, stop in row if stop > start] for row in rows]


def _of_predicate(mask: Mask, batch: int, head: int) -> list[list[Run]]:
    """The runs of a mask that has more than two in some row, by looking at every cell."""
    step = max(1, CHUNK_CELLS // max(1, mask.batch * mask.heads * mask.seqlen_kv))
    rows: list[list[Run]] = []
    for first in range(0, mask.seqlen_q, step):
        seen = evaluate(mask, "cpu", range(first, min(first + step, mask.seqlen_q)))[batch, head]
        edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff(dim=1)
        rows += [list(zip(*((edge.nonzero()[:, 0]).tolist() for edge in (row == 1, row == -1)), strict=True)) for row in edges]
    return rows


def linear(rows: list[list[Run]]) -> list[Rows]:
    """The runs of all queries, those of consecutive queries as one where they move evenly.

    >>> linear([[(0, 1)], [(0, 2)], [(0, 3), (4, 5)]])
    [(0, 3, 0, 1, 0, 1), (2, 3, 4, 5, 0, 0)]
    """
    open_runs: dict[int, Rows] = {}
    found: list[Rows] = []
    for query, runs in enumerate(rows):
        for slot in [slot for slot in open_runs if slot >= len(runs)]:
            found.append(open_runs.pop(slot))
        for slot, run in enumerate(runs):
            longer = _longer(open_runs[slot], run) if slot in open_runs else None
            if longer is None and slot in open_runs:
                found.append(open_runs[slot])
            open_runs[slot] = longer or (query, query + 1, *run, 0, 0)
    return sorted([*found, *open_runs.values()])


def _longer(rows: Rows, run: Run) -> Rows | None:
    """The rows with one query more, if its run follows from theirs."""
    first, last, start, stop, start_step, stop_step = rows
    count = last - first
    if count == 1:
        return first, last + 1, start, stop, run[0] - start, run[1] - stop
    follows = run == (start + count * start_step, stop + count * stop_step)
    return (first, last + 1, start, stop, start_step, stop_step) if follows else None
