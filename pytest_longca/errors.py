"""Everything that pytest-longca raises on purpose."""

import difflib
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pytest_longca.outcome import Outcome

T = TypeVar("T")


class LongcaError(Exception):
    """Base of every error that pytest-longca raises on purpose."""


class InvalidArgument(LongcaError, ValueError):
    """An option, an id or a parameter that cannot be right, found before anything ran."""


class InvalidMask(InvalidArgument):
    """A mask whose predicate raises, or gives what is no mask: nothing can be judged on it."""


class DidNotRun(LongcaError):
    """A case ended without a verdict; `outcome` says how (unsupported, out of memory, crashed, ...)."""

    def __init__(self, outcome: "Outcome") -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class CheckFailed(LongcaError, AssertionError):
    """A kernel's result is wrong."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or that it cannot say it: its class may be a kernel's own."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"its text raises {type(failure).__name__}"
    return text.strip().split("\n", 1)[0]


def asked(who: str, ask: Callable[[], T]) -> T:
    """What a third party's code answers before anything runs. Raises InvalidArgument, with who, what and where, if it raises anything."""
    try:
        return ask()
    except KeyboardInterrupt:  # the user's, who wants the run to end
        raise
    except BaseException as error:
        raise InvalidArgument(raised(who, error)) from error


def raised(who: str, error: BaseException) -> str:
    """That a third party's code raised, what and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{who} raised {type(error).__name__}: {first_line(error)} ({frame.name}, line {frame.lineno} of {frame.filename})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on the device."""
    import torch

    # torch's host allocator raises a plain RuntimeError: its text is all there is.
    is_host = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    return is_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


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
