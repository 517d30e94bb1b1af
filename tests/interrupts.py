"""SIGINT in tests that may have been started in the background, where a shell has their process ignore it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let what is started here heed SIGINT as at a terminal: what a shell starts in the background ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
