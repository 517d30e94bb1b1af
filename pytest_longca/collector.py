"""What the reporting process does with results: it gathers records, writes them as they come, and prints the closing part."""

from typing import TYPE_CHECKING

import pytest

from pytest_longca.options import Options

if TYPE_CHECKING:
    from pytest_longca.report.record import Record
    from pytest_longca.report.writer import Writer

PROPERTY = "longca_record"


class Collector:
    """Records arrive on test reports (also from xdist workers); one that was seen is on disk before the next test starts."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._writer: Writer | None = None
        self.records: list[Record] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    self._keep(value)

    def _keep(self, fields: object) -> None:
        from pytest_longca.report.record import Record
        from pytest_longca.report.writer import Writer

        assert isinstance(fields, dict)
        self.records.append(Record(**fields))
        if self._options.json:
            self._writer = self._writer or Writer(self._options.json)
            self._writer.write(self.records[-1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.records:
            return
        from pytest_longca.report.terminal import render

        terminalreporter.section("longca")
        terminalreporter.write_line(render(self.records, terminalreporter._tw.fullwidth, terminalreporter.hasmarkup))
        if self._writer:
            terminalreporter.write_line(self._writer.notice or f"records: {self._writer.path}")
            self._writer.close()
