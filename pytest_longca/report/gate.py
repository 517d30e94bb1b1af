"""The gate's answer as text: what fails, what is shown and does not, and how many cases are fine."""

from collections import Counter
from collections.abc import Iterable

from pytest_longca.report.verdict import MEANING, REGRESSIONS, UNCOMPARED, UNTOLD, Comparison, Finding, Row, Verdict, counted, percent


def render_comparison(comparison: Comparison) -> str:
    """The comparison for a terminal: one line for each finding that is not fine, then the counts and the conclusion."""
    lines = [_line("run", finding, comparison) for finding in comparison.run]
    lines += [_line(str(row.key), finding, comparison) for row in by_gravity(comparison) for finding in row.findings if _is_told(finding)]
    return "\n".join([*lines, *count_lines(comparison), basis(comparison), conclusion(comparison)])


def basis(comparison: Comparison) -> str:
    """What the answer rests on: the limits, and what a change of time is a change of."""
    limits = comparison.limits
    named = {"slower": limits.slower, "memory": limits.memory, "error": limits.error}
    text = ", ".join(f"{name} {'off' if limit is None else percent(limit)}" for name, limit in named.items())
    times = (
        f"changes of time are of ratios to {comparison.anchor} in the same run"
        if comparison.anchor
        else "times are absolute, without an anchor"
    )
    return f"limits: {text}; {times}"


def by_gravity(comparison: Comparison) -> list[Row]:
    """The rows, the gravest verdict first."""
    order = list(Verdict)
    return sorted(comparison.rows, key=lambda row: (order.index(row.verdict), row.key))


def count_lines(comparison: Comparison) -> list[str]:
    """How many cases got each verdict, and what the verdict means."""
    counts = Counter(row.verdict for row in comparison.rows)
    return [f"{counts[verdict]:5d} {verdict:15s} {MEANING[verdict]}" for verdict in Verdict if counts[verdict]]


def conclusion(comparison: Comparison) -> str:
    """The exit status in words."""
    failing = [verdict for verdict in Verdict if verdict in set(comparison.verdicts) - comparison.allowed]
    if comparison.exit_code == 2 and not failing:
        return _nothing_gated(comparison)
    text = {
        0: "no regression",
        1: f"REGRESSED ({_names(verdict for verdict in failing if verdict in REGRESSIONS)})",
        2: f"NOT COMPARABLE ({_names(failing)})",
    }
    return f"{text[comparison.exit_code]}: {_coverage(comparison)}"


def _coverage(comparison: Comparison) -> str:
    """How many cases were compared, and what became of the others."""
    others = Counter(row.verdict for row in comparison.rows if row.verdict in UNCOMPARED)
    compared = [row for row in comparison.rows if row.verdict not in UNCOMPARED]
    partly = [{finding.verdict for finding in row.findings} & UNTOLD for row in compared]
    why = _names(verdict for verdict in Verdict if any(verdict in found for found in partly))
    in_part = f", {sum(map(bool, partly))} of them not in full ({why})" if why else ""
    rest = ", ".join(f"{others[verdict]} {verdict}" for verdict in Verdict if others[verdict])
    return f"{counted(len(compared), 'case')} compared{in_part}" + (f"; {rest}" if rest else "")


def _nothing_gated(comparison: Comparison) -> str:
    advice = "give a limit that can be held here, or allow them by name"
    return f"NOTHING GATED: 0 of {len(comparison.timings)} timings ({_names(sorted(set(comparison.timings)))}): {advice}"


def _is_told(finding: Finding) -> bool:
    return finding.verdict is not Verdict.OK


def _line(subject: str, finding: Finding, comparison: Comparison) -> str:
    mark = "  " if finding.verdict in comparison.allowed else "! "
    return f"{mark}{finding.verdict} ({finding.quantity}): {subject}: {finding.reason}"


def _names(verdicts: Iterable[Verdict]) -> str:
    return ", ".join(verdicts)
