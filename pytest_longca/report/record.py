"""Record: everything that one item found, as one line of JSON. Terminal, HTML and gate are pure functions of records."""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import Outcome, outcome_from_json

if TYPE_CHECKING:
    from pytest_longca.case import Case

SCHEMA = 1

SHAPE = ("batch", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "head_dim", "head_dim_v", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one item (a kernel on a mask, in one stage) found.

    Times are `_ms`, sizes `_bytes`; absent is None, never a number that means a word.

    `stage` is "probes", "examples", "case", "timing" or "parallel". `outcome` is an Outcome's `to_json()`.
    `verdicts` are one dict for each judged tensor: tensor, error_over_limit, and the case it was worst on.
    `shape` holds the sizes of the case (the names of SHAPE), so that reports need not parse ids.
    `samples_ms` are the device times of single calls, all from one `process`: several records of one case are several processes.
    `clocks` is the GPU's state around the samples; `clocks["throttled"]` names what held the kernel back.
    `peaks` is what the device itself was measured to do: matmul_tflop_per_s, copy_gb_per_s.
    `command` is the command line that made the record, `replay` the one that runs its case alone, or the
    failing case of its mask for which it was not timed.
    """

    stage: str
    kernel: str
    mask: str
    outcome: dict[str, Any]
    reason: str = ""
    case: str | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    mechanism: str | None = None
    direction: str | None = None
    num_examples: int | None = None
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    samples_ms: list[float] | None = None
    process: str | None = None
    plan_ms: float | None = None
    compile_ms: float | None = None
    launch_ms: float | None = None
    peak_bytes: int | None = None
    area: int | None = None
    flop: int | None = None
    world_size: int = 1
    comm_bytes: int | None = None
    device: str = "cpu"
    device_kernels: list[str] = field(default_factory=list)
    compiled_form: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str | None = None
    replay: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values: numbers that are not finite are strings, and half a character in a text is a question mark."""
        return dict(_plain(dataclasses.asdict(self)))

    def to_line(self) -> str:
        """One line of strict JSON (no NaN; infinities as strings), without the newline."""
        return json.dumps(self.to_json(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> "Record":
        """The record of a line. Raises InvalidArgument if it is no record, or one of another schema."""
        try:
            data = json.loads(line)
            schema = data["schema"]
            json.dumps(data, ensure_ascii=False).encode()  # half a character, which JSON can escape, could be written nowhere
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(f"not a record: {line[:80]!r} ({error}); records are written by --longca-json") from None
        if schema != SCHEMA:
            raise InvalidArgument(f"a record of schema {schema}; this version reads schema {SCHEMA}: make the file again with this version")
        try:
            record = cls(**data)
            _check_types(record)
            _check_shape(record.shape)
            outcome_from_json(record.outcome)
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"not a record: {error}; records are written by --longca-json") from None
        return record

    @property
    def result(self) -> Outcome:
        """What became of the item, as a value."""
        return outcome_from_json(self.outcome)

    @property
    def kind(self) -> str:
        """The outcome's name: "passed", "wrong", ..."""
        return str(self.outcome["kind"])


@functools.cache
def _types() -> dict[str, tuple[type, ...]]:
    """The classes that each field's value may have, as it is annotated; a float may be whole."""
    found = {}
    for name, hint in get_type_hints(Record).items():
        options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        classes = tuple(get_origin(option) or option for option in options)
        found[name] = (*classes, int) if float in classes else classes
    return found


def _check_types(record: Record) -> None:
    """Raise TypeError for a field whose value is of another class than its annotation's."""
    for name, classes in _types().items():
        if not isinstance(value := getattr(record, name), classes):
            raise TypeError(f"{name} is {value!r:.80}, due is {' or '.join(cls.__name__ for cls in classes)}")


def _check_shape(shape: dict[str, Any]) -> None:
    """Raise TypeError for a shape that lacks some sizes; one that has none is an item's without a case."""
    if lacking := [name for name in SHAPE if shape and name not in shape]:
        raise TypeError(f"shape lacks {', '.join(lacking)}")


def shape_of(case: "Case") -> dict[str, Any]:
    """The sizes of a case, as a record's `shape` holds them; `blocks` says the size and density of a block mask's blocks."""
    sizes = {name: getattr(case, name) for name in SHAPE}
    density = getattr(getattr(case.mask, "block_map", None), "density", None)
    if density is not None:
        sizes["blocks"] = f"{getattr(case.mask, 'blocks_text', 'variable')} at {density:g}"
    return sizes


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
