"""The files that are made of records: the page and the Markdown summary, each whole or not at all."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_longca.report.appendix import Appendix
from pytest_longca.report.record import Record
from pytest_longca.report.store import write_atomically
from pytest_longca.report.verdict import Comparison

if TYPE_CHECKING:
    from pytest_longca.mask import Mask


def write_reports(
    records: Sequence[Record],
    comparison: Comparison | None,
    page: str | None,
    summary: str | None,
    masks: "Mapping[str, type[Mask]] | None" = None,
    appendix: Appendix | None = None,
) -> None:
    """Write the page and the summary, as far as there are paths for them. Raises InvalidArgument if one cannot be written."""
    if page:
        from pytest_longca.report.gallery import gallery
        from pytest_longca.report.html import html_report

        write_atomically(page, html_report(records, comparison, gallery(records, masks), appendix=appendix))
    if summary:
        from pytest_longca.report.markdown import markdown

        write_atomically(summary, markdown(records, comparison, appendix))
