"""`python -m pytest_longca compare|report|recommend`: what can be done with records, without running a kernel.

Exit status: 0 is fine, 1 a regression, 2 what cannot be done or compared.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pytest_longca.errors import InvalidArgument, LongcaError
from pytest_longca.options import count, heads, limit, verdicts
from pytest_longca.report.gate import render_comparison
from pytest_longca.report.output import write_reports
from pytest_longca.report.record import Record
from pytest_longca.report.repeat import options_to_repeat
from pytest_longca.report.store import read_records
from pytest_longca.report.verdict import Comparison, Limits, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()  # a reader that is gone is met here, not while the interpreter ends
        return status
    except LongcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; what is left to flush at exit goes nowhere either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_longca", description="Work with the records of pytest --longca-json.")
    commands = parser.add_subparsers(required=True, metavar="compare|report|recommend")
    _compare_options(commands.add_parser("compare", help="the gate: exit 1 if a kernel became slower, hungrier, less accurate or wrong"))
    _report_options(commands.add_parser("report", help="the HTML page and the Markdown summary of records"))
    _recommend_options(commands.add_parser("recommend", help="the fastest verified kernel for your own lengths, heads and mask"))
    return parser


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_compare)
    parser.add_argument("old", help="records of the baseline, at least 5 processes for each case")
    parser.add_argument("new", help="records of the new build, at least 2 processes for each case")
    _gate_options(parser)
    parser.add_argument("--html", metavar="PATH", help="also write the page with the comparison")
    parser.add_argument("--md", metavar="PATH", help="also write the Markdown summary")


def _gate_options(parser: argparse.ArgumentParser) -> None:
    for name, default in (("slower", "5%"), ("memory", "5%"), ("error", "25%")):
        help_text = f"a change of this size must be caught, or off (default {default})".replace("%", "%%")
        parser.add_argument(f"--fail-{name}", metavar="PERCENT", default=default, type=_typed(limit), help=help_text)
    parser.add_argument("--anchor", metavar="KERNEL", help="compare times relative to this kernel's in the same run")
    known = ", ".join(verdict for verdict in Verdict if verdict is not Verdict.OK)
    for name, does in (("allow", f"show these and do not fail: {known}"), ("forbid", "fail on these too: too-noisy")):
        parser.add_argument(f"--{name}", metavar="VERDICTS", default=frozenset(), type=_typed(verdicts), help=does)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_report)
    parser.add_argument("records", nargs="+", help="files that --longca-json wrote")
    parser.add_argument("--html", metavar="PATH", help="the page (default: report.html, unless --md is given)")
    parser.add_argument("--md", metavar="PATH", help="the Markdown summary")
    parser.add_argument("--baseline", metavar="FILE", help="also compare with this file")
    _gate_options(parser)


def _recommend_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_recommend)
    parser.add_argument("records", nargs="+", help="files that --longca-json wrote")
    parser.add_argument("--mask", default="causal_document", help="mask, by name (default: causal_document)")
    parser.add_argument("--lengths", metavar="FILE", help="JSON: a list of document lengths, or a histogram")
    parser.add_argument("--tokens", metavar="N", type=_typed(count), help="tokens in all, such as 32k (default: the sum of the list)")
    parser.add_argument("--heads", metavar="Q:KV", default=((64, 8),), type=_typed(heads), help="query:key/value heads (default 64:8)")
    parser.add_argument("--head-dim", metavar="N", default=128, type=_typed(count), help="default 128")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16", "fp64"), help="default bf16")
    parser.add_argument("--pass", dest="direction", default="fwd", choices=("fwd", "bwd", "fwd_bwd"), help="default fwd")
    parser.add_argument("--ranks", metavar="N", default=1, type=_typed(count), help="ranks of a context-parallel world (default 1)")


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser for argparse, which prints only its own kind of error."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _gate(baseline: list[Record], new: list[Record], options: argparse.Namespace) -> Comparison:
    from pytest_longca.report.compare import compare

    limits = Limits(slower=options.fail_slower, memory=options.fail_memory, error=options.fail_error)
    return compare(baseline, new, limits, options.anchor, options.allow, options.forbid)


def _compare(options: argparse.Namespace) -> int:
    new = read_records(options.new)
    comparison = _gate(read_records(options.old), new, options)
    write_reports(new, comparison, options.html, options.md)
    print(*options_to_repeat(new, vars(options)), render_comparison(comparison), sep="\n")
    return comparison.exit_code


def _report(options: argparse.Namespace) -> int:
    records = _all_records(options.records)
    comparison = _gate(read_records(options.baseline), records, options) if options.baseline else None
    page = options.html or (None if options.md else "report.html")
    write_reports(records, comparison, page, options.md)
    print("wrote", *(path for path in (page, options.md) if path))
    return 0


def _recommend(options: argparse.Namespace) -> int:
    from pytest_longca.report.recommend import make_case, recommend, render_advice

    case = make_case(options.mask, options.heads[0], options.head_dim, options.dtype, options.direction, options.lengths, options.tokens)
    print(render_advice(case, recommend(_all_records(options.records), case, options.ranks)))
    return 0


def _all_records(paths: Sequence[str]) -> list[Record]:
    return [record for path in paths for record in read_records(path)]


if __name__ == "__main__":
    sys.exit(main())
