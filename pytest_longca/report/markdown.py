"""The summary as Markdown, for the page of a CI job."""

import html
from collections.abc import Iterable, Sequence

from pytest_longca.report.appendix import Appendix
from pytest_longca.report.figures import fastest, fraction_of_peak, median_ms, tflop_per_s
from pytest_longca.report.gate import basis, by_gravity, conclusion
from pytest_longca.report.matrix import MARKS, Matrix, column, matrix
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import Comparison, Verdict


def markdown(records: Iterable[Record], comparison: Comparison | None = None, appendix: Appendix | None = None) -> str:
    """The whole summary: gate, matrix, reasons, fastest kernels, and what the preset adds."""
    records = list(records)
    found = matrix(records)
    parts = [
        "# Attention kernels",
        _gate(comparison) if comparison else "",
        _matrix(found),
        _reasons(found),
        _fastest(records),
        "\n".join([f"## {escape(appendix.title)}", "", "```", *appendix.lines, "```"]) if appendix else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """Text as data of a table cell: no HTML, no cell border, no line break, no emphasis."""
    escaped = html.escape(text, quote=False).replace("\\", "\\\\")
    for character in "|`*_[]":
        escaped = escaped.replace(character, f"\\{character}")
    return " ".join(escaped.split())


def code(text: str) -> str:
    """Text as code in a table cell, to be copied; nothing if it is empty."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`" if text else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [[escape(cell) for cell in header], ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _matrix(found: Matrix) -> str:
    rows = [[escape(mask), *(escape(_word(found, kernel, mask)) for kernel in found.kernels)] for mask in found.masks]
    legend = ", ".join(f"**{escape(MARKS[kind].word)}** {MARKS[kind].meaning}" for kind in found.used())
    return table(["mask", *found.kernels], rows) + "\n\n" + legend


def _word(found: Matrix, kernel: str, mask: str) -> str:
    return MARKS[found.cells[kernel, mask]].word if (kernel, mask) in found.cells else ""


def _reasons(found: Matrix) -> str:
    rows = [
        [escape(reason.kernel), escape(reason.text), escape(", ".join(reason.masks)), code(reason.replay or "")] for reason in found.reasons
    ]
    if not rows:
        return ""
    return "## Why not\n\n" + table(["kernel", "reason", "masks", "replay"], rows)


def _fastest(records: Sequence[Record]) -> str:
    rows = [
        [*map(escape, (key.mask, key.shape, key.direction, column(ranked[0]))), *_figures(ranked[0])]
        for key, ranked in fastest(records).items()
    ]
    if not rows:
        return ""
    return "## Fastest verified kernel\n\n" + table(["mask", "shape", "pass", "kernel", "ms", "TFLOP/s", "of peak"], rows)


def _figures(record: Record) -> list[str]:
    share = fraction_of_peak(record)
    return [f"{median_ms(record):.3g}", f"{tflop_per_s(record):.4g}", f"{share:.0%}" if share is not None else ""]


def _gate(comparison: Comparison) -> str:
    rows = [
        [finding.verdict.value, finding.quantity, code(str(row.key)), escape(finding.reason)]
        for row in by_gravity(comparison)
        for finding in row.findings
        if finding.verdict is not Verdict.OK
    ]
    run = [[finding.verdict.value, finding.quantity, "the whole run", escape(finding.reason)] for finding in comparison.run]
    findings = table(["verdict", "quantity", "case", "why"], [*run, *rows]) if run or rows else ""
    return f"## Gate: {escape(conclusion(comparison))}\n\n{escape(basis(comparison))}\n\n{findings}".rstrip()
