"""The writer of JSON Lines: one system call a line, so that a killed run keeps every record that it had."""

import errno
import os
import tempfile
from pathlib import Path

from pytest_longca.report.record import Record


class Writer:
    """Appends records to a file, one `write` on an O_APPEND descriptor for each, so lines of several writers never mix.

    Where the path cannot be written, records go to a fallback file and `notice` says where: a run of hours is not lost to a typo.
    """

    def __init__(self, path: str | Path) -> None:
        self.wanted = Path(path)
        self.path = self.wanted
        self.notice: str | None = None
        self.count = 0
        try:
            self._descriptor = _open(self.wanted)
        except OSError as error:
            self._fall_back(error)

    def write(self, record: Record) -> None:
        """Append one record; if the file stops taking data, go on in the fallback file."""
        line = (record.to_line() + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written: the disk is full")
        except OSError as error:
            if self.notice is not None:
                raise
            os.close(self._descriptor)
            self._fall_back(error)
            os.write(self._descriptor, line)
        self.count += 1

    def close(self) -> None:
        """Close the file; safe to call twice. A fallback file that got no record goes away."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self.notice and not self.path.stat().st_size:
                self.path.unlink()

    def _fall_back(self, error: OSError) -> None:
        self._descriptor, name = tempfile.mkstemp(prefix="longca-records-", suffix=".jsonl")
        self.path = Path(name)
        self.notice = f"records: {self.wanted} cannot be written ({error.strerror}); from here on they are in {self.path}"


def is_writable(path: str | Path) -> bool:
    """Whether records can be appended to the file. One that was not there is not left there."""
    is_new = not os.path.lexists(path)
    try:
        os.close(_open(Path(path)))
    except OSError:
        return False
    if is_new:
        os.unlink(path)
    return True


def _open(path: Path) -> int:
    """An append descriptor on `path`. If the last line lacks its newline (a killed writer's), it gets one first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
