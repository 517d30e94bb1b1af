"""Sampling: document lengths from published histograms, from a user's file, or awkward ones. Always seeded, always an exact total."""

import functools
import importlib.resources
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.lengths import Lengths, checked_count

HISTOGRAMS = ("pile", "prolong64k", "prolong512k")
HISTOGRAM_SHARE = 0.4
LONG_DOCUMENTS = (8 * 1024, 30 * 1024)
SHORT = 1024
"""Totals below it are on no published list: what they have by default is what LIKENESS tokens have, scaled down, so that it shows."""
LIKENESS = 8 * 1024


class LengthSource(Protocol):
    """Where document lengths come from."""

    def draw(self, total: int, seed: int) -> tuple[int, ...]:
        """Lengths of at least 1 that sum to `total`; the last one is cut."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Document lengths as (from inclusive, to exclusive, probability) rows; uniform within a row. Source: see the data files."""

    name: str
    rows: tuple[tuple[int, int, float], ...]

    def one(self, rng: Random) -> int:
        low, high, _ = rng.choices(self.rows, [row[2] for row in self.rows])[0]
        return rng.randrange(low, high)

    def draw(self, total: int, seed: int) -> tuple[int, ...]:
        return tuple(fill(total, self.one, Random(seed)))


@dataclass(frozen=True, slots=True)
class LengthList:
    """A user's own document lengths, from which each document is drawn."""

    values: tuple[int, ...]

    def draw(self, total: int, seed: int) -> tuple[int, ...]:
        return tuple(fill(total, lambda rng: rng.choice(self.values), Random(seed)))


def fill(total: int, one: Callable[[Random], int], rng: Random) -> list[int]:
    """Documents of `one(rng)` tokens, each at least 1, until they hold `total`; the last is cut. `[0]` for a total of 0."""
    lens: list[int] = []
    left = total
    while left:
        lens.append(min(left, max(1, one(rng))))
        left -= lens[-1]
    return lens or [0]


@functools.cache
def histogram(name: str) -> Histogram:
    """One of the published histograms, by name."""
    if name not in HISTOGRAMS:
        raise unknown_name("histogram", name, HISTOGRAMS)
    text = importlib.resources.files("pytest_longca").joinpath("data", f"{name}.json").read_text("utf-8")
    return _histogram(name, json.loads(text)["rows"])


def histogram_for(total: int) -> str:
    """The histogram that the paper (arXiv:2510.17896) uses for a total length: Pile to 8K, ProLong64K to 64K, ProLong512K above."""
    return next((name for limit, name in ((8 * 1024, "pile"), (64 * 1024, "prolong64k")) if total <= limit), "prolong512k")


def draw_lengths(total: int, seed: int = 0, source: LengthSource | None = None) -> tuple[int, ...]:
    """Document lengths that sum to `total`, from `source` or from the histogram for that total (scaled down for a short one)."""
    checked_count("the total length", total)
    name = "short" if total < SHORT else histogram_for(total)
    return source.draw(total, seed) if source else draw(f"{name}:{total}:s{seed}")


