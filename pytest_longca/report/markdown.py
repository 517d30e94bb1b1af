"""The summary as Markdown, for the page of a CI job."""

import html
from collections.abc import Iterable, Sequence

from pytest_longca.report.appendix import Appendix
from pytest_longca.report.figures import Timed, fastest, rate_text, tied
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
    return MARKS[found.cells[kernel, mask]].word


def _reasons(found: Matrix) -> str:
    rows = [
        [escape(reason.kernel), escape(reason.text), escape(", ".join(reason.masks)), code(reason.replay or "")] for reason in found.reasons
    ]
    if not rows:
        return ""
    return "## Why not\n\n" + table(["kernel", "reason", "masks", "replay"], rows)


def _fastest(records: Sequence[Record]) -> str:
    found = fastest(records)
    rows = [
        [
            *map(escape, (key.mask, key.shape, key.direction, column(ranked[0].record))),
            *_figures(ranked[0]),
            escape(_ties(ranked)),
            ranked[0].noise,
        ]
        for key, ranked in found.items()
    ]
    if not rows:
        return ""
    is_rough = any(entry.is_rough for ranked in found.values() for entry in ranked)
    title = "## Fastest verified kernel\n\n" + "Rough: other tests ran beside the timings.\n\n" * is_rough
    return title + table(["mask", "shape", "pass", "kernel", "ms", "speed", "of peak", "tied with", "noise"], rows)


def _ties(ranked: Sequence[Timed]) -> str:
    return ", ".join(column(entry.record) for entry in tied(ranked))


def _figures(entry: Timed) -> list[str]:
    share = entry.fraction_of_peak
    return [f"{entry.median_ms:.3g}", rate_text(entry.tflop_per_s, 4), f"{share:.0%}" if share is not None else ""]


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
