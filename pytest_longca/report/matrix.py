"""The matrix: one outcome for each kernel and mask, and the reasons, as values. Terminal, Markdown and HTML draw it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from pytest_longca.catalogue import KERNELS, MASKS
from pytest_longca.report.record import Record
from pytest_longca.report.series import CELL_STAGES


@dataclass(frozen=True, slots=True)
class Mark:
    """How an outcome is shown: a short word for a cell, a colour name of pytest's terminal, and what it means."""

    word: str
    colour: str
    meaning: str


FORWARD_ONLY = "forward_only"
FORWARD_ASKED = "forward_asked"
PARTIAL = "partial"
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
    FORWARD_ASKED: Mark("fwd*", "green", "passed what ran, forward only"),
    PARTIAL: Mark("ok*", "green", "passed what ran: what did not is told"),
    WOULD_RUN: Mark("run", "green", "would run"),
    "unsupported": Mark("-", "blue", "not supported"),
    "not_installed": Mark("absent", "blue", "not installed"),
}
"""Every outcome, the gravest first: a cell shows the first one that some record of it has."""


LACKS = {
    frozenset({"probes"}): "passed, but no drawn example ran",
    frozenset({"examples"}): "passed, but no exact probe ran",
}
"""What is said of a cell that passed of which only these stages ran. A timing or a replay alone judges the very case that was asked for."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows are masks, columns kernels; `cells` holds keys of MARKS: every cell one, also those of which there is no record.

    `lacks` says of cells that passed what of their judgement did not run.
    """

    masks: tuple[str, ...]
    kernels: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    lacks: dict[tuple[str, str], str]
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
    lacks = {cell: text for cell, group in groups.items() if (text := _lack(group)) and _is_green(cells[cell])}
    return Matrix(masks=masks, kernels=kernels, cells=cells, lacks=lacks, reasons=tuple(_reasons(records, cells, lacks)))


def _ordered(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names that occur: built-in ones in the catalogue's order, then others as they came."""
    found = dict.fromkeys(names)
    return (*(name for name in known if name in found), *(name for name in found if name not in set(known)))


def cell_kind(records: Sequence[Record]) -> str:
    """The outcome that stands for a cell: the gravest. What passed may be forward only, or lack a time, its probes or its examples."""
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
        return FORWARD_ASKED if _lack(records) else FORWARD_ONLY
    if len(judged) < len(records) or _lack(records):
        return PARTIAL
    return FORWARD_ASKED if forward_alone else kind


def _shows_no_backward(record: Record) -> bool:
    """Whether a record says that the kernel has none: what the suite draws has one where it can; else one is refused."""
    if record.stage not in ("timing", "case"):
        return record.kind == "passed"
    return record.kind == "unsupported" and not {"bwd", "fwd_bwd"}.isdisjoint((record.case or "").split("/"))


def _lack(records: Sequence[Record]) -> str | None:
    """What did not run of a cell's two stages where one did, or None."""
    return LACKS.get(frozenset(record.stage for record in records) & CELL_STAGES)


def _is_green(kind: str) -> bool:
    return MARKS[kind].colour == "green"


def _would_run(record: Record) -> bool:
    return record.stage == LISTED and record.kind == "not_verified"


def _lacks_a_time(record: Record) -> bool:
    return record.kind == "not_verified" and record.stage == "timing"


def _reasons(records: Iterable[Record], cells: dict[tuple[str, str], str], lacks: dict[tuple[str, str], str]) -> list[Reason]:
    """Reasons of all records that did not pass, and what cells lack, one for each kernel and text, the gravest first."""
    order = list(MARKS)
    found: dict[tuple[str, str, str], dict[str, str | None]] = {}
    for record in records:
        if record.kind != "passed" and not _would_run(record):
            key = (record.kind, column(record), _impersonal(record))
            if _lacks_a_time(record) and _is_green(cells[column(record), record.mask]):
                key = (PARTIAL, column(record), f"passed, not timed: {record.outcome['reason']}")
            found.setdefault(key, {}).setdefault(record.mask, record.replay)
    for (kernel, mask), text in lacks.items():
        found.setdefault((PARTIAL, kernel, text), {})[mask] = None
    return [
        Reason(kernel, kind, text, tuple(masks), next((replay for replay in masks.values() if replay), None))
        for (kind, kernel, text), masks in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]


def _impersonal(record: Record) -> str:
    """The reason without the mask's name, so that one reason that holds for many masks is told once."""
    text = str(record.result)
    return re.sub(rf"\b{re.escape(record.mask)} has\b", "the mask has", text)
