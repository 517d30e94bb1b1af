"""Processes that run somebody's kernels and may die: how they start, what they print, how they end."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HEAD_AND_TAIL = 2000

LOOK_S = 1.0
"""How long a signal may go unnoticed."""


def start(target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """A running child of the fork server that runs `target(*arguments)` and is killed with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest_longca.preload"])
    with _bare_main(), _python_path():
        process = context.Process(target=target, args=arguments, daemon=True)
        process.start()
    return process


def settle(log: str, path: Sequence[str]) -> None:
    """The first thing a child does: a process group of its own, prints to `log`, modules found on `path`."""
    from pytest_longca.preload import die_with_parent

    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A daemon may not have children, and a kernel may want some: whatever it starts is in this group and ends with it.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # no public way
    _redirect(log)
    sys.path[:] = path
    choose_triton_mode()


def choose_triton_mode() -> None:
    """Make Triton interpret its kernels where there is no GPU; must come before `import triton`."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def send(connection: Connection, answer: dict[str, Any]) -> None:
    """Send an answer as JSON."""
    connection.send_bytes(json.dumps(answer).encode())


def wait_for(objects: Sequence[Any], timeout_s: float) -> list[Any]:
    """Those of the connections and sentinels that are ready, as `multiprocessing.connection.wait` gives them; none after `timeout_s`.

    A signal that comes between Python's last look for signals and the system call does not end the call: Ctrl-C would go unnoticed for as
    long as a kernel hangs. So it is called again and again.
    """
    end = time.monotonic() + timeout_s
    while True:
        left = end - time.monotonic()
        ready = wait(objects, max(0.0, min(left, LOOK_S)))
        if ready or left <= LOOK_S:
            return ready


def kill_group(process: Any) -> None:
    """Kill a child and whatever it started, and wait for its end."""
    signal_group(process)
    process.join(5)


def signal_group(process: Any) -> None:
    """Kill a child and whatever it started, without a wait."""
    for kill in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
        try:
            kill()
        except (ProcessLookupError, PermissionError):
            continue


def how_it_ended(exit_code: int | None) -> str:
    """What became of a child, in words."""
    if exit_code is None:
        return "closed its connection"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"exited with status {exit_code}"


def head_and_tail(path: Path) -> str:
    """A log, without its middle if it is long."""
    return shortened(path.read_text(errors="replace"))


def shortened(text: str) -> str:
    """A text, without its middle if it is long."""
    return text if len(text) <= 2 * HEAD_AND_TAIL else f"{text[:HEAD_AND_TAIL]}\n[...]\n{text[-HEAD_AND_TAIL:]}"


def _redirect(log: str) -> None:
    """Point stdin at nothing, stdout and stderr at the child's own log: a kernel's prints must not reach the terminal or the pipe."""
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import faulthandler

    faulthandler.enable(file=2, all_threads=False)


_main_lock = threading.Lock()


@contextmanager
def _bare_main() -> Iterator[None]:
    """Hide `__main__` while a child starts: multiprocessing would import pytest's entry script again in the child."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _python_path() -> Iterator[None]:
    """Let the fork server find what this process finds: before Python 3.12 its preload ignores sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
