"""TFLOP/s per GPU against the number of GPUs: measured points beside the scaling model's, as data for the report's plot."""

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.ids import parse_case
from pytest_longca.mask import Mask
from pytest_longca.parallel.bench_options import LongMix
from pytest_longca.parallel.mechanisms import MECHANISMS, RANKS_PER_NODE
from pytest_longca.parallel.model import Network, compute_ms, fitted, is_compared, is_quiet, model_error, predict_ms, predicted_ms
from pytest_longca.parallel.setup import Sharing
from pytest_longca.report.figures import tflop_per_s, timings
from pytest_longca.report.record import Record

ALONE = "the kernel alone"
SIMULATION = "--simulate-world"


class Kind(StrEnum):
    """What a point rests on."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    """One rank of a world that was not there, its communication switched off: no throughput of any machine."""
    PREDICTED = "predicted"
    """By the model, from a rank's measured compute time."""
    ASSUMED = "assumed"
    """By the model, from the compute rate of the mechanism's ranks at the nearest number of GPUs, else from that of the kernel alone."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point: a panel for each setting, mask and pass, a line for each mechanism."""

    setting: str
    mask: str
    direction: str
    line: str
    world: int
    kind: Kind
    tflop_per_s: float


def is_scaling(record: Record) -> bool:
    """Whether the record is one of the context-parallel benchmark's steps."""
    return record.stage == "parallel" and "tokens" in record.facts and record.mask in MASKS


def points(records: Sequence[Record]) -> list[Point]:
    """All points of the benchmark's records; of several measurements of a point the last counts.

    Predictions reach from 2 GPUs to a whole node, or to the largest world in the records, in powers of two.
    """
    steps, network = [record for record in timings(records) if is_scaling(record)], fitted(records, Network())
    kernels: dict[tuple[object, ...], dict[str, None]] = {}
    for record in steps:
        if record.mechanism in MECHANISMS:
            kernels.setdefault((_sizes(record), record.mask, record.direction), {})[record.kernel] = None
    found: dict[tuple[object, ...], Point] = {}
    for record in steps:
        beside = kernels.get((_sizes(record), record.mask, record.direction), {})  # a peer is shown beside the mechanisms of every kernel
        for kernel in [record.kernel] if record.mechanism in MECHANISMS else beside:
            for point in _of_record(record, f"{kernel}, {_sizes(record)}", network):
                found[_place(point)] = point
    for point in _assumed(steps, list(found.values()), network):
        found.setdefault(_place(point), point)
    return sorted(found.values(), key=lambda point: (_rank(point.line), point.world))


def errors(records: Sequence[Record]) -> list[str]:
    """How far the model is from the measured steps, a line for each number of GPUs."""
    network = fitted(records, Network())
    by_world: dict[int, list[float]] = {}
    for record in records:
        if is_compared(record):
            by_world.setdefault(record.world_size, []).append(abs(model_error(record, network)))
    return [
        f"{world} GPUs: the model is at most {max(found):.1%} off (median {statistics.median(found):.1%}), measured steps: {len(found)}"
        for world, found in sorted(by_world.items())
    ]


def _sizes(record: Record) -> str:
    case = _case(record)
    return f"{record.facts['tokens']:,} tokens a GPU, {case.heads_q}:{case.heads_kv} d{case.head_dim} {case.dtype}"


def _case(record: Record) -> Case:
    return parse_case(record.case or "")


def _line(record: Record) -> str:
    """The mechanism, and its layout where that is not the mechanism's own."""
    name, layout = record.mechanism or "", record.facts.get("layout")
    return name if name not in MECHANISMS or layout in (None, MECHANISMS[name].layout) else f"{name} {layout}"


def _rank(line: str) -> tuple[bool, int, str]:
    """Where a line stands in the legend: mechanisms in their order, then in other layouts, peers, the kernel alone."""
    order = list(MECHANISMS)
    is_variant = line.split(" ")[0] in order
    return line == ALONE, order.index(line) if line in order else len(order) + (not is_variant), line


def _place(point: Point) -> tuple[object, ...]:
    is_model = point.kind in (Kind.PREDICTED, Kind.ASSUMED)
    return point.setting, point.mask, point.direction, point.line, point.world, is_model


def _of_record(record: Record, setting: str, network: Network) -> Iterator[Point]:
    """What was measured, the kernel alone that it was compared with, and the model's prediction of it."""
    is_simulated = is_quiet(record) or SIMULATION in (record.command or "")
    rate, share = tflop_per_s(record) or 0.0, record.facts.get("of_alone")
    kind = Kind.SIMULATED if is_simulated else Kind.MEASURED
    point = Point(setting, record.mask, record.direction or "", _line(record), record.world_size, kind, rate)
    yield point
    if record.mechanism not in MECHANISMS:
        return
    if share:
        yield replace(point, line=ALONE, tflop_per_s=rate / share)
    if is_compared(record) or is_quiet(record):
        yield replace(point, kind=Kind.PREDICTED, tflop_per_s=(record.flop or 0) / predicted_ms(record, network) / 1e9)


def _assumed(steps: Sequence[Record], found: Iterable[Point], network: Network) -> Iterator[Point]:
    """The model at other numbers of GPUs, for mechanisms in their own layout on masks that grow as the benchmark's do."""
    best_last = sorted(found, key=lambda point: (point.kind is Kind.MEASURED, point.world))
    alone = {(point.setting, point.mask, point.direction): point.tflop_per_s for point in best_last if point.line == ALONE}
    largest, worlds = max([RANKS_PER_NODE, *(record.world_size for record in steps)]), [2]
    while worlds[-1] * 2 <= largest:
        worlds.append(worlds[-1] * 2)
    rates = _compute_rates(steps)
    done = set()
    for record in steps:
        key = f"{record.kernel}, {_sizes(record)}", record.mask, record.direction or ""
        line, tokens, case = _line(record), int(record.facts["tokens"]), _case(record)
        if line not in MECHANISMS or key not in alone or (key, line) in done or case.mask != _mask(record.mask, tokens * record.world_size):
            continue
        done.add((key, line))
        for world in worlds:
            grown = replace(case, mask=_mask(record.mask, tokens * world))
            flop = grown.flop(Direction(key[2])) / world
            with contextlib.suppress(InvalidArgument):  # more ranks than heads
                rate = _nearest(rates.get((*key, line), {}), world) or alone[key]
                time_ms = predict_ms(grown, Sharing(line, world), key[2], flop / rate / 1e9, network)
                yield Point(*key, line, world, Kind.ASSUMED, flop / time_ms / 1e9)


def _compute_rates(steps: Iterable[Record]) -> dict[tuple[str, str, str, str], dict[int, float]]:
    """TFLOP/s of a rank with communication off, by number of GPUs, for each setting, mask, pass and line."""
    rates: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for record in steps:
        if is_compared(record) or is_quiet(record):
            key = f"{record.kernel}, {_sizes(record)}", record.mask, record.direction or "", _line(record)
            rates.setdefault(key, {})[record.world_size] = (record.flop or 0) / compute_ms(record) / 1e9
    return rates


def _nearest(rates: Mapping[int, float], world: int) -> float | None:
    """The rate at the number of GPUs that is the fewest doublings away, the smaller of two."""
    return rates[min(rates, key=lambda other: (abs(math.log2(other / world)), other))] if rates else None


def _mask(name: str, length: int) -> Mask:
    mask: Mask = load(MASKS[name]).default(length, 0, LongMix())
    return mask
