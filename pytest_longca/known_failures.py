"""Known failures of upstream kernels: a file of entries, each with the smallest case, the versions it is about, and where it is reported.

An entry turns a Wrong or Crashed outcome into KnownWrong, and only in its own scope: kernel, versions, machine, mask, property of the case
and what the message says. An entry whose smallest case passes is stale, and a stale entry fails the run: a fixed kernel must not stay
excused.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pytest_longca import blocks
from pytest_longca.case import Case, Layout, Values
from pytest_longca.errors import InvalidArgument, asked, unknown_name
from pytest_longca.kernel import Kernel
from pytest_longca.machine import Machine
from pytest_longca.mask import Form
from pytest_longca.outcome import Crashed, Outcome, Passed, Wrong


def has_rows_without_keys(case: Case) -> bool:
    """Whether any query sees no key."""
    rows = case.mask.row_intervals()
    if rows is None:
        return not bool(case.mask.dense().any(-1).all())
    return bool(((rows[..., 1] - rows[..., 0]).sum(-1) == 0).any())


def has_half_padded_head_dims(case: Case) -> bool:
    """Whether a head dim, rounded up to a multiple of 16, is no multiple of 32."""
    return any(-(-dim // 16) % 2 for dim in (case.head_dim, case.head_dim_v))


def ends_in_half_a_tile(case: Case) -> bool:
    """Whether a sequence of keys ends after the first half of a tile of 128."""
    varlen = case.mask.varlen()
    return any(length % 128 == 64 for length in (varlen.lens_kv if varlen else (case.seqlen_kv,)))


def all_end_in_half_a_tile(case: Case) -> bool:
    """Whether all keys together end after the first half of a tile of 128: for a kernel that is given documents as a dense mask."""
    return case.seqlen_kv % 128 == 64


def has_one_query_over_whole_tiles(case: Case) -> bool:
    """Whether there is one query, and the keys fill tiles of 128."""
    return case.seqlen_q == 1 and case.seqlen_kv % 128 == 0


def has_gaps_between_queries(case: Case) -> bool:
    """Whether q's tokens do not follow each other in memory: they lie in a buffer with k and v, or in longer rows."""
    return case.layouts[0] in (Layout.FUSED, Layout.PADDED)


def reads_many_key_blocks(case: Case) -> bool:
    """Whether a query of a block mask reads more than 40 blocks of 64 keys: a longer block counts as several, a shorter one as one."""
    if Form.BLOCK_MAP not in case.mask.forms:
        return False
    sparse = blocks.of(case.mask)
    pieces = (torch.tensor(sparse.sizes_kv()) + 63) // 64
    return any(int((selected * pieces).sum(-1).max()) > 40 for selected in sparse.expand())


def has_scores_far_from_zero(case: Case) -> bool:
    """Whether all scores are near -60000: one rounding to bf16 shifts them by tens, and a finite minus infinity may lie above them."""
    return case.values is Values.SENTINEL


CONDITIONS: dict[str, Callable[[Case], bool]] = {
    "rows without keys": has_rows_without_keys,
    "head dims of an odd number of 16s": has_half_padded_head_dims,
    "keys that end in half a tile of 128": ends_in_half_a_tile,
    "all keys that end in half a tile of 128": all_end_in_half_a_tile,
    "one query over whole tiles of 128 keys": has_one_query_over_whole_tiles,
    "queries with gaps between them": has_gaps_between_queries,
    "rows of more than 40 blocks of 64 keys": reads_many_key_blocks,
    "scores near -60000": has_scores_far_from_zero,
}
"""What an entry's `only` may name."""
FILE = Path(__file__).with_name("known_failures.toml")
ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One known failure. `name` is how records call it.

    `versions` is a version specifier (">=2.7,<2.9") of the kernel's package; `device` is "cpu", "cuda" or a compute capability ("sm90");
    `mask` a mask's name; "*" is any. `case` is the id of the smallest case that fails; `message` a regular expression that the outcome's
    reason must contain; `only` a property of the cases that fail (CONDITIONS) or "*"; `link` the public report, where there is one.
    An `intermittent` failure may pass without being stale. Where `after` is the id of another case, `case` fails only if that one ran
    before in the same process: `message` then begins as `blame.of_own_cases` tells such a failure, once it was right in a new process.
    """

    name: str
    kernel: str
    case: str
    message: str
    why: str
    versions: str = ANY
    device: str = ANY
    mask: str = ANY
    only: str = ANY
    link: str = ""
    intermittent: bool = False
    after: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.message)
        except re.error as error:
            raise InvalidArgument(f"known failure {self.name!r}: message {self.message!r} is no regular expression: {error}") from None
        if not _is_specifier(self.versions):
            raise InvalidArgument(f"known failure {self.name!r}: versions {self.versions!r}: write a specifier as in '>=2.7,<2.9', or '*'")
        if self.only != ANY and self.only not in CONDITIONS:
            raise unknown_name(f"condition of known failure {self.name!r}, only =", self.only, CONDITIONS)

    def covers(self, kernel: str, version: str | None, machine: Machine, mask: str) -> bool:
        """Whether a kernel of this version on this machine and mask is in the entry's scope. An unknown version is only in "*"."""
        return (
            self.kernel == kernel
            and _version_fits(self.versions, version)
            and self.device in (ANY, machine.device, _architecture(machine))
            and self.mask in (ANY, mask)
        )

    def concerns(self, case: Case) -> bool:
        """Whether the case has the property that makes it fail."""
        return self.only == ANY or CONDITIONS[self.only](case)

    def describes(self, outcome: Outcome) -> bool:
        """Whether the outcome is the failure that the entry is about."""
        return isinstance(outcome, Wrong | Crashed) and re.search(self.message, outcome.reason) is not None


