"""Command line and ini options, as one table, turned once into a frozen value. Imports neither torch nor triton."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_longca.checknames import GROUPS, select_checks
from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.presets import PRESETS, Preset

if TYPE_CHECKING:
    from pytest_longca.report.verdict import Verdict

SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST = 4 * 1024**2


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names, at least one; empty pieces are dropped.

    >>> names("fa2, flex")
    ('fa2', 'flex')
    """
    pieces = tuple(piece for piece in (part.strip() for part in text.split(",")) if piece)
    if not pieces:  # an empty variable in a CI job would judge nothing, and be green
        raise InvalidArgument(f"{text!r} names nothing: write at least one, separated by commas, or leave the option out")
    return pieces


def count(text: str, example: str = "512 or 8k") -> int:
    """A positive whole number, with an optional k or m (1024, 1024 squared).

    >>> count("8k")
    8192
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match or not (value := int(match[1]) * SUFFIXES[match[2]]):
        raise InvalidArgument(f"{text!r} is not a positive whole number: write one such as {example}")
    return value


def whole(text: str) -> int:
    """A whole number that may be 0."""
    if not text.strip().isdecimal():
        raise InvalidArgument(f"{text!r} is not a whole number: write one such as 0 or 7")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Sequence lengths in tokens.

    >>> lengths("1k,8k")
    (1024, 8192)
    """
    values = tuple(count(piece) for piece in names(text))
    if too_long := [value for value in values if value > LONGEST]:
        raise InvalidArgument(f"sequence length {too_long[0]} is above {LONGEST}: no kernel here is meant for that")
    return values


def heads(text: str) -> tuple[tuple[int, int], ...]:
    """Head counts as query:key/value.

    >>> heads("64:8,64:64")
    ((64, 8), (64, 64))
    """
    pairs = []
    for piece in names(text):
        match = re.fullmatch(r"(\d+):(\d+)", piece)
        if not match:
            raise InvalidArgument(f"heads {piece!r}: write query heads, a colon, key/value heads, such as 64:8")
        heads_q, heads_kv = int(match[1]), int(match[2])
        if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
            raise InvalidArgument(f"heads {piece}: the query heads must be a multiple of the key/value heads (at least 1), such as 64:8")
        pairs.append((heads_q, heads_kv))
    return tuple(pairs)


def counts(text: str, example: str) -> tuple[int, ...]:
    """Positive whole numbers."""
    return tuple(count(piece, example) for piece in names(text))


def densities(text: str) -> tuple[float, ...]:
    """Fractions of selected blocks, above 0 and at most 1."""
    values = tuple(_number(piece) for piece in names(text))
    if wrong := [value for value in values if not 0 < value <= 1]:
        raise InvalidArgument(f"density {wrong[0]} is outside 0 (exclusive) to 1: it is the fraction of blocks that are kept")
    return values


def percent(text: str) -> float:
    """A share such as 5% as a fraction.

    >>> percent("5%")
    0.05
    """
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())):
        raise InvalidArgument(f"{text!r} is not a percentage: write one such as 5%")
    return float(match[1]) / 100


def limit(text: str) -> float | None:
    """A positive percentage as a fraction, or None for "off".

    >>> limit("off"), limit("5%")
    (None, 0.05)
    """
    if text.strip() == "off":
        return None
    if not (fraction := percent(text)):
        raise InvalidArgument("a limit of 0% would fail on noise: write a positive one such as 5%, or off")
    return fraction


def verdicts(text: str) -> "frozenset[Verdict]":
    """Verdicts of the gate, by name; an empty text allows and forbids nothing more."""
    from pytest_longca.report.verdict import Verdict

    wanted = names(text) if text.strip() else ()
    for name in wanted:
        if name not in set(Verdict):
            raise unknown_name("verdict", name, [verdict.value for verdict in Verdict])
    return frozenset(Verdict(name) for name in wanted)


