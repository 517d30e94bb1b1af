"""The gate's options of the run that made the records: what an offline comparison must be given to answer as that run did."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_longca.errors import InvalidArgument
from pytest_longca.options import limit, verdicts
from pytest_longca.report.record import Record

PARSERS: dict[str, Callable[[str], Any]] = {
    "fail-slower": limit,
    "fail-memory": limit,
    "fail-error": limit,
    "anchor": str,
    "allow": verdicts,
    "forbid": verdicts,
}
"""Options that both gates have, under `--longca-` in a run."""


def options_to_repeat(records: Sequence[Record], used: Mapping[str, Any]) -> list[str]:
    """One line that names the options in which the newest run's command line differs from the values in use; else none.

    What a run had from an ini file is in no record, so nothing is taken over silently.
    """
    command = next((record.command for record in reversed(records) if record.command), None)
    differing = [f"--{name} {shlex.quote(text)}" for name, text in gate_options(command or "").items() if not _is_used(name, text, used)]
    return [f"the run itself was gated with other options; to repeat them: {' '.join(differing)}"] if differing else []


def gate_options(command: str) -> dict[str, str]:
    """The gate's options on a command line, by name without `--longca-`; the last of several counts.

    >>> gate_options("pytest --longca-fail-slower=10% --longca-anchor sdpa")
    {'fail-slower': '10%', 'anchor': 'sdpa'}
    """
    found: dict[str, str] = {}
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--longca-")
        if name != option and name in PARSERS:
            found[name] = value if equals else following
    return found


def _is_used(name: str, text: str, used: Mapping[str, Any]) -> bool:
    try:
        return bool(PARSERS[name](text) == used[name.replace("-", "_")])
    except InvalidArgument:  # a record of another version: say what it had, and let the reader judge
        return False
