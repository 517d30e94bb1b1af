"""The suite that the options bring in: where it runs, what its items are called, and how it gets along with pytest's own options."""

import pytest

from tests.plugin.conftest import Run


def test_an_option_and_no_path_runs_the_suite_from_an_empty_directory(judge: Run) -> None:
    result = judge("--longca-kernels=naive", "-v")
    assert result.ret == 0
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(["longca/test_conformance.py::test_probes?naive-causal? PASSED*"])


def test_options_in_an_ini_file_leave_plain_pytest_alone(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_kernels = naive\nlongca_masks = full\n")
    pytester.makepyfile("def test_mine(): pass")
    result = run("-v")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*longca/*")


def test_an_ini_file_sets_what_the_command_line_does_not(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_kernels = naive\nlongca_masks = full\nlongca_examples = 2\n")
    result = run("--longca-masks=causal", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["longca/test_conformance.py::test_examples?naive-causal?"])
    result.stdout.no_fnmatch_line("*naive-full*")


def test_a_path_beside_an_option_runs_that_path(run: Run, pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("def test_mine(longca_kernel): assert longca_kernel.name == 'naive'")
    run("--longca-kernels=naive", str(path)).assert_outcomes(passed=1)


def test_a_node_id_can_be_pasted_back(judge: Run) -> None:
    result = judge("--longca-kernels=naive", "longca/test_conformance.py::test_probes[naive-causal]")
    result.assert_outcomes(passed=1)


def test_pyargs_names_the_suite(judge: Run) -> None:
    judge("--longca-kernels=naive", "--pyargs", "pytest_longca.suite").assert_outcomes(passed=2, skipped=3)


def test_a_users_python_files_and_functions_do_not_hide_the_suite(judge: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npython_files = check_*.py\npython_functions = check_*\n")
    judge("--longca-kernels=naive").assert_outcomes(passed=2, skipped=3)


@pytest.mark.parametrize("args", [("-k", "probes"), ("-x", "-k", "probes"), ("-m", "not slow", "-k", "probes")])
def test_it_gets_along_with_selection(judge: Run, args: tuple[str, ...]) -> None:
    judge("--longca-kernels=naive", *args).assert_outcomes(passed=1)


def test_the_list_shows_refusals_and_runs_nothing(run: Run) -> None:
    result = run("--longca-list", "--longca-kernels=naive,flex", "--longca-masks=causal")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["mask*naive*flex", "causal*run*run", "run *would run"])
    result.stdout.no_fnmatch_line("*passed*")


def test_all_kernels_are_those_too_that_are_not_installed(run: Run) -> None:
    result = run("--longca-list", "--longca-kernels=all", "--longca-masks=causal")
    result.stdout.fnmatch_lines(["sdpa_cudnn: unsupported: runs on cuda only*", "vsa: not installed:*", "mask*naive*sdpa*"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--longca-kernels=nave",), "*--longca-kernels: unknown kernel 'nave': did you mean 'naive'?*"),
        (("--longca-masks=casual",), "*--longca-masks: unknown mask 'casual': did you mean 'causal'*"),
        (("--longca-masks=regulr",), "*did you mean 'regular'*"),
        (("--longca-checks=trth",), "*unknown check 'trth': did you mean 'truth'?*"),
        (("--longca-case=causal(seqlen_q=)/b1",), "*--longca-case*"),
        (("--longca-heads=64:7",), "*64:7*multiple*"),
    ],
)
def test_bad_options_are_usage_errors_before_anything_runs(run: Run, args: tuple[str, ...], says: str) -> None:
    result = run("--longca-kernels=naive", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    output = "\n".join(result.errlines + result.outlines)
    pytest.LineMatcher(output.splitlines()).fnmatch_lines([says])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--longca-mask=causal",), "ERROR: unknown option '--longca-mask': did you mean '--longca-masks'*"),
        (("--longca_kernels", "naive"), "ERROR: unknown option '--longca_kernels': did you mean '--longca-kernels'*"),
        (("--longca-masks=full", "--longca-dtype=fp32", "-n1"), "ERROR: unknown option '--longca-dtype': did you mean '--longca-dtypes'*"),
        (("--ours=--longca-mask", "--longca-of-ours", "-k", "nothing"), None),
        (("--longca-masks=causal", "--lnogca-masks=causal"), "*: error: unrecognized arguments: --lnogca-masks=causal"),
    ],
)
def test_a_misspelt_option_is_told_the_closest_one(run: Run, pytester: pytest.Pytester, args: tuple[str, ...], says: str | None) -> None:
    """Unless another plugin, or a conftest.py, has an option of that name."""
    ours = "parser.addoption('--ours'), parser.addoption('--longca-of-ours', action='store_true')"
    pytester.makeconftest(f"def pytest_addoption(parser): {ours}")
    result = run(*args)
    assert result.ret == (pytest.ExitCode.USAGE_ERROR if says else pytest.ExitCode.NO_TESTS_COLLECTED)
    if says:
        result.stderr.fnmatch_lines([says])


TYPOS = {
    "kernels": ("rihgt", "unknown kernel 'rihgt'"),
    "masks": ("", "names nothing"),
    "case": ("causal(seqlen_q=)/b1", "--longca-case"),
    "anchor": ("sdpaa", "did you mean 'sdpa'"),
    "lengths": ("/nonexistent", "/nonexistent"),
    "mechanisms": ("ulyses", "did you mean 'ulysses'"),
}


@pytest.mark.parametrize(("option", "args"), [*((option, "-q") for option in TYPOS), ("kernels", "-n2"), ("kernels", "-q -n2")])
def test_a_typo_is_a_usage_error_and_no_traceback_however_quiet_the_run(run: Run, option: str, args: str) -> None:
    typed, says = TYPOS[option]
    result = run(*args.split(), f"--longca-{option}={typed}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0].startswith(f"ERROR: --longca-{option}: ") and says in result.errlines[0]
    assert not [line for line in result.outlines if "test" in line or "Error" in line]


@pytest.mark.parametrize(("args", "asks"), [("-q", "longca_kernel"), ("-q", "longca"), ("-q -n2", "longca_kernel"), ("-q -n1", "longca")])
def test_a_typo_in_an_ini_file_is_a_usage_error_of_the_run_whose_tests_ask(
    run: Run, pytester: pytest.Pytester, asks: str, args: str
) -> None:
    pytester.makeini("[pytest]\nlongca_kernels = nave\n")
    pytester.makepyfile(f"def test_mine({asks}): pass\ndef test_other({asks}): pass")
    result = run(*args.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0].startswith("ERROR: longca_kernels in tox.ini: unknown kernel 'nave': did you mean 'naive'?")
    assert not [line for line in result.outlines if "test_" in line or "Error" in line]


def test_a_test_may_ask_for_the_session_alone(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_kernels = naive\n")
    pytester.makepyfile("def test_mine(longca): assert longca.kernels == ('naive',)")
    run("-q").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("longca_kernls = naive", "ERROR: unknown ini option 'longca_kernls': did you mean 'longca_kernels'*"),
        ("longca-masks = causal", "ERROR: unknown ini option 'longca-masks': did you mean 'longca_masks'*"),
    ],
)
def test_a_misspelt_ini_option_is_a_usage_error_of_every_run(run: Run, pytester: pytest.Pytester, line: str, says: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    pytester.makepyfile("def test_mine(): pass")
    result = run("-q")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


def test_an_ini_option_of_another_plugin_is_none_of_ours(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_more = 1\n")
    pytester.makeconftest("def pytest_addoption(parser): parser.addini('longca_more', 'an extension')")
    pytester.makepyfile("def test_mine(): pass")
    assert run("-q").ret == pytest.ExitCode.OK
