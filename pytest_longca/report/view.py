"""What the page shows, as plain JSON values: strings once in a table, records as short rows that point into it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from typing import Any

from pytest_longca.drawing import svg_of_facts
from pytest_longca.machine import CPU
from pytest_longca.report.figures import (
    SHARED,
    fraction_of_peak,
    median_ms,
    quantile_ms,
    refuted,
    seqlen,
    shape_text,
    tflop_per_s,
    timed,
    worst_error,
)
from pytest_longca.report.gallery import Picture
from pytest_longca.report.gate import basis, by_gravity, conclusion
from pytest_longca.report.matrix import MARKS, column, matrix
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import Comparison, Row, Verdict

FIELDS = (
    "kernel", "mask", "stage", "kind", "reason", "shape", "case", "direction", "heads", "blocks", "replay", "drawing",
    "seqlen", "world", "examples", "median_ms", "p20_ms", "p80_ms", "tflop_per_s", "of_peak", "peak_bytes",
    "plan_ms", "compile_ms", "launch_ms", "error", "errors", "is_trusted",
    "is_rough",
)  # fmt: skip
TEXTS = frozenset(FIELDS[: FIELDS.index("seqlen")])
DIGITS = 5


class Strings:
    """A table of strings: each once, named by its index."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        """The index of the text, which is added if it is new."""
        return self._index.setdefault(text, len(self._index))

    @property
    def all(self) -> list[str]:
        return list(self._index)


def view(records: Sequence[Record], comparison: Comparison | None = None, pictures: Iterable[Picture] = ()) -> dict[str, Any]:
    """Everything the page's script needs."""
    strings, found, bad = Strings(), matrix(records), refuted(records)
    rows = [_row(record, strings, (record.kernel, record.mask) not in bad) for record in records]
    return {
        "fields": FIELDS,
        "texts": sorted(TEXTS),
        "rows": rows,
        "timed": _timed(records),
        "strings": strings.all,
        "kernels": found.kernels,
        "masks": found.masks,
        "cells": [[*cell, kind, found.lacks.get(cell, "")] for cell, kind in found.cells.items()],
        "marks": {kind: asdict(mark) for kind, mark in MARKS.items()},
        "pictures": [asdict(picture) for picture in pictures],
        "gate": _gate(comparison),
        "scaling": _scaling(records),
    }


def _scaling(records: Sequence[Record]) -> dict[str, Any] | None:
    """The points of throughput against the number of GPUs, and how far the model is from what was measured."""
    if not any(record.stage == "parallel" for record in records):
        return None  # and nothing imports torch for it
    from pytest_longca.parallel.scaling import ALONE, errors, points

    rows = [[*astuple(point)[:-1], _short(point.tflop_per_s)] for point in points(records)]
    return {"points": rows, "alone": ALONE, "errors": errors(records)} if rows else None


def _timed(records: Sequence[Record]) -> list[list[Any]]:
    """The row of each kernel and setting that was timed and, where there are several processes, the figures over all of them."""
    index = {id(record): number for number, record in enumerate(records)}
    found: list[list[Any]] = []
    for entry in timed(records).values():
        figures = (entry.median_ms, *entry.p20_p80_ms, entry.tflop_per_s, entry.fraction_of_peak) if len(entry.records) > 1 else ()
        found.append([index[id(entry.record)], *map(_short, figures)])
    return found


def _row(record: Record, strings: Strings, is_trusted: bool) -> list[Any]:
    heads = record.shape.get("heads_q")
    values: dict[str, Any] = {
        "kernel": column(record),
        "mask": record.mask,
        "stage": record.stage,
        "kind": record.kind,
        "reason": "" if record.kind == "passed" else str(record.result),
        "shape": shape_text(record) if record.shape else "",
        "case": record.case or "",
        "direction": record.direction or "",
        "heads": f"{heads}:{record.shape['heads_kv']} d{record.shape['head_dim']} {record.shape['dtype']}" if heads else "",
        "blocks": record.shape.get("blocks", ""),
        "replay": record.replay or "",
        "drawing": svg_of_facts(record.facts) if "drawing" in record.facts else "",
        "seqlen": seqlen(record),
        "world": record.world_size,
        "examples": record.num_examples,
        "median_ms": median_ms(record) if record.kind == "passed" else None,
        "p20_ms": quantile_ms(record, 0.2) if record.kind == "passed" else None,
        "p80_ms": quantile_ms(record, 0.8) if record.kind == "passed" else None,
        "tflop_per_s": tflop_per_s(record),
        "of_peak": fraction_of_peak(record),
        "peak_bytes": record.peak_bytes,
        "plan_ms": record.plan_ms,
        "compile_ms": record.compile_ms,
        "launch_ms": None if record.device == CPU.name else record.launch_ms,  # there the host launches nothing: it computes
        "error": _number(worst_error(record)),
        "errors": [[verdict["tensor"], _number(verdict.get("error_over_limit"))] for verdict in record.verdicts],
        "is_trusted": int(is_trusted),
        "is_rough": int(bool(record.facts.get(SHARED))),
    }
    return [strings.add(values[name]) if name in TEXTS else _short(values[name]) for name in FIELDS]


def _short(value: Any) -> Any:
    """A float with as many digits as a report needs; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _number(value: Any) -> Any:
    """A finite number, or a string for what JSON has no number for."""
    if value is None:
        return None
    number = float(value)
    return _short(number) if math.isfinite(number) else "infinite"


def _gate(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "conclusion": conclusion(comparison),
        "basis": basis(comparison),
        "exit_code": comparison.exit_code,
        "rows": [[finding.verdict.value, "the whole run", finding.reason, None, None, None] for finding in comparison.run]
        + [_gate_row(row) for row in by_gravity(comparison)],
    }


def _gate_row(row: Row) -> list[Any]:
    """Verdict, case, reason, and the changes of time, memory and error."""
    changes = {finding.quantity: _number(finding.change) for finding in row.findings}
    reason = "" if row.verdict is Verdict.OK else f"{row.findings[0].quantity}: {row.findings[0].reason}"
    return [row.verdict.value, str(row.key), reason, *(changes.get(quantity) for quantity in ("time", "memory", "error"))]
