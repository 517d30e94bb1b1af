"""The benchmark's records as Markdown: what docs/context-parallel.md shows, written by no hand.

    python -m pytest_longca.parallel.tables cp.jsonl            # the tables
    python -m pytest_longca.parallel.tables --update docs/context-parallel.md

The second form fills every pair of `<!-- records: FILE -->` and `<!-- end of records -->` in a page, and with the scaling model's table
every pair of `<!-- predictions: FILE -->` and `<!-- end of predictions -->`. FILE is relative to the page.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_longca.errors import InvalidArgument
from pytest_longca.parallel.model import Network, fitted, is_compared, is_quiet, model_error, paper_rows
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records

Key = tuple[int, str, str, str]
HEAD = ("tokens a GPU", "mask", "kernel", "mechanism", "forward", "backward", "exposed", "peak", "model's error")
SECTION = re.compile(r"(<!-- (records|predictions): (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def markdown(records: Sequence[Record]) -> str:
    """Device and links, the table of what was measured, and what was not."""
    network = fitted(records, Network())
    cells: dict[Key, dict[str, Record]] = {}
    for record in records:
        if record.samples_ms:
            cells.setdefault(_key(record), {})[record.direction or ""] = record
    rows = [HEAD, tuple("---" for _ in HEAD), *(_row(key, found, network) for key, found in cells.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([_about(records), table, *_links(records, network), *_absent(records)]) + "\n"


def update(page: str, folder: Path) -> str:
    """The page with every section of records and of predictions written anew."""
    return SECTION.sub(lambda match: f"{match[1]}\n{_WRITERS[match[2]](read_records(folder / match[3]))}\n{match[4]}", page)


def _predicted(records: Sequence[Record]) -> str:
    return "\n".join(["```", *paper_rows(records, fitted(records, Network())), "```", ""])


_WRITERS = {"records": markdown, "predictions": _predicted}


def _key(record: Record) -> Key:
    layout = record.facts.get("layout", "contiguous")
    mechanism = f"{record.mechanism} {layout}" if layout != "contiguous" else record.mechanism or ""
    return int(record.facts.get("tokens", 0)), record.mask, record.kernel, mechanism


def _row(key: Key, found: dict[str, Record], network: Network) -> tuple[str, ...]:
    tokens, *names = key
    both = [found[direction] for direction in ("fwd", "bwd") if direction in found]
    exposed = [record.facts[f"exposed_{record.direction}_ms"] / _median(record) for record in both if is_compared(record)]
    errors = [model_error(record, network) for record in both if is_compared(record)]
    peak = both[0].peak_bytes
    return (
        f"{tokens:,}", *names, *(_rate(found.get(direction)) for direction in ("fwd", "bwd")),
        _percents(exposed, ""), f"{peak / 2**30:.1f} GiB" if peak else "", _percents(errors, "+"),
    )  # fmt: skip


def _rate(record: Record | None) -> str:
    """TFLOP/s per GPU, and in brackets the share of the kernel alone."""
    if record is None:
        return ""
    share = record.facts["of_alone"]
    return f"{record.facts['tflop_per_s']:.0f}" + (f" ({share:.1%})" if share and record.mechanism != "alone" else "")


def _percents(values: Iterable[float], sign: str) -> str:
    return " / ".join(f"{value:{sign}.1%}" for value in values)


def _median(record: Record) -> float:
    return statistics.median(record.samples_ms or ())


def _about(records: Sequence[Record]) -> str:
    """The devices, what ran on them, and in which state."""
    timed = [record for record in records if record.samples_ms]
    versions: dict[str, str] = {}
    for record in timed:
        versions |= record.versions
    clocks = [record.clocks for record in timed if "sm_mhz" in record.clocks]
    state = [f"SM clocks of {min(c['sm_mhz'] for c in clocks):.0f} to {max(c['sm_mhz'] for c in clocks):.0f} MHz"] if clocks else []
    capped = sum(bool(c.get("power_capped")) for c in clocks)
    state += [f"power at its cap in {capped} of {len(clocks)} figures"] if clocks else []
    fewest, most = (pick(len(record.samples_ms or ()) for record in timed) for pick in (min, max))
    samples = f"medians of {fewest} samples" if fewest == most else f"medians of {fewest} to {most} samples"
    world = f"{timed[0].world_size} x" if not any(map(is_quiet, timed)) else f"Ranks of a world of {timed[0].world_size} on one"
    where = f"{world} {timed[0].device}" + (f", {' to '.join(dates)}" if (dates := _dates(timed)) else "")
    what = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"{where}: {', '.join([*state, samples])}. Versions: {what}."


def _dates(records: Sequence[Record]) -> list[str]:
    days = sorted({record.facts["date"] for record in records if "date" in record.facts})
    return [days[0], days[-1]] if len(days) > 1 else days


def _links(records: Sequence[Record], network: Network) -> list[str]:
    found = [record for record in records if record.mechanism == "links"]
    if not found:
        return []
    kinds = [
        f"{kind} {link['latency_ms'] * 1e3:.1f} us + bytes / {link['gb_per_s']:.0f} GB/s" for kind, link in found[-1].facts["fits"].items()
    ]
    errors = [abs(model_error(record, network)) for record in records if is_compared(record)]
    text = f"Links, fitted in the run: {', '.join(kinds)}."
    if errors:
        text += f" The scaling model with these links and a contention of {network.contention:.2%} of the computation, fitted on the rings,"
        text += f" is at most {max(errors):.1%} from the {len(errors)} measured steps (median {statistics.median(errors):.1%})."
    return [text]


def _absent(records: Sequence[Record]) -> list[str]:
    """What was asked for and not measured, by reason."""
    reasons = Counter(record.reason for record in records if record.kind != "passed")
    lines = []
    for reason in reasons:
        cells = [_key(record) for record in records if record.kind != "passed" and record.reason == reason]
        lines.append(f"Not measured ({reason}): {'; '.join(f'{tokens:,} {mask} {kernel} {what}' for tokens, mask, kernel, what in cells)}.")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of record files, or write them into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_longca.parallel.tables", description="Records of context parallelism as Markdown."
    )
    parser.add_argument("records", nargs="*", type=Path, help="JSON Lines files, as the benchmark writes them")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="a Markdown page whose sections of records are written anew")
    options = parser.parse_args(arguments)
    try:
        for path in options.records:
            print(markdown(read_records(path)))
        if options.update:
            options.update.write_text(update(options.update.read_text(), options.update.parent))
    except InvalidArgument as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
