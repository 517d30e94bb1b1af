"""The snippets of the README and of docs/extending.md, run as they stand."""

import re
from pathlib import Path

import pytest

from tests.plugin.conftest import Run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()


def snippets(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


KERNEL, MASK, FIXTURES, STRATEGIES, SNIPPET = snippets(EXTENDING)


def test_the_kernel_of_the_readme_is_wrong_as_the_readme_says(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(snippets(README)[0])
    result = run("--benchmark-skip", "--longca-kernels=mine", "--longca-masks=full,causal", "--longca-isolate=off", "-k", "probes")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["mine is wrong: count: out: batch 0, head 0, query 0 does not read key 1, which the mask shows;*"])
    result.stdout.fnmatch_lines(["mask*mine", "full*ok[*]", "causal*WRONG"])  # of the full run: ok


def test_the_mask_of_the_readme_is_judged_beside_its_kernel(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("\n".join(snippets(README)))
    chosen = ("--longca-masks=dilated", "--longca-kernels=sdpa,mine", "--longca-examples=3", "--longca-isolate=off")
    result = run("--benchmark-skip", *chosen, "-k", "examples")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["mask*sdpa*mine", "dilated*ok*"])


@pytest.mark.parametrize("path", ["README.md", "docs/extending.md", "docs/measuring.md", "docs/ci.md", ".github/workflows/gpu-gate.yml"])
def test_the_options_that_are_named_exist(path: str) -> None:
    from pytest_longca.options import OPTIONS

    flags = {option.flag for option in OPTIONS}
    named = set(re.findall(r"--longca-[a-z-]+", (ROOT / path).read_text()))
    assert named and named <= flags


def test_the_kernel_and_the_mask_of_the_page_are_right(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNEL + MASK)
    chosen = ("--longca-kernels=mine", "--longca-masks=causal,dilated", "--longca-examples=3", "--longca-isolate=off")
    result = run("--benchmark-skip", *chosen, "-k", "conformance")
    result.assert_outcomes(passed=4)


def test_the_tests_of_the_page_run_on_the_chosen_kernels_and_cases(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(KERNEL)
    path = pytester.makepyfile(FIXTURES)
    result = run("--longca-kernels=mine", "--longca-masks=causal,full", "--longca-seqlens=64", "--longca-dtypes=fp32", str(path))
    result.assert_outcomes(passed=8)  # two tests, two masks, two passes


def test_the_hypothesis_test_of_the_page_passes_without_any_option(run: Run, pytester: pytest.Pytester) -> None:
    run(str(pytester.makepyfile(STRATEGIES))).assert_outcomes(passed=1)


def test_the_page_names_an_entry_point_group_that_pytest_reads() -> None:
    import tomllib

    (text,) = snippets(EXTENDING, "toml")
    assert tomllib.loads(text)["project"]["entry-points"]["pytest11"].keys() == {"my_attention"}


def test_the_call_of_the_page_makes_a_file_that_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    from pytest_longca.case import Case
    from pytest_longca.checks import Verification
    from pytest_longca.kernels.naive import Naive
    from pytest_longca.machine import CPU
    from pytest_longca.masks.regular import Causal
    from pytest_longca.outcome import Wrong
    from pytest_longca.repro import repro_source

    theirs = types.ModuleType("my_attention")
    exec("import torch\n" + ATTENTION, theirs.__dict__)
    monkeypatch.setitem(sys.modules, "my_attention", theirs)
    given: dict[str, str] = {}
    exec(SNIPPET, given)
    monkeypatch.setattr(Naive, "snippet", lambda self, case, facts: given["SNIPPET"])
    text = repro_source(Naive(), Case(mask=Causal(5, 7), head_dim=8), Verification(Wrong("")), CPU, {})
    standalone = types.ModuleType("standalone")
    exec(text, standalone.__dict__)
    standalone.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("right")


ATTENTION = """
def attention(q, k, v, mask, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
"""