def _unit(text: str, units: dict[str, Any], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if not match or match[2] not in units:
        raise InvalidArgument(f"{text!r} is not {what}: write a number and one of {', '.join(units)}, such as {example}")
    if not float(match[1]):
        raise InvalidArgument(f"{text!r} is not {what} above 0: write one such as {example}, or leave the option out")
    return float(match[1]) * float(units[match[2]])


def size(text: str) -> int:
    """A size in bytes.

    >>> size("80GB")
    80000000000
    """
    return int(_unit(text, BYTES, "a size", "80GB"))


def duration(text: str) -> float:
    """A time in seconds.

    >>> duration("9m")
    540.0
    """
    return _unit(text, SECONDS, "a time", "9m")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a number") from None


def text(value: str) -> str:
    """The text as it is."""
    return value


def mesh(value: str) -> str:
    """A mesh of ranks, as its text."""
    from pytest_longca.parallel.mechanisms import Mesh

    Mesh.parse(value)
    return value


def checks(value: str) -> tuple[str, ...]:
    """Names of checks and groups of checks, that exist."""
    select_checks(names(value))
    return names(value)


def among(kind: str, *known: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names that must be among `known`."""

    def parse(value: str) -> tuple[str, ...]:
        for name in names(value):
            if name not in known:
                raise unknown_name(kind, name, known)
        return names(value)

    return parse


def one_of(kind: str, *known: str) -> Callable[[str], str]:
    """A parser of one name among `known`."""

    def parse(value: str) -> str:
        if value not in known:
            raise unknown_name(kind, value, known)
        return value

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One option: `--longca-NAME` on the command line, `longca_NAME` in an ini file."""

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = "TEXT"
    default: str | None = None
    is_flag: bool = False
    is_list: bool = False
    needs: str | None = None
    """The option without which this one means nothing."""

    @property
    def flag(self) -> str:
        return f"--longca-{self.name}"

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def ini(self) -> str:
        return f"longca_{self.attribute}"


OPTIONS: tuple[Option, ...] = (
    Option(
        "kernels",
        names,
        "kernels to judge, by name, or all; default: those that this machine has, for mechanisms none that is interpreted",
        "NAMES",
        is_list=True,
    ),
    Option(
        "masks",
        names,
        "masks, by name or group (regular, heterogeneous, static, block, all); default: all, or the preset's",
        "NAMES",
        is_list=True,
    ),
    Option("case", text, "replay one case: its id, as a failure prints it", "ID"),
    Option("list", text, "print which kernel takes which mask, and why not; run nothing", is_flag=True),
    Option(
        "selftest", text, "plant every known fault into a correct kernel and count what the checks catch; run nothing else", is_flag=True
    ),
    Option("preset", one_of("preset", *PRESETS), f"how much to run: {', '.join(PRESETS)}", "NAME", "default"),
    Option("examples", partial(count, example="50"), "Hypothesis examples for each kernel and mask", "N"),
    Option("checks", checks, f"checks to run, by name or group ({', '.join(GROUPS)})", "NAMES", "default", is_list=True),
    Option("seqlens", lengths, "sequence lengths that are timed, such as 1k,8k", "LENGTHS", is_list=True),
    Option("heads", heads, "query:key/value heads that are timed, such as 64:8,64:64", "PAIRS", is_list=True),
    Option("head-dims", partial(counts, example="64 or 128"), "head dimensions that are timed, such as 64,128", "DIMS", is_list=True),
    Option("dtypes", among("dtype", "fp32", "bf16", "fp16", "fp64"), "dtypes: fp32, bf16, fp16, fp64", "NAMES", is_list=True),
    Option(
        "passes",
        among("pass", "fwd", "bwd", "fwd_bwd"),
        "passes that are timed: fwd, bwd, fwd_bwd; default: fwd,bwd",
        "NAMES",
        is_list=True,
    ),
    Option(
        "block-sizes", partial(counts, example="64 or 128"), "block sizes of the timed block masks; default: 64,128", "SIZES", is_list=True
    ),
    Option("densities", densities, "densities of the timed block masks; default: 0.5, or the preset's", "FRACTIONS", is_list=True),
    Option(
        "lengths",
        text,
        "a JSON file of document lengths instead of the built-in ones: a list of lengths, such as [100, 7, 2048], "
        "or a histogram of rows [from, to, probability], such as [[1, 128, 0.6], [128, 4096, 0.4]]",
        "PATH",
    ),
    Option("seed", whole, "seed of everything that is drawn", "N", "0"),
    Option("memory-limit", size, "cases that would not fit a device of this size, such as 80GB, count as out of memory", "SIZE"),
    Option(
        "isolate",
        one_of("isolation", "auto", "case", "kernel", "off"),
        "a worker process for all, each case, each kernel, or none",
        "MODE",
        "auto",
    ),
    Option(
        "timeout",
        duration,
        "how long one case may take before it counts as a hang; one that compiles has 4 minutes more, a long one a second for 10 TFLOP",
        "TIME",
        "120s",
    ),
    Option("mechanisms", names, "share each case among ranks instead, by these mechanisms, such as ulysses,usp", "NAMES", is_list=True),
    Option("world-sizes", partial(counts, example="2 or 8"), "numbers of ranks", "SIZES", "2,4", is_list=True, needs="mechanisms"),
    Option("mesh", mesh, "the ranks as outer x inner x heads, such as 2x2x2, instead of each mechanism's own", "MESH", needs="mechanisms"),
    Option("json", text, "append one line of JSON for each result to this file", "PATH"),
    Option("html", text, "write the report as one page that works offline", "PATH"),
    Option("md", text, "write the summary as Markdown, for the page of a CI job", "PATH"),
    Option("budget", duration, "end within this time, such as 9m: telling cases first, the rest is left for --longca-resume", "TIME"),
    Option("resume", text, "go on with a file of records: what it holds is not run again, and new records are appended to it", "PATH"),
    Option("baseline", text, "the gate: fail where a kernel is worse than in these records; the first run writes them", "FILE"),
    Option("fail-slower", limit, "a slowdown of this size must be caught, or off", "PERCENT", "5%", needs="baseline"),
    Option("fail-memory", limit, "a rise of peak memory of this size must be caught, or off", "PERCENT", "5%", needs="baseline"),
    Option("fail-error", limit, "a growth of the error of this size must be caught, or off", "PERCENT", "25%", needs="baseline"),
    Option(
        "allow",
        verdicts,
        "verdicts of the gate that are shown and do not fail, such as added,other-driver",
        "VERDICTS",
        is_list=True,
        needs="baseline",
    ),
    Option("forbid", verdicts, "verdicts of the gate that fail too: too-noisy", "VERDICTS", is_list=True, needs="baseline"),
    Option("anchor", text, "time this kernel in turns with each one, and gate the ratio of the two", "KERNEL"),
    Option(
        "processes",
        partial(count, example="2 or 5"),
        "processes that time each case; default: 1; with --longca-baseline 2, and 5 for the first run",
        "N",
    ),
    Option(
        "compile-workers",
        whole,
        "processes that run ahead what is compiled on a GPU, outside any budget; default: half of the cores, at most 12; 0: none",
        "N",
    ),
    Option("repro", text, "write a standalone Python file for each failure into this folder", "DIR"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a session, parsed. A value is None where neither command line, ini file nor default gave one."""

    values: dict[str, Any] = field(default_factory=dict)
    typed: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    """Where options were written that are not on the command line, in words, by name."""
    mistake: str | None = None
    """What is wrong with an ini file, for the first who asks for the session; every other option then has its default."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def preset_values(self) -> Preset:
        return PRESETS[self.values["preset"]]

    def place(self, name: str) -> str:
        """Where the option was written, for an error."""
        return self.places.get(name, f"--longca-{name}")

    def placed(self, message: str) -> str:
        """A message that begins with an option's name, with the place where that was written instead."""
        return re.sub(r"^--longca-([a-z-]+)", lambda match: self.place(match[1]), message)

    def chosen(self, name: str, device: str) -> Any:
        """The option's value, or else what the preset says for this device kind ("cpu" or "cuda")."""
        value = self.values.get(name)
        if value is not None:
            return value
        preset = self.preset_values
        sizes = preset.gpu if device == "cuda" else preset.cpu
        return getattr(sizes if hasattr(sizes, name) else preset, name)


def parse(raw: Callable[[Option], object], typed: Collection[str] = (), places: Mapping[str, str] | None = None) -> Options:
    """Options from a function that gives each option's text, or a list of texts.

    `typed` are the names of those on the command line, `places` is where others were written. Raises InvalidArgument that names the place.
    """
    options = Options({}, bool(typed), places or {})
    for option in OPTIONS:
        value = raw(option)
        value = option.default if value is None else value
        try:
            options.values[option.attribute] = option.parse(_joined(option, value)) if value is not None else None
        except InvalidArgument as error:
            raise InvalidArgument(f"{options.place(option.name)}: {error}") from None
    for option in OPTIONS:
        if option.name in typed and option.needs:
            _check_use(option, options)
    return options


def _joined(option: Option, value: object) -> str:
    """The text of a value that may be a list, as TOML has them."""
    if not isinstance(value, list):
        return str(value)
    if not option.is_list:
        raise InvalidArgument(f"{value} is a list, and it takes one value: write a string")
    return ",".join(map(str, value))


def _check_use(option: Option, options: Options) -> None:
    """Raise InvalidArgument where the option that it needs is given by nothing, the preset included."""
    needed = next(other for other in OPTIONS if other.name == option.needs)
    if not (options.values[needed.attribute] or getattr(options.preset_values, needed.attribute, None)):
        raise InvalidArgument(f"{option.flag}: it means nothing without {needed.flag}: add {needed.flag}={needed.metavar}, or leave it out")


def select(
    kind: str, wanted: Sequence[str] | None, known: Iterable[str], groups: dict[str, tuple[str, ...]] | None = None
) -> tuple[str, ...]:
    """The wanted names with groups expanded, in order and once each; all known ones where nothing was wanted.

    Raises InvalidArgument for an unknown name, with the closest ones.
    """
    known, groups = tuple(known), groups or {}
    if wanted is None:
        return known
    expanded: dict[str, None] = {}
    for name in wanted:
        if name not in groups and name not in known:
            raise unknown_name(kind, name, [*known, *groups])
        expanded.update(dict.fromkeys(groups.get(name, (name,))))
    return tuple(expanded)
