"""The README's snippets, run as they stand."""

import re
from pathlib import Path

import pytest

from tests.plugin.conftest import Run

README = (Path(__file__).parents[2] / "README.md").read_text()


def snippet(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)[number]


def test_the_kernel_of_the_readme_is_wrong_as_the_readme_says(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(snippet("python"))
    result = run("--benchmark-skip", "--longca-kernels=mine", "--longca-masks=full,causal", "--longca-examples=3", "-k", "probes")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["mine is wrong: count: out: batch 0, head 0, query 0 does not read key 1, which the mask shows;*"])
    result.stdout.fnmatch_lines(["mask*mine", "full*ok", "causal*WRONG"])


def test_the_options_of_the_readme_exist(run: Run) -> None:
    from pytest_longca.options import OPTIONS

    flags = {option.flag for option in OPTIONS}
    named = set(re.findall(r"--longca-[a-z-]+", README))
    assert named and named <= flags
