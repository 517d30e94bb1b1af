"""Figures of a record: the median, the throughput, the worst error. What every report computes from one record is computed here."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pytest_longca.report.record import Record

SHARED = "shared_machine"
"""The fact of a record whose samples were taken while other tests ran beside them: they are rough."""

NOISY = 0.25
"""A timing whose p20 and p80 are further apart than this part of its median is marked as noisy."""

REFUTED = frozenset({"wrong", "known_wrong", "crashed", "timed_out"})
"""Outcomes that show a kernel to be wrong, whether that is known or not."""


def median_ms(record: Record) -> float | None:
    """The median device time of one call, or None where nothing was timed."""
    return statistics.median(record.samples_ms) if record.samples_ms else None


def quantile_ms(record: Record, fraction: float) -> float | None:
    """The sample below which `fraction` of the samples lie (the nearest one)."""
    return _quantile(sorted(record.samples_ms), fraction) if record.samples_ms else None


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    return ordered[round(fraction * (len(ordered) - 1))]


def tflop_per_s(record: Record) -> float | None:
    """Throughput at the median time, or None where time or work is unknown or the kernel was not verified there."""
    time_ms = median_ms(record)
    if not time_ms or not record.flop or record.kind != "passed":
        return None
    return record.flop / time_ms / 1e9


def fraction_of_peak(record: Record) -> float | None:
    """Throughput as a fraction of the matrix peak that was measured on the same device."""
    rate, peak = tflop_per_s(record), record.peaks.get("matmul_tflop_per_s")
    return rate / peak if rate is not None and peak else None


def worst_error(record: Record) -> float | None:
    """The largest error over all judged tensors, as a fraction of its limit (infinities come as strings)."""
    errors = [float(verdict["error_over_limit"]) for verdict in record.verdicts if verdict.get("error_over_limit") is not None]
    return max(errors) if errors else None


def seqlen(record: Record) -> int | None:
    """The number of queries, or None for a record without one case."""
    return record.shape.get("seqlen_q")


def refuted(records: Iterable[Record]) -> frozenset[tuple[str, str]]:
    """The (kernel, mask) pairs that some record shows to be wrong: no speed of theirs is worth printing."""
    return frozenset((record.kernel, record.mask) for record in records if record.kind in REFUTED)


def timings(records: Iterable[Record]) -> list[Record]:
    """The records whose speed may be printed: timed, verified on that very case, and the kernel not wrong elsewhere on the mask."""
    records = list(records)
    bad = refuted(records)
    return [record for record in records if tflop_per_s(record) is not None and (record.kernel, record.mask) not in bad]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is timed, whoever runs it: rows of the "fastest" tables are compared within one setting."""

    mask: str
    shape: str
    direction: str
    case: str
    world_size: int = 1


def setting(record: Record) -> Setting:
    """The setting of a timed record."""
    return Setting(record.mask, shape_text(record), record.direction or "", record.case or "", record.world_size)


def shape_text(record: Record) -> str:
    """The sizes of a record's case for people: `8192 64:8 d128 bf16`."""
    shape = record.shape
    if not shape:
        return record.case or ""
    lengths = str(shape["seqlen_q"]) if shape["seqlen_q"] == shape["seqlen_kv"] else f"{shape['seqlen_q']}x{shape['seqlen_kv']}"
    batch = f"{shape['batch']}x" if shape["batch"] != 1 else ""
    blocks = f" blocks {shape['blocks']}" if "blocks" in shape else ""
    return f"{batch}{lengths} {shape['heads_q']}:{shape['heads_kv']} d{shape['head_dim']} {shape['dtype']}{blocks}"


@dataclass(frozen=True, slots=True)
class Timed:
    """One kernel's timings of one setting, a record for each process: every report shows these figures of them."""

    records: tuple[Record, ...]

    @property
    def record(self) -> Record:
        """The record that says which kernel, mask and shape it is."""
        return self.records[0]

    @property
    def median_ms(self) -> float:
        """The median of the processes' medians."""
        return statistics.median(median_ms(record) or 0.0 for record in self.records)

    @property
    def p20_p80_ms(self) -> tuple[float, float]:
        """The interval that holds the middle 60 % of the samples of all processes."""
        ordered = sorted(sample for record in self.records for sample in record.samples_ms or ())
        return _quantile(ordered, 0.2), _quantile(ordered, 0.8)

    @property
    def tflop_per_s(self) -> float:
        return (self.record.flop or 0) / self.median_ms / 1e9

    @property
    def fraction_of_peak(self) -> float | None:
        peak = self.record.peaks.get("matmul_tflop_per_s")
        return self.tflop_per_s / peak if peak else None

    @property
    def noise(self) -> str:
        """What to say of samples that lie far apart; empty where they do not."""
        low, high = self.p20_p80_ms
        return f"noisy (p20 to p80: {low:.3g} to {high:.3g} ms)" if high - low > NOISY * self.median_ms else ""

    @property
    def is_rough(self) -> bool:
        """Whether other tests ran beside some of the timings."""
        return any(record.facts.get(SHARED) for record in self.records)


def timed(records: Iterable[Record]) -> dict[tuple[Setting, str, str], Timed]:
    """The speeds that may be printed, one for each setting, kernel and mechanism."""
    groups: dict[tuple[Setting, str, str], list[Record]] = {}
    for record in timings(records):
        groups.setdefault((setting(record), record.kernel, record.mechanism or ""), []).append(record)
    return {key: Timed(tuple(group)) for key, group in groups.items()}


def fastest(records: Iterable[Record]) -> dict[Setting, list[Timed]]:
    """For each setting the timings of each kernel, the fastest first."""
    ranked: dict[Setting, list[Timed]] = {}
    for (key, _, _), entry in timed(records).items():
        ranked.setdefault(key, []).append(entry)
    return {key: sorted(ranked[key], key=lambda entry: entry.median_ms) for key in sorted(ranked)}


class Spread(Protocol):
    """What has an interval of times."""

    @property
    def p20_p80_ms(self) -> tuple[float, float]: ...


AnySpread = TypeVar("AnySpread", bound=Spread)


def tied(ranked: Sequence[AnySpread]) -> list[AnySpread]:
    """Those that cannot be told from the first: their p20 to p80 intervals overlap."""
    low, high = ranked[0].p20_p80_ms
    return [entry for entry in ranked[1:] if entry.p20_p80_ms[0] <= high and low <= entry.p20_p80_ms[1]]


def tied_text(names: Sequence[str]) -> str:
    """Who is tied with the first, after its name; nothing where none is.

    >>> tied_text(["sdpa", "fa2"])
    ', tied with sdpa and fa2'
    """
    return f", tied with {' and '.join(names)}" if names else ""


def rate_text(tflop_per_s: float, digits: int = 3) -> str:
    """A throughput for people, in GFLOP/s where it is below 1 TFLOP/s.

    >>> rate_text(512.3), rate_text(0.0123)
    ('512 TFLOP/s', '12.3 GFLOP/s')
    """
    return f"{tflop_per_s:.{digits}g} TFLOP/s" if tflop_per_s >= 1 else f"{1000 * tflop_per_s:.{digits}g} GFLOP/s"
