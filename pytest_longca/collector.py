"""What the reporting process does with results: it gathers records, writes them as they come, and ends the run."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca.launched import is_silent
from pytest_longca.options import Options
from pytest_longca.progress import Progress

if TYPE_CHECKING:
    from pytest_longca.mask import Mask
    from pytest_longca.report.record import Record
    from pytest_longca.report.writer import Writer

PROPERTY = "longca_record"
RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
FAILED = frozenset({"wrong", "crashed", "timed_out"})
ELSEWHERE = 2
"""The exit status of a run without a failure whose records are not where they were wanted, as for a report that cannot be written."""


class Collector:
    """Records arrive on test reports (also from xdist workers); one that was seen is on disk before the next test starts.

    `earlier` are the records of the run that is resumed: they count in the summary, the reports and the gate as if they were new.
    """

    def __init__(self, options: Options, arguments: Sequence[Any], earlier: "Sequence[Record]" = ()) -> None:
        self._options = options
        self._command = shlex.join(["pytest", *map(str, arguments)])
        self._path = None if is_silent(options) else options.json or options.resume
        self._writer: Writer | None = None
        self._lines: list[str] = []
        self.earlier = list(earlier)
        self.records: list[Record] = []
        self._progress = Progress(bool(options.selftest))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Say first, and not after hours, that records will not be where they were wanted; the run goes on and is not green.

        Where nothing was typed there may be no records at all.
        """
        if not self._path or not self._options.typed or session.config.option.collectonly:
            return
        from pytest_longca.report.writer import Writer, is_writable

        if not is_writable(self._path):
            self._writer = Writer(self._path)
            if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
                reporter.write_line(self._writer.notice or "", yellow=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kept: list[Any] = [value for name, value in report.user_properties if name == PROPERTY] if report.when == "teardown" else []
        self._progress.add(report, kept)
        for fields in kept:
            self._keep(fields)

    def _keep(self, fields: dict[str, Any]) -> None:
        from pytest_longca.report.record import Record
        from pytest_longca.report.writer import Writer

        self.records.append(dataclasses.replace(Record(**fields), command=self._command))
        if self._path:
            self._writer = self._writer or Writer(self._path)
            self._writer.write(self.records[-1])

    def _all(self) -> "list[Record]":
        from pytest_longca.report.series import settled

        return settled([*self.earlier, *self.records])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from pytest_longca.plugin import is_asked

        # An ini file's baseline or preset is nothing to a run without our tests, and nobody asked for the report of a mistake.
        is_mistake = session.exitstatus == pytest.ExitCode.USAGE_ERROR
        if not self.records and (is_mistake or not is_asked(session.config)):
            self.earlier.clear()
            return
        found = self.records or self.earlier or self._progress.num_left
        if session.config.option.collectonly or not (found or self._options.baseline or self._options.preset_values.table):
            return
        from pytest_longca.closing import close

        is_complete = session.exitstatus in RAN and not (session.shouldstop or session.shouldfail)
        closing = close(self._all(), self._options, is_complete, self._masks(session.config), self.records)
        self._lines += self._progress.lines(self._options.resume is not None) if is_complete else []
        self._lines += closing.lines
        if session.exitstatus in RAN and session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            is_elsewhere = self._writer is not None and self._writer.notice is not None
            session.exitstatus = self._exit_status(session.exitstatus, closing.exit_code or (ELSEWHERE if is_elsewhere else 0))

    def _exit_status(self, before: int | pytest.ExitCode, of_closing: int) -> int | pytest.ExitCode:
        """Red if the gate is, if nothing fitted into the budget, or an earlier record is; else green if a run was resumed, or as it was."""
        if of_closing:
            return of_closing
        if self._progress.is_stuck:
            return pytest.ExitCode.NO_TESTS_COLLECTED
        if any(record.kind in FAILED for record in self.earlier):
            return pytest.ExitCode.TESTS_FAILED
        return pytest.ExitCode.OK if self.earlier else before

    def _masks(self, config: pytest.Config) -> "Mapping[str, type[Mask]] | None":
        """The masks by name, third parties' included, for their pictures in the page."""
        from pytest_longca.plugin import session_of

        return session_of(config).catalogue.masks() if self._options.html else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter", exitstatus: int) -> None:
        records = self._all() if self.records or self.earlier else []
        if not records and not self._lines:
            return
        from pytest_longca.report.terminal import render

        terminalreporter.section("longca")
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            terminalreporter.write_line("interrupted: this is what ran before", yellow=True)
        terminalreporter.write_line(render(records, terminalreporter._tw.fullwidth, terminalreporter.hasmarkup))
        if self._writer:
            terminalreporter.write_line(self._writer.notice or f"records: {self._writer.path}")
            self._writer.close()
        for line in self._lines:
            terminalreporter.write_line(line)
