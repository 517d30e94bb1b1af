"""Files of records: read strictly, written whole or line by line."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pytest_longca.errors import InvalidArgument
from pytest_longca.report.record import Record
from pytest_longca.report.series import settled


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, in order, without postponed items that were run later.

    Raises InvalidArgument, with file and line, on anything that is no record.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"{path}: cannot be read ({why}); name a file that --longca-json wrote") from None
    records = [_record(path, number, line, last=number == len(lines)) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise InvalidArgument(f"{path}: holds no records; name a file that --longca-json wrote")
    return settled(records)


def _record(path: str | Path, number: int, line: str, last: bool) -> Record:
    try:
        return Record.from_line(line)
    except InvalidArgument as error:
        hint = "; if its writer was killed, delete this last line and the rest is good" if last and not line.endswith("}") else ""
        raise InvalidArgument(f"{path}, line {number}: {error}{hint}") from None


def write_atomically(path: str | Path, text: str) -> None:
    """Write a whole file or nothing: a reader sees the old content or the new one. Raises InvalidArgument if it cannot."""
    path = Path(path)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be written ({error.strerror}); name a file in a folder that exists and is yours") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InvalidArgument(f"{path}: cannot be written ({error.strerror}); nothing was changed") from None


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Write a whole file of records atomically: a baseline."""
    write_atomically(path, "".join(record.to_line() + "\n" for record in records))


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
