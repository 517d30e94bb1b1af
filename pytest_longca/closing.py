"""The end of a run: the gate, the page and the summary, from the records alone."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_longca.catalogue import load
from pytest_longca.errors import InvalidArgument
from pytest_longca.options import Options
from pytest_longca.report.appendix import Appendix
from pytest_longca.report.baseline import gate, read_baseline
from pytest_longca.report.output import write_reports
from pytest_longca.report.record import Record
from pytest_longca.report.series import is_postponed
from pytest_longca.report.verdict import Comparison, Limits, counted

if TYPE_CHECKING:
    from pytest_longca.mask import Mask

BASELINE_PROCESSES = Limits().processes
"""How many processes time each case when there is no baseline yet."""
COMPARED_PROCESSES = 2
"""How many processes time each case when there is one: the gate looks twice."""


@dataclass
class Closing:
    """What is said at the end, the exit status (0, 1, 2), and the comparison if there was one."""

    lines: list[str] = field(default_factory=list)
    exit_code: int = 0
    comparison: Comparison | None = None


def close(
    records: Sequence[Record],
    options: Options,
    is_complete: bool,
    masks: "Mapping[str, type[Mask]] | None" = None,
    own: Sequence[Record] | None = None,
) -> Closing:
    """Compare with the baseline (or write it) and write the reports. Nothing raises: what cannot be done is said, and is not green.

    `own` are the records that the run made itself; all, if None.
    """
    closing = Closing()
    appendix = _appendix(records, options)
    if appendix:
        closing.lines += [appendix.title, *appendix.lines]
    if options.baseline:
        _gate(closing, records, options, is_complete, records if own is None else own)
    for page, summary in ((options.html, None), (None, options.md)):
        if records and (path := page or summary):
            try:
                write_reports(records, closing.comparison, page, summary, masks, appendix)
            except InvalidArgument as error:
                closing.lines.append(f"report: {error}")
                closing.exit_code = closing.exit_code or 2
            else:
                closing.lines.append(f"report: {path}")
    return closing


def _appendix(records: Sequence[Record], options: Options) -> Appendix | None:
    """The preset's own table."""
    if not options.preset_values.table:
        return None
    found: Appendix = load(options.preset_values.table)(records)
    return found


def _gate(closing: Closing, records: Sequence[Record], options: Options, is_complete: bool, own: Sequence[Record]) -> None:
    if reason := _why_no_gate(records, options, is_complete):
        closing.lines.append(f"gate: {reason}")
        closing.exit_code = 2
        return
    is_part = len(own) < len(records) or any(is_postponed(record) for record in own)
    policy = (options.allow or frozenset(), options.forbid or frozenset())
    try:
        found = gate(options.baseline, records, _limits(options), options.anchor, *policy, own=own if is_part else None)
    except InvalidArgument as error:
        closing.lines.append(f"gate: {error}")
        closing.exit_code = 2
        return
    closing.lines += [f"gate: {line}" for line in found.text.splitlines()]
    closing.exit_code, closing.comparison = found.exit_code, found.comparison


def _limits(options: Options) -> Limits:
    return Limits(slower=options.fail_slower, memory=options.fail_memory, error=options.fail_error)


def _why_no_gate(records: Sequence[Record], options: Options, is_complete: bool) -> str | None:
    if not records:
        return "no results, so nothing was compared and no baseline was written"
    if not is_complete:
        return "the run was cut short, so nothing was compared and no baseline was written"
    postponed = sum(is_postponed(record) for record in records)
    if postponed and not Path(options.baseline).exists():
        were_outside = f"{counted(postponed, 'item')} {'was' if postponed == 1 else 'were'} outside the budget"
        return f"{were_outside}, so no baseline was written: go on with --longca-resume"
    return None


def check_paths(options: Options) -> None:
    """Raise InvalidArgument for a report that cannot be written or a file that cannot be read, before anything runs."""
    import importlib.util

    if options.html and importlib.util.find_spec("jinja2") is None:
        raise InvalidArgument("--longca-html needs jinja2, which is not installed: pip install 'pytest-longca[report]'")
    for name in ("html", "md", "baseline"):
        if path := options.values[name]:
            _check_file(name, Path(path).absolute())
    if options.baseline:
        _check_baseline(options)
    if options.repro:
        folder = Path(options.repro).absolute()  # made with the first failure, in the last of its parents that exists
        _try_folder("repro", options.repro, next(place for place in (folder, *folder.parents) if place.exists()))


def _check_baseline(options: Options) -> None:
    """Raise InvalidArgument for a baseline that the run would write into, or that could gate nothing."""
    for name in ("json", "resume", "html", "md"):
        if (path := options.values[name]) and _is_one_file(path, options.baseline):
            raise InvalidArgument(f"--longca-{name}: {path} is the baseline, which is only read: name another file")
    if not Path(options.baseline).exists():
        return
    try:
        read_baseline(options.baseline, _limits(options), options.anchor)
    except InvalidArgument as error:
        raise InvalidArgument(f"--longca-baseline: {error}") from None


def _is_one_file(one: str, other: str) -> bool:
    if os.path.exists(one) and os.path.exists(other):  # a hard link is the same file too
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def check_anchor(options: Options, kernels: Sequence[str]) -> None:
    """Raise InvalidArgument where times are gated as ratios to the anchor, and it is the only kernel that a run times."""
    times_nothing = options.case is not None or options.mechanisms or options.selftest
    if options.baseline and options.fail_slower is not None and set(kernels) == {options.anchor} and not times_nothing:
        raise InvalidArgument(
            f"--longca-anchor: {options.anchor} is the only kernel of this run, so no time could be gated: name another anchor, or none"
        )


def _check_file(name: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise InvalidArgument(f"--longca-{name}: the folder of {path} does not exist: make it, or name another file")
    if name != "baseline" or not path.exists():  # a baseline that exists is only read
        _try_folder(name, path, path.parent)


def _try_folder(name: str, path: str | Path, folder: Path) -> None:
    """Raise InvalidArgument unless a file can be made in the folder: permissions alone do not tell, /proc takes none from anybody."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidArgument(f"--longca-{name}: {path} cannot be written ({error.strerror}): name a place that can") from None
