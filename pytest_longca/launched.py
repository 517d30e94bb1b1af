"""What others do to a session: torchrun starts it on every rank, all but rank 0 silent, and a signal ends it. Imports no torch."""

import dataclasses
import io
import os
import signal
import threading
from collections.abc import Callable

import pytest
from _pytest.terminal import TerminalReporter  # which `pytest` has since 8.4

from pytest_longca.options import Options

FILES = ("json", "html", "md", "baseline")


def launched_size() -> int | None:
    """How many ranks torchrun started, None without it."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None


def is_silent(options: Options) -> bool:
    """Whether rank 0 reports what this session finds, and this is another rank."""
    return bool(options.chosen("mechanisms", "cpu")) and launched_size() is not None and os.environ["RANK"] != "0"


def muted(options: Options) -> Options:
    """The options of a silent rank: the same cells, no files of its own; records to resume from choose cells, so they are read."""
    return dataclasses.replace(options, values=options.values | dict.fromkeys(FILES))


def agreement(options: Options) -> str:
    """What must be the same on every rank, or they would run different cells and wait for each other."""
    return repr({name: sorted(value) if isinstance(value, frozenset) else value for name, value in muted(options).values.items()})


def interrupted_by_sigterm() -> Callable[[], None]:
    """Let the first SIGTERM, of a `timeout` or a cluster's end, interrupt pytest as Ctrl-C does, with summary, page and no litter.

    Gives the function that puts the old handler back, as the first SIGTERM does too. Elsewhere than in the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.getsignal(signal.SIGTERM)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)

    def interrupt(number: int, frame: object) -> None:
        restore()
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, interrupt)
    return restore


class Silence:
    """A plugin that keeps a silent rank's terminal output to itself."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter:
            reporter._tw = TerminalReporter(session.config, io.StringIO())._tw
