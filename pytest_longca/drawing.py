"""A picture of a mask as data, as plain ASCII and as SVG. Imports no torch: reports draw it from records."""

import html
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VISIBLE, WRONG = "#0072b2", "#d55e00"
"""Two colours that the colour-blind tell apart, on light and on dark."""
LEGEND = {"#": "all visible", "+": "some", ".": "none", "X": "wrong there", "<": "wrong row", "^": "wrong key"}
"""What each character of a picture means."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One batch and head of a mask in tiles of queries (down) and keys, `#` all visible, `+` some, `.` none; and where it is wrong."""

    title: str
    cells: tuple[str, ...]
    wrong_rows: tuple[int, ...] = ()
    wrong_keys: tuple[int, ...] = ()
    wrong_cells: tuple[tuple[int, int], ...] = ()
    """Which (row, key) tiles are wrong, where that is known; else it is wherever a wrong row meets a wrong key."""


def as_text(drawing: Drawing) -> str:
    """A character for each tile: `X` where it is wrong, `<` at the right of a wrong row, `^` below a wrong key."""
    cells = [list(row) for row in drawing.cells]
    for row, key in drawing.wrong_cells or itertools.product(drawing.wrong_rows, drawing.wrong_keys):
        cells[row][key] = "X"
    lines = ["".join(row) + (" <" if number in drawing.wrong_rows else "") for number, row in enumerate(cells)]
    if drawing.wrong_keys:
        lines.append("".join("^" if column in drawing.wrong_keys else " " for column in range(drawing.wrong_keys[-1] + 1)))
    drawn = set("".join(lines))
    legend = ", ".join(f"{character} {meaning}" for character, meaning in LEGEND.items() if character in drawn)
    return "\n".join([f"{drawing.title}: {legend}" if legend else drawing.title, *lines])


def svg(drawing: Drawing) -> str:
    """The same as an SVG image, a unit square for each tile; wrong rows and keys are bands where no wrong tiles are known."""
    height, width = len(drawing.cells), max(map(len, drawing.cells), default=0)
    visible = "".join(_squares(drawing.cells, kind, opacity) for kind, opacity in (("#", 0.75), ("+", 0.4)))
    bands = [f"M0 {row}h{width}v1h-{width}z" for row in drawing.wrong_rows] + [f"M{key} 0h1v{height}h-1z" for key in drawing.wrong_keys]
    squares = "".join(f"M{key} {row}h1v1h-1z" for row, key in drawing.wrong_cells)
    shapes = [(squares, 0.9)] if squares else [(band, 0.45) for band in bands]
    wrong = "".join(f'<path d="{shape}" fill="{WRONG}" fill-opacity="{opacity}"/>' for shape, opacity in shapes)
    label = html.escape(drawing.title)
    size = f'viewBox="0 0 {max(width, 1)} {max(height, 1)}" shape-rendering="crispEdges"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}"><title>{label}</title>{visible}{wrong}</svg>'


def svg_of_facts(facts: Mapping[str, Any]) -> str:
    """The image of a record's facts; empty where they hold no drawing, or none that can be drawn: records may come from anywhere."""
    try:
        fields = facts["drawing"]
        rows, keys = (tuple(int(index) for index in fields[name]) for name in ("wrong_rows", "wrong_keys"))
        wrong_cells = tuple((int(row), int(key)) for row, key in fields.get("wrong_cells", ()))  # older records have none
        return svg(Drawing(str(fields["title"]), tuple(map(str, fields["cells"])), rows, keys, wrong_cells))
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def _squares(cells: Sequence[str], kind: str, opacity: float) -> str:
    """All tiles of a kind as one path, those beside each other as one rectangle."""
    runs = [(match.start(), number, len(match[0])) for number, row in enumerate(cells) for match in re.finditer(f"{re.escape(kind)}+", row)]
    path = "".join(f"M{start} {number}h{length}v1h-{length}z" for start, number, length in runs)
    return f'<path d="{path}" fill="{VISIBLE}" fill-opacity="{opacity}"/>' if path else ""
