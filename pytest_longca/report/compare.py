"""The gate: did a kernel become slower, hungrier, less accurate or wrong since the baseline? It fails closed.

To catch a slowdown of d, the cut lies at d/2, and two independent looks (disjoint sets of processes) must both lie above it.
The noise is known, because a baseline holds several processes for each case; where their spread exceeds d/8, so that the cut is
fewer than four spreads away, only a change of eight spreads counts and everything else is "too noisy to gate".
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from pytest_longca.errors import InvalidArgument
from pytest_longca.report.figures import REFUTED
from pytest_longca.report.record import Record
from pytest_longca.report.series import Key, Series, by_key, device_and_driver
from pytest_longca.report.verdict import ALLOWED, Comparison, Finding, Limits, Row, Verdict, percent

NOISE_PER_LIMIT = 8
"""How many spreads between processes the limit must be: the cut lies at half of it, and must be four spreads away."""

SKIPPED = frozenset({"unsupported", "not_installed", "not_verified"})


def compare(
    baseline: Sequence[Record],
    new: Sequence[Record],
    limits: Limits | None = None,
    anchor: str | None = None,
    allow: frozenset[Verdict] = frozenset(),
    forbid: frozenset[Verdict] = frozenset(),
) -> Comparison:
    """Compare two files of records. With an `anchor` kernel, times are ratios to its time on the same case in the same run.

    Raises InvalidArgument where the two cannot be compared at all: several devices in one file, no case in common, or nothing but
    the anchor timed.
    """
    limits = limits or Limits()
    run = _same_machine(baseline, new)
    old_series, new_series = by_key(baseline), by_key(new)
    if not old_series.keys() & new_series.keys():
        raise InvalidArgument("the baseline and the new records have no case in common: same kernels, masks, shapes and seed are needed")
    if alone := only_the_anchor(old_series, limits, anchor):
        raise InvalidArgument(alone)
    times = Times(limits, anchor)
    rows = [Row(key, _judge(key, old_series, new_series, limits, times)) for key in sorted(old_series.keys() | new_series.keys())]
    return Comparison(tuple(rows), run, (ALLOWED | allow) - forbid, granted=allow - forbid, limits=limits, anchor=anchor)


def only_the_anchor(baseline: "SeriesByKey", limits: Limits, anchor: str | None) -> str:
    """What to say where times are gated and nothing but the anchor was timed, which is judged against itself; else nothing."""
    timed = {key.kernel for key, series in baseline.items() if series.is_timed}
    if timed != {anchor} or limits.slower is None:
        return ""
    return f"the anchor {anchor} is the only kernel that was timed, so no time could be gated: name another anchor, or none"


def _same_machine(baseline: Sequence[Record], new: Sequence[Record]) -> tuple[Finding, ...]:
    old_pair, new_pair = device_and_driver(baseline, "the baseline"), device_and_driver(new, "the new file")
    verdicts = (("device", Verdict.OTHER_DEVICE), ("driver", Verdict.OTHER_DRIVER))
    return tuple(
        Finding(verdict, name, f"the baseline's {name} is {old}, this is {now}")
        for (name, verdict), old, now in zip(verdicts, old_pair, new_pair, strict=True)
        if old != now
    )


SeriesByKey = Mapping[Key, Series]


def _judge(key: Key, old: SeriesByKey, new: SeriesByKey, limits: Limits, times: "Times") -> tuple[Finding, ...]:
    if key not in new:
        return (Finding(Verdict.MISSING, "outcome", "in the baseline, and not in the new records"),)
    if key not in old:
        return (Finding(Verdict.ADDED, "outcome", "not in the baseline: record it again to guard this case"),)
    outcome = judge_outcome(old[key], new[key])
    if outcome.verdict is not Verdict.OK or "passed" not in new[key].kinds or "passed" not in old[key].kinds:
        return (outcome,)
    findings = [finding for finding in _quantities(key, old, new, limits, times) if finding] or [outcome]
    order = list(Verdict)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.verdict)))


def judge_outcome(old: Series, new: Series) -> Finding:
    """What the outcomes alone say: one bad record of the new ones counts, one good record of the old ones counts."""
    did_pass = "passed" in old.kinds
    worst = next((record for kinds in (REFUTED, {"out_of_memory"}, SKIPPED) for record in new.records if record.kind in kinds), None)
    before = "passed" if did_pass else str(old.records[0].result)
    if worst is None:
        return Finding(Verdict.OK, "outcome", "passed" if did_pass else f"passed; before: {before}")
    now = str(worst.result)
    if worst.kind in REFUTED and (did_pass or not set(old.kinds) & REFUTED):
        return Finding(Verdict.WRONG, "outcome", f"{now}; before: {before}")
    if worst.kind == "out_of_memory" and did_pass:
        return Finding(Verdict.HUNGRIER, "outcome", f"{now}; before: {before}")
    if worst.kind in SKIPPED and not set(old.kinds) <= SKIPPED:
        return Finding(Verdict.NEW_SKIP, "outcome", f"{now}; before: {before}")
    return Finding(Verdict.OK, "outcome", f"as before: {now}")


def _quantities(key: Key, old: SeriesByKey, new: SeriesByKey, limits: Limits, times: "Times") -> list[Finding | None]:
    was, now = old[key], new[key]
    return [
        times.judge(key, old, new),
        _single_look("memory", Verdict.HUNGRIER, was.peaks_bytes(), now.peaks_bytes(), limits.memory, limits.floor_bytes),
        _single_look("error", Verdict.LESS_ACCURATE, was.errors(), now.errors(), limits.error, limits.floor_error),
    ]


def _single_look(name: str, worse: Verdict, old: list[float], new: list[float], limit: float | None, floor: float) -> Finding | None:
    """Memory and error are results, not samples: one look at the median is enough."""
    if limit is None or not old or not new:
        return None
    return judge_quantity(name, worse, old, [new], limit, floor)


def judge_quantity(
    name: str, worse: Verdict, old: Sequence[float], looks: Sequence[Sequence[float]], limit: float, floor: float
) -> Finding:
    """The verdict on one quantity, from the baseline's values and the independent looks at the new ones."""
    before = statistics.median(old)
    medians = [statistics.median(look) for look in looks]
    least = min(medians)  # a change counts only as far as every look shows it
    change = relative_change(before, least)
    noise = spread([old, [value for look in looks for value in look]])
    least_limit = NOISE_PER_LIMIT * noise
    is_noisy = least_limit > limit
    cut = least_limit if is_noisy else limit / 2
    figures = (before, statistics.median(value for look in looks for value in look), change)
    if change > cut and least - before > floor:
        return Finding(worse, name, f"{change:+.1%} where {percent(limit)} must be caught", *figures)
    if is_noisy:
        held = f"this machine can hold {math.ceil(100 * least_limit)}%, not {percent(limit)}"
        return Finding(Verdict.TOO_NOISY, name, f"{change:+.1%}, noise {noise:.1%}: {held}", *figures)
    return Finding(Verdict.OK, name, f"{change:+.1%}", *figures)


