"""Series: all records of one case of one kernel, as the gate sees them: outcomes, and one value for each process."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pytest_longca.errors import InvalidArgument
from pytest_longca.report.figures import worst_error
from pytest_longca.report.record import Record

CELL_STAGES = frozenset({"probes", "examples"})
"""Stages that judge a kernel on a mask with many cases: the case in such a record is the one that failed, not what was asked."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What must be equal for two records to be about the same thing. A case's id says its direction too."""

    kernel: str
    mask: str
    stage: str
    case: str
    mechanism: str
    world_size: int

    def __str__(self) -> str:
        parts = (self.kernel, self.mechanism, self.case or self.mask, self.stage)
        return " ".join(part for part in parts if part) + (f" x{self.world_size}" if self.world_size > 1 else "")


def key_of(record: Record) -> Key:
    """The key of a record."""
    case = "" if record.stage in CELL_STAGES else record.case or ""
    return Key(record.kernel, record.mask, record.stage, case, record.mechanism or "", record.world_size)


@dataclass(slots=True)
class Series:
    """The records of one key."""

    records: list[Record] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """The outcomes' names."""
        return [record.kind for record in self.records]

    def medians_ms(self, min_samples: int) -> dict[str, float]:
        """The median time of each process that gave at least `min_samples` samples, in the order in which they ran."""
        samples: dict[str, list[float]] = {}
        for number, record in enumerate(self.records):
            if record.samples_ms:
                samples.setdefault(record.process or f"record {number}", []).extend(record.samples_ms)
        return {process: statistics.median(values) for process, values in samples.items() if len(values) >= min_samples}

    def beside(self, anchor: str, min_samples: int) -> dict[str, tuple[float, float]]:
        """(median time, the anchor's median time) of each process that sampled both in turns, `min_samples` times at least."""
        pairs: dict[str, tuple[float, float]] = {}
        for number, record in enumerate(self.records):
            others = record.facts.get("anchor_samples_ms") if record.facts.get("anchor") == anchor else None
            if record.samples_ms and others and min(len(record.samples_ms), len(others)) >= min_samples:
                pairs[record.process or f"record {number}"] = (statistics.median(record.samples_ms), statistics.median(others))
        return pairs

    def peaks_bytes(self) -> list[float]:
        """The peak memory of each record that has one."""
        return [float(record.peak_bytes) for record in self.records if record.peak_bytes is not None]

    def errors(self) -> list[float]:
        """The worst error over its limit of each record on a fixed case. Drawn examples differ from run to run and do not count."""
        errors = (worst_error(record) for record in self.records if record.stage not in CELL_STAGES)
        return [error for error in errors if error is not None]

    @property
    def is_timed(self) -> bool:
        return any(record.samples_ms for record in self.records)

    @property
    def is_throttled(self) -> bool:
        return any(record.samples_ms and record.clocks.get("throttled") for record in self.records)


def by_key(records: Iterable[Record]) -> dict[Key, Series]:
    """Records grouped by key, each group in file order."""
    groups: dict[Key, Series] = {}
    for record in records:
        groups.setdefault(key_of(record), Series()).records.append(record)
    return groups


def settled(records: Iterable[Record]) -> list[Record]:
    """The records without those of postponed items that another record of the same key has caught up on."""
    records = list(records)
    judged = {key_of(record) for record in records if not is_postponed(record)}
    return [record for record in records if not is_postponed(record) or key_of(record) not in judged]


def is_postponed(record: Record) -> bool:
    """Whether only time ran out before the item."""
    return bool(record.outcome.get("is_postponed"))


def the_one(name: str, values: Iterable[str | None], where: str) -> str | None:
    """The only value there is, or None. Raises InvalidArgument if there are several: such records are no one run."""
    distinct = sorted({value for value in values if value})
    if len(distinct) > 1:
        raise InvalidArgument(f"{where} mixes records of several {name}s ({', '.join(distinct)}): compare one machine's records at a time")
    return distinct[0] if distinct else None


def device_and_driver(records: Sequence[Record], where: str) -> tuple[str | None, str | None]:
    """The device and driver that a file's timings come from (of all its records if nothing was timed)."""
    relevant = [record for record in records if record.samples_ms] or list(records)
    return (
        the_one("device", (record.device for record in relevant), where),
        the_one("driver", (record.versions.get("driver") for record in relevant), where),
    )
