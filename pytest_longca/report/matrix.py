"""The matrix: one outcome for each kernel and mask, and the reasons, as values. Terminal, Markdown and HTML draw it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from pytest_longca.catalogue import KERNELS, MASKS
from pytest_longca.report.record import Record


@dataclass(frozen=True, slots=True)
class Mark:
    """How an outcome is shown: a short word for a cell, a colour name of pytest's terminal, and what it means."""

    word: str
    colour: str
    meaning: str


FORWARD_ONLY = "forward_only"
FORWARD_ASKED = "forward_asked"
UNTIMED = "untimed"
WOULD_RUN = "would_run"
LISTED = "list"
"""The stage of records of --longca-list, which runs nothing."""

MARKS: dict[str, Mark] = {
    "wrong": Mark("WRONG", "red", "disagrees with the reference"),
    "crashed": Mark("CRASH", "red", "its process died or it raised an error"),
    "timed_out": Mark("HANG", "red", "did not come back in time"),
    "out_of_memory": Mark("OOM", "yellow", "out of memory"),
    "known_wrong": Mark("known", "yellow", "wrong, as the known failures say"),
    "not_verified": Mark("?", "yellow", "nothing was judged"),
    "passed": Mark("ok", "green", "outputs and gradients passed"),
    FORWARD_ONLY: Mark("fwd", "green", "passed, forward only"),
    FORWARD_ASKED: Mark("fwd*", "green", "passed, forward only, as selected"),
    UNTIMED: Mark("ok*", "green", "passed, not timed: the reason is told"),
    WOULD_RUN: Mark("run", "green", "would run"),
    "unsupported": Mark("-", "blue", "not supported"),
    "not_installed": Mark("absent", "blue", "not installed"),
}
"""Every outcome, the gravest first: a cell shows the first one that some record of it has."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows are masks, columns kernels; `cells` holds keys of MARKS: every cell one, also those of which there is no record."""

    masks: tuple[str, ...]
    kernels: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    reasons: tuple["Reason", ...]

    def used(self) -> list[str]:
        """The outcomes that occur, in the order of MARKS."""
        return [kind for kind in MARKS if kind in self.cells.values()]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why cells of one kernel are not green: the text, and the masks that it is true of."""

    kernel: str
    kind: str
    text: str
    masks: tuple[str, ...]
    replay: str | None = None


def column(record: Record) -> str:
    """The column that a record belongs to: its kernel, under its mechanism and world if it ran in parallel."""
    return f"{record.mechanism}x{record.world_size}:{record.kernel}" if record.mechanism else record.kernel


def matrix(records: Iterable[Record]) -> Matrix:
    """The matrix of a file's or a session's records."""
    records = list(records)
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((column(record), record.mask), []).append(record)
    masks, kernels = _ordered((record.mask for record in records), MASKS), _ordered((column(record) for record in records), KERNELS)
    cells = {cell: cell_kind(groups[cell]) if cell in groups else "not_verified" for cell in product(kernels, masks)}
    return Matrix(masks=masks, kernels=kernels, cells=cells, reasons=tuple(_reasons(records, cells)))


def _ordered(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names that occur: built-in ones in the catalogue's order, then others as they came."""
    found = dict.fromkeys(names)
    return (*(name for name in known if name in found), *(name for name in found if name not in set(known)))


def cell_kind(records: Sequence[Record]) -> str:
    """The outcome that stands for a cell: the gravest. What passed may be forward only, or lack nothing but a time."""
    if any(_would_run(record) for record in records):
        return WOULD_RUN
    passed = [record for record in records if record.kind == "passed"]
    judged = [record for record in records if not _lacks_a_time(record)] if passed else records
    kinds = {record.kind for record in judged}
    kind = next(kind for kind in MARKS if kind in kinds)
    if kind != "passed":
        return kind
    forward_alone = {record.direction for record in passed} == {"fwd"}
    if forward_alone and any(_shows_no_backward(record) for record in records):
        return FORWARD_ONLY
    if len(judged) < len(records):
        return UNTIMED
    return FORWARD_ASKED if forward_alone else kind


def _shows_no_backward(record: Record) -> bool:
    """Whether a record says that the kernel has none: what the suite draws has one where it can; else one is refused."""
    if record.stage not in ("timing", "case"):
        return record.kind == "passed"
    return record.kind == "unsupported" and not {"bwd", "fwd_bwd"}.isdisjoint((record.case or "").split("/"))


def _would_run(record: Record) -> bool:
    return record.stage == LISTED and record.kind == "not_verified"


def _lacks_a_time(record: Record) -> bool:
    return record.kind == "not_verified" and record.stage == "timing"


def _reasons(records: Iterable[Record], cells: dict[tuple[str, str], str]) -> list[Reason]:
    """Reasons of all records that did not pass, one for each kernel and text, the gravest first."""
    order = list(MARKS)
    found: dict[tuple[str, str, str], dict[str, str | None]] = {}
    for record in records:
        if record.kind != "passed" and not _would_run(record):
            key = (record.kind, column(record), _impersonal(record))
            if _lacks_a_time(record) and MARKS[cells[column(record), record.mask]].colour == "green":
                key = (UNTIMED, column(record), f"passed, not timed: {record.outcome['reason']}")
            found.setdefault(key, {}).setdefault(record.mask, record.replay)
    return [
        Reason(kernel, kind, text, tuple(masks), next((replay for replay in masks.values() if replay), None))
        for (kind, kernel, text), masks in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]


def _impersonal(record: Record) -> str:
    """The reason without the mask's name, so that one reason that holds for many masks is told once."""
    text = str(record.result)
    return re.sub(rf"\b{re.escape(record.mask)} has\b", "the mask has", text)
