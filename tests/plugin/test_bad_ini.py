"""Wrong values in an ini file: what they end, what they leave alone, and what is said of them."""

import pytest

from pytest_longca.plugin import OPTIONS_KEY
from tests.plugin.conftest import Run

WRONG = {
    "kernels": ("nave", "unknown kernel 'nave': did you mean 'naive'?"),
    "masks": ("casual", "unknown mask 'casual'"),
    "case": ("causal(seqlen_q=)/b1", "malformed id"),
    "examples": ("many", "'many' is not a positive whole number"),
    "timeout": ("0s", "above 0"),
    "lengths": ("/no/such/file", "it cannot be read"),
    "anchor": ("sdpaa", "unknown kernel 'sdpaa'"),
    "mechanisms": ("ulyses", "unknown mechanism 'ulyses'"),
    "mesh": ("2x2", "as in 2x2x2"),
    "html": ("/no/such/folder/page.html", "does not exist"),
    "md": ("/proc/x", "cannot be written"),
    "repro": ("/proc/x", "cannot be written"),
    "resume": ("test_plain.py", "records"),
    "baseline": ("test_plain.py", "records"),
}
PLAIN = "def test_mine(): pass"


@pytest.fixture
def wrong(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> str:
    """An ini file with a wrong value; gives what is said of it."""
    value, says = WRONG[request.param]
    pytester.makepyfile(test_plain=PLAIN)
    pytester.makeini(f"[pytest]\nlongca_{request.param} = {value}\n")
    return says


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_a_wrong_value_in_an_ini_file_leaves_a_plain_run_as_it_is(run: Run, wrong: str) -> None:
    result = run("-q")
    assert (result.ret, result.errlines) == (pytest.ExitCode.OK, [])
    assert not [line for line in result.outlines if "longca" in line]


def test_a_wrong_value_in_an_ini_file_leaves_a_plain_run_under_xdist_as_it_is(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN)
    pytester.makeini("[pytest]\nlongca_html = /no/such/folder/page.html\nlongca_kernels = nave\nlongca_baseline = none.jsonl\n")
    assert run("-q", "-n1").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_it_ends_a_run_whose_tests_ask_and_is_named_as_it_was_written(
    run: Run, pytester: pytest.Pytester, wrong: str, request: pytest.FixtureRequest
) -> None:
    pytester.makepyfile("def test_mine(longca): pass")
    result = run("-q")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0].startswith("ERROR: ") and wrong in result.errlines[0]
    name = request.node.callspec.params["wrong"]
    assert result.errlines[0].startswith(f"ERROR: longca_{name} in tox.ini: ")


@pytest.mark.parametrize("line", ["examples = many", "html = /no/such/folder/page.html"])
def test_it_ends_a_run_whose_tests_ask_under_xdist_too(run: Run, pytester: pytest.Pytester, line: str) -> None:
    pytester.makeini(f"[pytest]\nlongca_{line}\n")
    pytester.makepyfile("def test_mine(longca): pass")
    result = run("-q", "-n1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0].startswith(f"ERROR: longca_{line.split()[0]} in tox.ini: ")


@pytest.mark.parametrize("line", ["examples = many", "kernels = nave", "html = /no/such/folder/page.html"])
def test_it_ends_a_run_that_was_typed_and_is_named_as_it_was_written(run: Run, pytester: pytest.Pytester, line: str) -> None:
    pytester.makeini(f"[pytest]\nlongca_{line}\n")
    result = run("-q", "--longca-masks=causal")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0].startswith(f"ERROR: longca_{line.split()[0]} in tox.ini: ")


def test_the_ini_file_is_named_from_the_root_and_an_override_as_one(run: Run, pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("ci")
    (folder / "gate.ini").write_text("[pytest]\nlongca_kernels = nave\nlongca_masks = causal\n")
    typed = ("-c", "ci/gate.ini", "--rootdir=.", "--longca-examples=3")
    run(*typed).stderr.fnmatch_lines(["ERROR: longca_kernels in ci/gate.ini: unknown kernel 'nave'*"])
    run(*typed, "-o", "longca_kernels=naiv").stderr.fnmatch_lines(["ERROR: -o longca_kernels: unknown kernel 'naiv'*"])
    run(*typed, "--longca-kernels=nai").stderr.fnmatch_lines(["ERROR: --longca-kernels: unknown kernel 'nai'*"])


def test_a_default_stands_in_no_file(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_kernels = naive\nlongca_mesh = 2x2x2\n")
    result = run("--longca-mechanisms=usp")
    assert result.errlines[0].startswith("ERROR: longca_mesh in tox.ini: 2x2x2 are 8 ranks, and --longca-world-sizes has none but 2, 4: ")


@pytest.mark.parametrize("line", ["baseline = none.jsonl", "preset = paper-cp", "budget = 9m", "resume = none.jsonl", "json = /proc/x"])
def test_other_values_leave_a_plain_run_as_it_is_too(run: Run, pytester: pytest.Pytester, line: str) -> None:
    pytester.makeini(f"[pytest]\nlongca_{line}\n")
    pytester.makepyfile(PLAIN)
    result = run("-q")
    assert result.ret == pytest.ExitCode.OK
    assert not [line for line in result.outlines if "longca" in line or "Predictions" in line or "gate" in line]


def test_what_means_nothing_alone_may_stand_in_an_ini_file(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nlongca_world_sizes = 4\nlongca_mesh = 1x2x1\nlongca_fail_slower = 3%\nlongca_allow = added\n")
    assert run("--longca-kernels=naive", "--longca-masks=full", "--collect-only", "-q").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("typed", ["--longca-fail-slower=3%", "--longca-allow=added", "--longca-world-sizes=4"])
def test_what_means_nothing_alone_is_a_usage_error_where_it_is_typed(run: Run, typed: str) -> None:
    result = run("-q", "--longca-kernels=naive", typed)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        line for line in result.errlines if line.startswith(f"ERROR: {typed.split('=')[0]}: ")
    ]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('kernels = ["naive", "sdpa"]', "kernels", ("naive", "sdpa")),
        ('heads = ["4:2", "4:4"]', "heads", ((4, 2), (4, 4))),
        ("seqlens = [512, 1024]", "seqlens", (512, 1024)),
        ("densities = [0.5]", "densities", (0.5,)),
        ("examples = 3", "examples", 3),
    ],
)
def test_several_names_may_be_a_list_in_pyproject_toml(pytester: pytest.Pytester, line: str, name: str, value: object) -> None:
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\nlongca_{line}\n")
    assert pytester.parseconfigure("-p", "no:cacheprovider").stash[OPTIONS_KEY].values[name] == value


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            'preset = ["smoke", "full"]',
            "longca_preset in pyproject.toml: ['smoke', 'full'] is a list, and it takes one value: write a string",
        ),
        ("kernels = []", "longca_kernels in pyproject.toml: '' names nothing*"),
    ],
)
def test_a_list_that_cannot_be_is_a_usage_error(run: Run, pytester: pytest.Pytester, line: str, says: str) -> None:
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\nlongca_{line}\n")
    result = run("-q", "--longca-masks=causal")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {says.replace('[', '[[]')}"])
