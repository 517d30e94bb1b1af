"""Every option has a twin in the ini file, which means the same."""

import pytest

from pytest_longca.options import OPTIONS, Option, Options
from pytest_longca.plugin import OPTIONS_KEY

VALUES = {
    "kernels": "naive,sdpa",
    "masks": "regular",
    "case": "causal(seqlen_q=3,seqlen_kv=3)/b1/h1:1/d8/fp32/fwd/s0",
    "preset": "smoke",
    "examples": "7",
    "checks": "truth",
    "seqlens": "1k,8k",
    "heads": "64:8",
    "head-dims": "64,128",
    "dtypes": "bf16",
    "passes": "fwd_bwd",
    "block-sizes": "32",
    "densities": "0.1,0.9",
    "lengths": "my.json",
    "seed": "5",
    "memory-limit": "80GB",
    "isolate": "kernel",
    "timeout": "3m",
    "json": "records.jsonl",
    "html": "page.html",
    "md": "summary.md",
    "budget": "9m",
    "resume": "old.jsonl",
    "baseline": "baseline.jsonl",
    "fail-slower": "3%",
    "fail-memory": "off",
    "fail-error": "40%",
    "allow": "added",
    "forbid": "too-noisy",
    "anchor": "sdpa",
    "processes": "3",
    "compile-workers": "3",
    "repro": "repros",
    "mechanisms": "ulysses",
    "world-sizes": "2",
    "mesh": "1x2x1",
}
ACTIONS = {"list", "selftest"}
"""What a user does once: a twin in the ini file would leave a project without its tests."""


def test_every_option_but_an_action_has_a_value_here() -> None:
    assert {option.name for option in OPTIONS} == VALUES.keys() | ACTIONS
    assert {option.name for option in OPTIONS if option.is_flag} == ACTIONS


@pytest.fixture
def parsed(pytester: pytest.Pytester) -> dict[str, Options]:
    """The options without any, of a command line with all of them, and of an ini file with all of them; parsed once for all tests."""
    if not PARSED:

        def options(*args: str) -> Options:
            return pytester.parseconfigure("-p", "no:cacheprovider", *args).stash[OPTIONS_KEY]

        PARSED["default"] = options()
        PARSED["typed"] = options(*(f"--longca-{name}={value}" for name, value in VALUES.items()))
        pytester.makeini("[pytest]\n" + "".join(f"longca_{name.replace('-', '_')} = {value}\n" for name, value in VALUES.items()))
        PARSED["ini"] = options()
        PARSED["both"] = options("--longca-seed=9")
    return PARSED


PARSED: dict[str, Options] = {}


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.name not in ACTIONS], ids=lambda option: option.name)
def test_the_ini_twin_means_what_the_option_means(option: Option, parsed: dict[str, Options]) -> None:
    default, typed, ini = (parsed[way].values[option.attribute] for way in ("default", "typed", "ini"))
    assert ini == typed != default


def test_the_command_line_beats_the_ini_file(parsed: dict[str, Options]) -> None:
    assert (parsed["ini"].seed, parsed["both"].seed, parsed["both"].examples) == (5, 9, 7)