def relative_change(before: float, now: float) -> float:
    """The change as a fraction of what was before; infinite from nothing, -1 from infinity to anything less."""
    if now == before:
        return 0.0
    if math.isinf(before):
        return -1.0
    return (now - before) / before if before else math.inf


def spread(groups: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation between processes, pooled over groups (each about its own mean); 0 if unknown."""
    degrees = sum(len(group) - 1 for group in groups)
    if degrees < 1:
        return 0.0
    squares = 0.0
    for group in groups:
        mean = statistics.fmean(group)
        if not math.isfinite(mean):
            return 0.0
        squares += sum((value / mean - 1) ** 2 for value in group) if mean else 0.0
    return math.sqrt(squares / degrees)


class Times:
    """The judge of times: absolute, or relative to an anchor kernel."""

    def __init__(self, limits: Limits, anchor: str | None) -> None:
        self.limits = limits
        self.anchor = anchor

    def judge(self, key: Key, old: SeriesByKey, new: SeriesByKey) -> Finding | None:
        limit = self.limits.slower
        if limit is None or not old[key].is_timed or key.kernel == self.anchor:
            return None
        if not new[key].is_timed:
            return Finding(Verdict.NOT_COMPARABLE, "time", "timed in the baseline, and not now")
        if old[key].is_throttled or new[key].is_throttled:
            return Finding(Verdict.THROTTLED, "time", "the GPU throttled while this was timed: measure again")
        was, now = self.values(key, old), self.values(key, new)
        if gap := self._gap(was, now):
            return Finding(Verdict.NOT_COMPARABLE, "time", gap)
        finding = judge_quantity("time", Verdict.SLOWER, was, two_looks(now), limit, self._floor(key, old))
        if finding.verdict is Verdict.SLOWER and len(now) < 2:
            reason = f"{finding.reason}, but in one process only: measure at least two"
            return dataclasses.replace(finding, verdict=Verdict.NOT_COMPARABLE, reason=reason)
        return finding

    def _gap(self, was: Sequence[float], now: Sequence[float]) -> str | None:
        """Why the values do not suffice, or None."""
        limits = self.limits
        if len(was) < limits.processes:
            needs = f"{limits.processes} processes of at least {limits.samples} samples"
            usable = f"{len(was)} usable process{'' if len(was) == 1 else 'es'}"
            return f"the baseline has {usable}{self._beside()}, and {needs} are needed: record it again"
        return None if now else f"no new process has {limits.samples} samples{self._beside()}: measure longer"

    def _beside(self) -> str:
        return f" beside the anchor {self.anchor}" if self.anchor else ""

    def values(self, key: Key, series: SeriesByKey) -> list[float]:
        """One value for each process that suffices: its median time in milliseconds, or its ratio to the anchor's."""
        medians = series[key].medians_ms(self.limits.samples)
        if self.anchor is None:
            return list(medians.values())
        if pairs := series[key].beside(self.anchor, self.limits.samples):
            return [value / other for value, other in pairs.values()]
        beside = self._anchor_medians(key, series)
        if medians.keys() & beside.keys():
            return [value / beside[process] for process, value in medians.items() if process in beside]
        return [value / other for value, other in zip(medians.values(), beside.values(), strict=False)]

    def _floor(self, key: Key, series: SeriesByKey) -> float:
        """The floor in the unit of the values: milliseconds, or a share of the anchor's time."""
        if self.anchor is None:
            return self.limits.floor_ms
        pairs = series[key].beside(self.anchor, self.limits.samples)
        others = [other for _, other in pairs.values()] or list(self._anchor_medians(key, series).values())
        return self.limits.floor_ms / statistics.median(others)

    def _anchor_medians(self, key: Key, series: SeriesByKey) -> dict[str, float]:
        anchor_key = dataclasses.replace(key, kernel=self.anchor or "")
        return series[anchor_key].medians_ms(self.limits.samples) if anchor_key in series else {}


def two_looks(values: Sequence[float]) -> list[Sequence[float]]:
    """The values split into two disjoint looks, every other one, so that a drift during the run falls on both."""
    return [look for look in (values[0::2], values[1::2]) if look]