def find(kernel: Kernel, case: Case, machine: Machine, outcome: Outcome, entries: Iterable[Entry] | None = None) -> Entry | None:
    """The entry that describes this outcome of this kernel on this case, or None."""
    version = asked(f"kernel {kernel.name}: version", kernel.version)
    for entry in load() if entries is None else entries:
        if entry.covers(kernel.name, version, machine, case.mask.name) and entry.describes(outcome) and entry.concerns(case):
            return entry
    return None


def due(kernel: Kernel, machine: Machine, entries: Iterable[Entry] | None = None) -> list[Entry]:
    """The entries about this kernel as it is installed here: the ones whose smallest case a run must try again."""
    version = asked(f"kernel {kernel.name}: version", kernel.version)
    mine = [entry for entry in (load() if entries is None else entries) if entry.kernel == kernel.name]
    return [entry for entry in mine if entry.covers(kernel.name, version, machine, entry.mask)]


def stale(entry: Entry, outcome: Outcome) -> str | None:
    """Why the entry is stale, given what became of its smallest case; None if it is not, or if nothing can be said."""
    if not isinstance(outcome, Passed | Wrong | Crashed) or entry.describes(outcome):
        return None
    if isinstance(outcome, Passed):
        if entry.intermittent:
            return None
        what = f"{entry.kernel} passes its smallest case {entry.case}"
        return f"known failure {entry.name!r} is stale: {what}: remove the entry, or narrow its versions"
    return f"known failure {entry.name!r} is stale: {entry.kernel} fails otherwise than {entry.message!r} says: {outcome.reason}"


@lru_cache(maxsize=8)
def load(path: Path = FILE) -> tuple[Entry, ...]:
    """The entries of a file. Raises InvalidArgument, naming the entry, for whatever cannot be right."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("failure", [])
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{path.name} is no TOML: {error}") from None
    entries = tuple(_entry(table, number) for number, table in enumerate(tables, 1))
    names = [entry.name for entry in entries]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidArgument(
            f"{path.name} has several known failures named {', '.join(sorted(twice))}: a name is how records refer to one"
        )
    return entries


def _entry(table: dict[str, Any], number: int) -> Entry:
    fields = {field.name: field for field in dataclasses.fields(Entry)}
    for key in table:
        if key not in fields:
            raise unknown_name(f"field of known failure {table.get('name', number)!r},", key, fields)
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and not table.get(name)]
    if missing:
        raise InvalidArgument(
            f"known failure {table.get('name', number)!r} lacks {', '.join(missing)}: an entry says what fails, where, and why"
        )
    return Entry(**table)


def _architecture(machine: Machine) -> str:
    return f"sm{machine.capability[0]}{machine.capability[1]}" if machine.capability else machine.device


def _is_specifier(versions: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return versions == ANY or bool(str(SpecifierSet(versions)))
    except InvalidSpecifier:
        return False


def _version_fits(versions: str, version: str | None) -> bool:
    from packaging.specifiers import SpecifierSet

    return versions == ANY or (version is not None and SpecifierSet(versions).contains(version, prereleases=True))
