"""Device times handed to pytest-benchmark: a timer that replays samples which were taken elsewhere."""

from collections import deque
from collections.abc import Sequence
from typing import Any

_stamps: deque[float] = deque()


def replayed_device_time() -> float:
    """pytest-benchmark's timer: the next stamp, in seconds; a start and an end for each sample."""
    return _stamps.popleft() if _stamps else 0.0


def replay(benchmark: Any, samples_ms: Sequence[float]) -> None:
    """Give the samples to a `benchmark` fixture as its rounds, exactly.

    Every pair starts at 0, so no rounding of a running sum gets into a sample.
    """
    _stamps.clear()
    for sample in samples_ms:
        _stamps.extend((0.0, sample / 1e3))
    benchmark.pedantic(_nothing, rounds=len(samples_ms), iterations=1, warmup_rounds=0)
    _stamps.clear()


def decline(benchmark: Any) -> None:
    """Leave a `benchmark` fixture without a result: it is used, so that it does not complain, and keeps nothing."""
    benchmark.disabled = True
    benchmark.pedantic(_nothing)


def _nothing() -> None:
    """What pytest-benchmark calls between two stamps."""
