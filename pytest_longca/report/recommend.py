"""Advice: the fastest verified kernel and mechanism for somebody's own lengths, heads and mask, with the figures it rests on."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pytest_longca.case import Case, Direction
from pytest_longca.errors import InvalidArgument
from pytest_longca.report.figures import SHARED, Timed, rate_text, seqlen, tied, tied_text, timed, timings
from pytest_longca.report.matrix import column
from pytest_longca.report.record import Record

FAR_DENSITY = 2.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What one kernel is expected to need for the case, and the measurements (length, TFLOP/s) that say so.

    `p20_p80_ms` is what it is expected to need where its samples are at these quantiles.
    """

    kernel: str
    expected_ms: float
    p20_p80_ms: tuple[float, float]
    rate: float
    points: tuple[tuple[int, float], ...]
    peak_bytes: int | None
    caveats: tuple[str, ...]


def recommend(records: Iterable[Record], case: Case, world_size: int = 1) -> list[Advice]:
    """Every kernel that was verified and timed on such a case, the fastest first.

    Between two measured lengths the throughput is interpolated (in the logarithm of the length); beyond them it is the nearest one's.
    Raises InvalidArgument, with what there is, if no record fits.
    """
    usable = timings(records)
    fitting = [record for record in usable if _fits(record, case, world_size)]
    if not fitting:
        raise InvalidArgument(f"no verified timing of {_wanted(case, world_size)}; {_available(usable)}")
    groups: dict[str, list[Record]] = {}
    for record in fitting:
        groups.setdefault(column(record), []).append(record)
    return sorted((_advice(name, group, case) for name, group in groups.items()), key=lambda advice: advice.expected_ms)


def _fits(record: Record, case: Case, world_size: int) -> bool:
    sizes = ("heads_q", "heads_kv", "head_dim", "head_dim_v", "dtype")
    is_same_shape = bool(record.shape) and all(record.shape[name] == getattr(case, name) for name in sizes)
    return is_same_shape and (record.mask, record.direction, record.world_size) == (case.mask.name, str(case.direction), world_size)


def _advice(kernel: str, records: Sequence[Record], case: Case) -> Advice:
    entries = list(timed(records).values())
    points = _rates(entries, lambda entry: entry.median_ms)
    quantiles = (_rates(entries, lambda entry: entry.p20_p80_ms[0]), _rates(entries, lambda entry: entry.p20_p80_ms[1]))
    rate, at_p20, at_p80 = (interpolate(found, case.seqlen_q) for found in (points, *quantiles))
    expected_ms, p20_ms, p80_ms = (case.flop() / found / 1e9 for found in (rate, at_p20, at_p80))
    nearest = min(records, key=lambda record: abs(math.log((seqlen(record) or 1) / max(case.seqlen_q, 1))))
    caveats = tuple(_caveats(points, records, nearest, case))
    return Advice(kernel, expected_ms, (p20_ms, p80_ms), rate, points, nearest.peak_bytes, caveats)


def _rates(entries: Sequence[Timed], ms: Callable[[Timed], float]) -> tuple[tuple[int, float], ...]:
    """(length, TFLOP/s) at each measured length, where a case takes what `ms` says; the median over the cases of that length."""
    found: dict[int, list[float]] = {}
    for entry in entries:
        found.setdefault(seqlen(entry.record) or 0, []).append((entry.record.flop or 0) / ms(entry) / 1e9)
    return tuple(sorted((length, statistics.median(values)) for length, values in found.items()))


def interpolate(points: Sequence[tuple[int, float]], length: int) -> float:
    """The value at `length`, linear in the logarithm of the length; the first or last one's beyond the ends.

    >>> interpolate([(1024, 100.0), (4096, 300.0)], 2048)
    200.0
    """
    below = [point for point in points if point[0] <= length]
    above = [point for point in points if point[0] >= length]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (low, first), (high, last) = below[-1], above[0]
    return first if low == high else first + (last - first) * math.log(length / low) / math.log(high / low)


