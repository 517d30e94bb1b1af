"""Appendix: a table of text that a preset adds to the end of the summary, the page and the Markdown."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Appendix:
    """A title, and lines that are shown as they are, in columns."""

    title: str
    lines: tuple[str, ...]
