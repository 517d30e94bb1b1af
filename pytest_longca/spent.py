"""What time is spent on beside the harness: the kernels (with planning and compiling), and the reference. Each process counts its own."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

KERNELS, REFERENCE = "kernels", "reference"
TIME = "time_s"
"""The name that answers and records carry the seconds under."""

_seconds: dict[str, float] = {}


def spend(what: str, seconds: float) -> None:
    """Count seconds as spent on one of the two."""
    add(_seconds, {what: seconds})


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add seconds to a total."""
    for what, seconds in more.items():
        total[what] = total.get(what, 0.0) + seconds


@contextmanager
def spending(what: str) -> Iterator[None]:
    """Count what happens inside. Whoever queues work on a device waits for it inside."""
    began = time.perf_counter()
    try:
        yield
    finally:
        spend(what, time.perf_counter() - began)


def taken() -> dict[str, float]:
    """The seconds that were counted since the last call."""
    found = dict(_seconds)
    _seconds.clear()
    return found


def shares(spent: Mapping[str, float], seconds: float) -> str:
    """Where the seconds of a session went, in words.

    >>> shares({"kernels": 60.0, "reference": 30.0}, 100.0)
    'time: 100 s; kernels 60 %, reference 30 %, the harness itself 10 %'
    """
    parts = [f"{what} {spent.get(what, 0.0) / seconds:.0%}" for what in (KERNELS, REFERENCE)]
    own = max(0.0, 1 - sum(spent.values()) / seconds)
    return f"time: {seconds:.0f} s; {', '.join(parts)}, the harness itself {own:.0%}".replace("%", " %")
