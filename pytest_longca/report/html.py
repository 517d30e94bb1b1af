"""The report: one self-contained page that works offline. A pure function of records, a comparison and pictures."""

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from pytest_longca import __version__
from pytest_longca.errors import InvalidArgument
from pytest_longca.report.appendix import Appendix
from pytest_longca.report.gallery import Picture
from pytest_longca.report.record import Record
from pytest_longca.report.verdict import Comparison
from pytest_longca.report.view import view

# Inside <script> only `<` can end the element, and JSON needs none of these characters outside strings.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_report(
    records: Sequence[Record],
    comparison: Comparison | None = None,
    pictures: Iterable[Picture] = (),
    title: str = "Attention kernels",
    appendix: Appendix | None = None,
) -> str:
    """The page as text. Raises InvalidArgument if jinja2 is not installed."""
    from markupsafe import Markup

    data = embed(view(records, comparison, pictures))
    return str(
        _template().render(
            title=title,
            version=__version__,
            # The package's own files and escaped JSON: the only values that are not autoescaped.
            style=Markup(_text("page.css")),
            script=Markup(_text("page.js")),
            data=Markup(data),
            environment=environment(records),
            num_records=len(records),
            appendix=appendix,
        )
    )


def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise InvalidArgument("the HTML report needs jinja2, which is not installed: pip install 'pytest-longca[report]'") from None
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_text("page.html"))


def _text(name: str) -> str:
    return (files("pytest_longca.report") / "templates" / name).read_text(encoding="utf-8")


def embed(value: Any) -> str:
    """JSON that can stand inside a <script> element, whatever the strings in it are."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def environment(records: Iterable[Record]) -> list[tuple[str, str]]:
    """What the records were made with, one line for each thing, several values where they differ."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        pairs = [("device", record.device), ("commit", record.commit), ("command", record.command), *record.versions.items()]
        pairs += [(f"measured {name}", f"{value:.4g}") for name, value in record.peaks.items()]
        for name, value in pairs:
            if value:
                found.setdefault(name, {})[value] = None
    return [(name, ", ".join(values)) for name, values in found.items()]