def _caveats(points: Sequence[tuple[int, float]], records: Sequence[Record], nearest: Record, case: Case) -> list[str]:
    found = []
    if any(record.facts.get(SHARED) for record in records):
        found.append("its timings are rough: other tests ran beside them")
    first, last = points[0][0], points[-1][0]
    if not first <= case.seqlen_q <= last:
        found.append(f"{case.seqlen_q} tokens are outside the measured lengths {first} to {last}")
    measured = _density(nearest)
    wanted = case.area / max(1, case.num_scores)
    if measured and wanted and not 1 / FAR_DENSITY <= wanted / measured <= FAR_DENSITY:
        found.append(f"your mask shows {wanted:.1%} of all pairs, the measured one {measured:.1%}: time this very case")
    return found


def _density(record: Record) -> float:
    pairs = math.prod(int(record.shape[name]) for name in ("batch", "heads_q", "seqlen_q", "seqlen_kv"))
    return (record.area or 0) / max(1, pairs)


def _wanted(case: Case, world_size: int = 1) -> str:
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    return f"{case.mask.name} {case.heads_q}:{case.heads_kv} d{case.head_dim} {case.dtype} {case.direction}{ranks}"


def _available(records: Sequence[Record]) -> str:
    if not records:
        return "the records hold no verified timing at all: run pytest with --longca-json and the timing tests"
    found = dict.fromkeys(
        f"{record.mask} {record.shape['heads_q']}:{record.shape['heads_kv']} d{record.shape['head_dim']} {record.shape['dtype']} "
        f"{record.direction}" + (f" on {record.world_size} ranks" if record.world_size > 1 else "")
        for record in records
        if record.shape
    )
    return "choose what the records have, by --mask, --heads, --head-dim, --dtype, --pass, --ranks: " + "; ".join(found)


def make_case(
    mask: str,
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    direction: str,
    lengths: str | None = None,
    num_tokens: int | None = None,
) -> Case:
    """The user's case. `lengths` is a JSON file: a list is one batch's documents as they are, a histogram is drawn from.

    Raises InvalidArgument for an unknown mask or a file that is no lengths, and if the number of tokens is nowhere said.
    """
    from pytest_longca.catalogue import Catalogue
    from pytest_longca.sampling import LengthList, read_lengths

    source = read_lengths(lengths) if lengths else None
    if isinstance(source, LengthList) and num_tokens is None:
        source, num_tokens = Documents(source.values), sum(source.values)
    if num_tokens is None:
        raise InvalidArgument("how many tokens? give --tokens, or --lengths with a list of document lengths")
    built = Catalogue().mask(mask).default(num_tokens, 0, lengths=source)
    return Case(mask=built, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, dtype=dtype, direction=Direction(direction))


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one batch, as they are: a source of lengths that draws nothing."""

    values: tuple[int, ...]

    def draw(self, total: int, seed: int) -> tuple[int, ...]:
        return self.values


def render_advice(case: Case, advice: Sequence[Advice]) -> str:
    """The advice as text: the winner first, each with what it rests on."""
    ties = tied_text([entry.kernel for entry in tied(advice)])
    lines = [f"{_wanted(case)}, {case.seqlen_q} tokens: use {advice[0].kernel}{ties}", ""]
    for entry in advice:
        measured = ", ".join(f"{rate:.3g} at {length}" for length, rate in entry.points)
        memory = f", {entry.peak_bytes / 2**30:.2f} GiB" if entry.peak_bytes else ""
        lines.append(f"{entry.kernel}: about {entry.expected_ms:.3g} ms ({rate_text(entry.rate)}{memory})")
        lines.append(f"  measured TFLOP/s: {measured}")
        lines += [f"  but {caveat}" for caveat in entry.caveats]
    return "\n".join(lines)
