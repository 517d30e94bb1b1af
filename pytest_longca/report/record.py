"""Record: everything that one item found, as one line of JSON. Terminal, HTML and gate are pure functions of records."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from pytest_longca.errors import InvalidArgument

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one item (a kernel on a mask, in one stage) found.

    Times are `_ms`, sizes `_bytes`; absent is None, never a number that means a word.

    `stage` is "probes", "examples", "case", "timing" or "parallel". `outcome` is an Outcome's `to_json()`.
    `verdicts` are one dict for each judged tensor: tensor, error_over_limit, and the case it was worst on.
    `samples_ms` are the device times of single calls; `clocks` is the GPU's state around them.
    """

    stage: str
    kernel: str
    mask: str
    outcome: dict[str, Any]
    reason: str = ""
    case: str | None = None
    mechanism: str | None = None
    direction: str | None = None
    num_examples: int | None = None
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    samples_ms: list[float] | None = None
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
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    replay: str | None = None
    schema: int = SCHEMA

    def to_line(self) -> str:
        """One line of strict JSON (no NaN; infinities as strings), without the newline."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> "Record":
        """The record of a line. Raises InvalidArgument if it is no record, or one of another schema."""
        try:
            data = json.loads(line)
            schema = data["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"not a record: {line[:80]!r} ({error}); records are written by --longca-json") from None
        if schema != SCHEMA:
            raise InvalidArgument(f"a record of schema {schema}; this version reads schema {SCHEMA}: make the file again with this version")
        try:
            return cls(**data)
        except TypeError as error:
            raise InvalidArgument(f"not a record: {error}; records are written by --longca-json") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
