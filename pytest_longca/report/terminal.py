"""The closing summary of a run in the terminal: reasons, fastest kernels, and the matrix last. What it adds to names is ASCII."""

import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence

from pytest_longca.report.figures import Timed, fastest, rate_text, tied, tied_text
from pytest_longca.report.matrix import MARKS, Matrix, column, matrix
from pytest_longca.report.record import Record

Paint = Callable[[str, str], str]
"""A function (text, colour name) to text."""

COLOURS = {"red": "31", "green": "32", "yellow": "33", "blue": "34"}

NARROWEST = 24
SHOWN_MASKS = 6
SHOWN_LINES = 12


def plain(text: str, colour: str) -> str:
    """The Paint that paints nothing."""
    return text


def ansi(text: str, colour: str) -> str:
    """The Paint of terminals."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if text else ""


def render(records: Iterable[Record], width: int | None = None, color: bool = False) -> str:
    """The whole summary, wrapped to `width` columns (the terminal's if None); a longer name or command is never cut."""
    records = list(records)
    if not records:
        return "no results"
    width = max(width or shutil.get_terminal_size().columns, NARROWEST)
    paint = ansi if color else plain
    found = matrix(records)
    parts = (
        reason_lines(found, width, paint),
        fastest_lines(records, width),
        matrix_lines(found, width, paint),
        legend_lines(found, paint),
    )
    return "\n\n".join("\n".join(part) for part in parts if part)


def matrix_lines(found: Matrix, width: int, paint: Paint = plain) -> list[str]:
    """Masks as rows, kernels as columns, in as many blocks of columns as the width asks for."""
    label = max(len(name) for name in ("mask", *found.masks))
    lines: list[str] = []
    for block in _blocks(found.kernels, width - label):
        lines += [""] if lines else []
        lines.append("mask".ljust(label) + "".join(f" {name:>{_cell_width(name)}}" for name in block))
        lines += [mask.ljust(label) + "".join(_cell(found, kernel, mask, paint) for kernel in block) for mask in found.masks]
    return lines


def _cell_width(kernel: str) -> int:
    return max(len(kernel), *(len(mark.word) for mark in MARKS.values()))


def _cell(found: Matrix, kernel: str, mask: str, paint: Paint) -> str:
    """One cell, padded before it is painted, because colour codes have a length and no width."""
    mark = MARKS[found.cells[kernel, mask]]
    return " " * (1 + _cell_width(kernel) - len(mark.word)) + paint(mark.word, mark.colour)


def _blocks(kernels: Sequence[str], width: int) -> list[list[str]]:
    """The kernels in runs whose columns fit into `width`; at least one a run."""
    blocks: list[list[str]] = []
    used = 0
    for kernel in kernels:
        needed = _cell_width(kernel) + 1
        if not blocks or used + needed > width:
            blocks.append([])
            used = 0
        blocks[-1].append(kernel)
        used += needed
    return blocks


def legend_lines(found: Matrix, paint: Paint = plain) -> list[str]:
    """What the words in the cells mean, those that occur."""
    return [
        f"{paint(MARKS[kind].word, MARKS[kind].colour)}{' ' * (7 - len(MARKS[kind].word))}{MARKS[kind].meaning}" for kind in found.used()
    ]


def reason_lines(found: Matrix, width: int, paint: Paint = plain) -> list[str]:
    """Why cells are not green: each kernel and reason once, with its masks, and the command that replays it."""
    lines: list[str] = []
    for reason in found.reasons:
        text = f"{reason.kernel}: {reason.text} [{masks_text(reason.masks, found.masks)}]"
        lines += _wrapped(text, width, paint, MARKS[reason.kind].colour)
        if reason.replay:
            lines.append(f"  {reason.replay}")
    return lines


def masks_text(masks: Sequence[str], of_run: Sequence[str]) -> str:
    """The masks by name, few at most: those that are left out where they are fewer.

    >>> masks_text(["full", "causal"], ["full", "causal"])
    'all 2 masks'
    """
    others = [mask for mask in of_run if mask not in masks]
    if not others and len(masks) > 1:
        return f"all {len(masks)} masks"
    if len(masks) <= SHOWN_MASKS:
        return ", ".join(masks)
    if len(others) < SHOWN_MASKS:
        return f"all but {', '.join(others)}"
    return f"{', '.join(masks[:SHOWN_MASKS])} and {len(masks) - SHOWN_MASKS} more"


def _wrapped(text: str, width: int, paint: Paint, colour: str) -> list[str]:
    """The text wrapped line by line, a long one cut, its first word (the kernel) painted."""
    pieces = [
        piece
        for line in text.splitlines()
        for piece in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    ]
    cut = pieces[:SHOWN_LINES] + (["  ..."] if len(pieces) > SHOWN_LINES else [])
    kernel, colon, rest = cut[0].partition(":")
    return [paint(kernel, colour) + colon + rest, *cut[1:]]


def fastest_lines(records: Iterable[Record], width: int) -> list[str]:
    """The fastest verified kernel for each mask, shape and pass, with its figures; empty where nothing was timed."""
    lines: list[str] = []
    found = fastest(records)
    for key, ranked in found.items():
        text = f"{key.mask} {key.shape} {key.direction}: {column(ranked[0].record)} {_figures(ranked[0])}{_beside(ranked)}"
        lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    is_rough = any(entry.is_rough for ranked in found.values() for entry in ranked)
    title = "fastest verified kernel (rough: other tests ran beside the timings):" if is_rough else "fastest verified kernel:"
    return [title, *lines] if lines else []


def _beside(ranked: Sequence[Timed]) -> str:
    """Who is as fast as the first, as far as one can tell, and how much slower the next one is."""
    ties = tied(ranked)
    slower = next((entry for entry in ranked[1:] if entry not in ties), None)
    text = tied_text([column(entry.record) for entry in ties])
    return text + (f", {slower.median_ms / ranked[0].median_ms:.2f}x the speed of {column(slower.record)}" if slower else "")


def _figures(entry: Timed) -> str:
    share = entry.fraction_of_peak
    peak = f" ({share:.0%} of peak)" if share is not None else ""
    return f"{entry.median_ms:.3g} ms, {rate_text(entry.tflop_per_s)}{peak}" + (f", {entry.noise}" if entry.noise else "")
