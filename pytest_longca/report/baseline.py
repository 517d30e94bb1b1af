"""The gate at the end of a run: compare with a baseline file, or, where there is none yet, make it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_longca.errors import InvalidArgument
from pytest_longca.report.compare import NOISE_PER_LIMIT, SKIPPED, Times, compare, only_the_anchor, spread
from pytest_longca.report.gate import render_comparison
from pytest_longca.report.record import Record
from pytest_longca.report.series import Key, by_key, device_and_driver, key_of
from pytest_longca.report.store import read_records, write_records
from pytest_longca.report.verdict import Comparison, Limits, Verdict, counted, percent


@dataclass(frozen=True, slots=True)
class Gate:
    """What the gate found: the text to print, the exit status (0, 1, 2), and the comparison unless this was the first run."""

    text: str
    exit_code: int
    comparison: Comparison | None = None


def gate(
    path: str | Path,
    records: Sequence[Record],
    limits: Limits | None = None,
    anchor: str | None = None,
    allow: frozenset[Verdict] = frozenset(),
    forbid: frozenset[Verdict] = frozenset(),
    own: Sequence[Record] | None = None,
) -> Gate:
    """Compare a run's records with the baseline at `path`. Where no such file exists, write it and say so.

    `own` are the records that the run made itself, where it resumed others or its budget postponed some. Raises InvalidArgument
    where the file is no baseline, the two are no pair, or none of the run's own is about a case of the baseline; an existing file is
    never written.
    """
    limits = limits or Limits()
    if Path(path).exists():
        baseline = read_baseline(path, limits, anchor)
        if own is not None and not _judged(own) & _judged(baseline):
            raise InvalidArgument(
                "this run itself judged none of the baseline's cases, so nothing was compared: "
                "python -m pytest_longca compare does that with a file of records"
            )
        comparison = compare(baseline, records, limits, anchor, allow, forbid)
        return Gate(render_comparison(comparison), comparison.exit_code, comparison)
    _check(records, "the new baseline", limits, anchor)
    write_records(path, records)
    what = f"its {counted(len(records), 'record')} {'is' if len(records) == 1 else 'are'} it now"
    return Gate(f"first run: no baseline at {path} yet, so {what}{_of_times(records, limits, anchor)}", 0)


def read_baseline(path: str | Path, limits: Limits, anchor: str | None) -> list[Record]:
    """The records of a baseline. Raises InvalidArgument where the file is none, or could gate no run whatever that finds."""
    records = read_records(path)
    _check(records, "the baseline", limits, anchor)
    return records


def _check(records: Sequence[Record], where: str, limits: Limits, anchor: str | None) -> None:
    device_and_driver(records, where)
    if alone := only_the_anchor(by_key(records), limits, anchor):
        raise InvalidArgument(alone)


def _judged(records: Sequence[Record]) -> set[Key]:
    return {key_of(record) for record in records if record.kind not in SKIPPED}


def _of_times(records: Sequence[Record], limits: Limits, anchor: str | None) -> str:
    """How the new baseline gates times, and what keeps it from that."""
    beside = f"; times are gated as ratios to {anchor} in the same run" if anchor else ""
    return beside + (_too_few(records, limits) or _too_noisy(records, limits, anchor))


def _too_few(records: Sequence[Record], limits: Limits) -> str:
    timed = [series for series in by_key(records).values() if series.is_timed]
    weak = [series for series in timed if len(series.medians_ms(limits.samples)) < limits.processes]
    if not weak:
        return ""
    needs = f"{limits.processes} processes of at least {limits.samples} samples"
    return f"; but {len(weak)} of {len(timed)} timed cases have fewer than {needs}, so their times cannot be gated"


def _too_noisy(records: Sequence[Record], limits: Limits, anchor: str | None) -> str:
    if limits.slower is None:
        return ""
    found, times = by_key(records), Times(limits, anchor)
    spreads = [spread([times.values(key, found)]) for key, series in found.items() if series.is_timed and key.kernel != anchor]
    noisy = [noise for noise in spreads if NOISE_PER_LIMIT * noise > limits.slower]
    if not noisy:
        return ""
    differ = f"their processes differ by up to {max(noisy):.1%}, and {NOISE_PER_LIMIT} times that is the least limit that can be held"
    return f"; but at {percent(limits.slower)} this baseline cannot gate {len(noisy)} of {len(spreads)} cases: {differ}"
