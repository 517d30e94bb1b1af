"""Imported once by the server that workers are forked from: the slow imports, and no operation that would start threads."""

import ctypes
import importlib
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed pytest leaves nothing behind. Linux only."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):  # not Linux
        return


die_with_parent()
torch = importlib.import_module("torch")
