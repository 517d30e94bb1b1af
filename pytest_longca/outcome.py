"""What became of a case: one closed list, used by errors, records and reports alike."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True)
class _Base:
    """An outcome is a value; its `kind` is its name in records, its text is for people."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON values, `kind` first."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Passed(_Base):
    """Every check that ran agrees with the reference."""

    kind: ClassVar[str] = "passed"

    def __str__(self) -> str:
        return "passed"


@dataclass(frozen=True, slots=True)
class Wrong(_Base):
    """A check and the kernel disagree. `reproducible` is None until the case was run again."""

    reason: str
    reproducible: bool | None = None
    kind: ClassVar[str] = "wrong"

    def __str__(self) -> str:
        return f"wrong: {self.reason}" if self.reproducible is not False else f"wrong (not reproducible): {self.reason}"


@dataclass(frozen=True, slots=True)
class KnownWrong(_Base):
    """Wrong in the way that a known-failures entry describes."""

    reason: str
    entry: str
    kind: ClassVar[str] = "known_wrong"

    def __str__(self) -> str:
        return f"known to be wrong ({self.entry}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Unsupported(_Base):
    """The kernel declares, or says when asked, that it does not do this case."""

    reason: str
    kind: ClassVar[str] = "unsupported"

    def __str__(self) -> str:
        return f"unsupported: {self.reason}"


@dataclass(frozen=True, slots=True)
class NotInstalled(_Base):
    """The kernel's package is missing; `how` is the way to install it."""

    reason: str
    how: str
    kind: ClassVar[str] = "not_installed"

    def __str__(self) -> str:
        return f"not installed: {self.reason} ({self.how})"


@dataclass(frozen=True, slots=True)
class OutOfMemory(_Base):
    """An allocation failed, on the host or on the device. Bytes are None where the backend does not tell."""

    reason: str
    wanted_bytes: int | None = None
    free_bytes: int | None = None
    kind: ClassVar[str] = "out_of_memory"

    def __str__(self) -> str:
        return f"out of memory: {self.reason}"

    @classmethod
    def above_limit(cls, needed: int, limit: int) -> Self:
        """A case that would not fit a device of --longca-memory-limit."""
        return cls(f"needs {needed / 1e9:.3g} GB, above --longca-memory-limit={limit / 1e9:.3g}GB", needed, limit)


@dataclass(frozen=True, slots=True)
class Crashed(_Base):
    """The process that ran the kernel died, or the kernel raised something that is no refusal."""

    reason: str
    stderr: str = ""
    kind: ClassVar[str] = "crashed"

    def __str__(self) -> str:
        return f"crashed: {self.reason}"


@dataclass(frozen=True, slots=True)
class TimedOut(_Base):
    """The kernel did not come back within its time."""

    reason: str
    kind: ClassVar[str] = "timed_out"

    def __str__(self) -> str:
        return f"timed out: {self.reason}"


@dataclass(frozen=True, slots=True)
class NotVerified(_Base):
    """Nothing was judged, for the reason given: not a pass. `is_postponed` says that only time ran out: a resumed run judges it."""

    reason: str
    is_postponed: bool = False
    kind: ClassVar[str] = "not_verified"

    def __str__(self) -> str:
        return f"not verified: {self.reason}"


Outcome = Passed | Wrong | KnownWrong | Unsupported | NotInstalled | OutOfMemory | Crashed | TimedOut | NotVerified

OUTCOMES: dict[str, type[_Base]] = {
    cls.kind: cls for cls in (Passed, Wrong, KnownWrong, Unsupported, NotInstalled, OutOfMemory, Crashed, TimedOut, NotVerified)
}


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """The outcome that `to_json` wrote; KeyError or TypeError if it is none."""
    fields = dict(data)
    return OUTCOMES[fields.pop("kind")].from_fields(fields)  # type: ignore[return-value]  # the table holds the union's members