def scaled(size: int, seqlen: int) -> int:
    """A default size, such as a window, for a sequence: as it is, or as large a part of a short one as it is of LIKENESS tokens.

    >>> scaled(1024, 8192), scaled(1024, 1024), scaled(1024, 512)
    (1024, 1024, 64)
    """
    return size if seqlen >= SHORT else max(1, size * seqlen // LIKENESS)


def draw(recipe: str) -> Lengths:
    """The lengths that a recipe draws; the result remembers it.

    `pile:8192:s7` (a histogram, total, seed), `long:65536:s7` (the context-parallel mix), `short:512:s7` (documents of 8K tokens,
    scaled down), `uniform1-8x1024:8192:s7` (1 to 8 times 1024), `prefix:RECIPE:s3` (a prefix for each document of RECIPE). Raises
    InvalidArgument if it is none of these.

    >>> sum(draw("pile:8192:s7"))
    8192
    >>> draw("uniform1-2x4:10:s0").recipe
    'uniform1-2x4:10:s0'
    """
    for pattern, make in _RECIPES:
        if match := re.fullmatch(pattern, recipe):
            return Lengths(make(*match.groups()), recipe)
    raise InvalidArgument(f"lengths {recipe!r}: a recipe reads NAME:TOTAL:sSEED, as in pile:8192:s7 or uniform1-8x1024:8192:s7")


def _prefixes(recipe: str, seed: str) -> tuple[int, ...]:
    rng = Random(int(seed))
    return tuple(rng.randint(0, length) for length in draw(recipe))


def _uniform(low: str, high: str, unit: str, total: str, seed: str) -> tuple[int, ...]:
    if not 0 < int(low) <= int(high) or not int(unit):
        raise InvalidArgument(f"lengths uniform{low}-{high}x{unit}: it must be 1 <= LOW <= HIGH and UNIT >= 1")
    rng = Random(int(seed))
    return tuple(fill(_total(total), lambda rng: rng.randint(int(low), int(high)) * int(unit), rng))


def _long(total: str, seed: str) -> tuple[int, ...]:
    tokens, rng = _total(total), Random(int(seed))
    short = round(tokens * HISTOGRAM_SHARE)
    lens = fill(short, histogram(histogram_for(tokens)).one, rng) + fill(tokens - short, lambda r: r.randint(*LONG_DOCUMENTS), rng)
    rng.shuffle(lens)
    return tuple(n for n in lens if n) or (0,)


def _short(total: str, seed: str) -> tuple[int, ...]:
    """The Pile's lengths for 8K tokens, scaled to `total`; one of more than a third of it is drawn again: there are at least three."""
    tokens, rows = _total(total), histogram(histogram_for(LIKENESS))
    most = max(1, tokens // 3)

    def one(rng: Random) -> int:
        length = most + 1
        while length > most:
            length = -(-rows.one(rng) * tokens // LIKENESS)
        return length

    return tuple(fill(tokens, one, Random(int(seed))))


def _histogram_draw(name: str, total: str, seed: str) -> tuple[int, ...]:
    return histogram(name).draw(_total(total), int(seed))


def _total(text: str) -> int:
    return checked_count("the total length", int(text))


_RECIPES: tuple[tuple[str, Callable[..., tuple[int, ...]]], ...] = (
    (r"prefix:(.+):s(\d+)", _prefixes),
    (r"uniform(\d+)-(\d+)x(\d+):(\d+):s(\d+)", _uniform),
    (r"long:(\d+):s(\d+)", _long),
    (r"short:(\d+):s(\d+)", _short),
    (r"(\w+):(\d+):s(\d+)", _histogram_draw),
)


def draw_prefixes(lens: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """A prefix for each document, uniform from none of it to all."""
    if isinstance(lens, Lengths):
        return draw(f"prefix:{lens.recipe}:s{seed}")
    rng = Random(seed)
    return tuple(rng.randint(0, length) for length in lens)


MANY_DOCUMENTS = 16
TILES = (64, 128)
"""Sizes of the tiles that kernels of packed documents have."""


def awkward_edge(rng: Random, total: int) -> int:
    """A multiple of a tile's size, at most `total`."""
    tile = rng.choice((16, 64, 128))
    return tile * rng.randint(0, total // tile)


def awkward_lengths(rng: Random, total: int, num: int | None = None) -> tuple[int, ...]:
    """`num` lengths (drawn where None) that sum to `total`: empty and one-token documents, equal ones, almost all in one, whole tiles.

    Mostly few; sometimes more than a warp has threads, which is how many a scheduler looks up at a time.
    """
    num = num or rng.choice((1, 2, 2, 3, rng.randint(1, 9), rng.randint(1, 9), rng.randint(24, 48)))
    near = (0, 1, total - 1, total, total // 2)
    tiles = (awkward_edge(rng, total), awkward_edge(rng, total))
    special = () if num > MANY_DOCUMENTS else (*near, *tiles)  # else most of many were empty
    cuts = [min(total, max(0, rng.choice((*special, rng.randint(0, total), rng.randint(0, total))))) for _ in range(num - 1)]
    # Last, as what takes fewer numbers counts as simpler: cases would shrink to whole tiles and not below one.
    if total > TILES[0] and rng.randrange(2):  # every document but the last is whole tiles
        tile = rng.choice([tile for tile in TILES if tile < total])
        cuts = [tile * rng.randint(0, total // tile) for _ in range(num - 1)]
    return _between(cuts, total)


def _between(cuts: list[int], total: int) -> tuple[int, ...]:
    """The lengths between cuts of `total` tokens."""
    edges = [0, *sorted(cuts), total]
    return tuple(b - a for a, b in pairwise(edges))


def read_lengths(path: str | Path) -> LengthSource:
    """A user's own document lengths: JSON, a list of lengths, or histogram rows `[from, to, probability]` (also under "rows").

    Raises InvalidArgument that says what is wrong with the file.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidArgument(f"lengths file {path}: it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InvalidArgument(f"lengths file {path}: it is not JSON ({error})") from None
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise InvalidArgument(f"lengths file {path}: it must hold a list of lengths, or of histogram rows [from, to, probability]")
    if isinstance(rows[0], list):
        return _histogram(str(path), rows)
    return LengthList(tuple(checked_count(f"lengths file {path}, item {i}", value, 1) for i, value in enumerate(rows)))


def _histogram(name: str, rows: list[Any]) -> Histogram:
    checked = tuple(_row(name, i, row) for i, row in enumerate(rows))
    if not any(probability for _, _, probability in checked):
        raise InvalidArgument(f"histogram {name}: all probabilities are 0; at least one must be positive")
    return Histogram(name, checked)


def _row(name: str, i: int, row: Any) -> tuple[int, int, float]:
    is_of_numbers = isinstance(row, list) and not any(isinstance(value, bool) for value in row)
    match row:
        case [int(low), int(high), int(probability) | float(probability)] if (
            is_of_numbers and 0 <= low < high and 0 <= probability < float("inf")
        ):
            return low, high, float(probability)
    raise InvalidArgument(f"histogram {name}, row {i} is {row!r}: it must be [from, to, probability], 0 <= from < to, probability >= 0")
