"""Everything that pytest-longca raises on purpose."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_longca.outcome import Outcome


class LongcaError(Exception):
    """Base of every error that pytest-longca raises on purpose."""


class InvalidArgument(LongcaError, ValueError):
    """An option, an id or a parameter that cannot be right, found before anything ran."""


class DidNotRun(LongcaError):
    """A case ended without a verdict; `outcome` says how (unsupported, out of memory, crashed, ...)."""

    def __init__(self, outcome: "Outcome") -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class CheckFailed(LongcaError, AssertionError):
    """A kernel's result is wrong."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InvalidArgument:
    """An error for a name that does not exist, with the closest ones that do.

    >>> str(unknown_name("mask", "casual", ["causal", "full"]))
    "unknown mask 'casual': did you mean 'causal'? Known masks: causal, full"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" did you mean {' or '.join(map(repr, close))}?" if close else ""
    kinds = f"{kind}es" if kind.endswith("s") else f"{kind}s"
    return InvalidArgument(f"unknown {kind} {name!r}:{hint} Known {kinds}: {', '.join(known)}")
