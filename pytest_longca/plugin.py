"""The pytest plugin: hooks only. It is loaded in every pytest run of everyone who installs it, so it imports nothing heavy."""

import dataclasses
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_longca import hookspecs
from pytest_longca.collector import Collector
from pytest_longca.errors import InvalidArgument, LongcaError, unknown_name
from pytest_longca.launched import Silence, interrupted_by_sigterm, is_silent, muted
from pytest_longca.options import OPTIONS, Option, Options, parse

if TYPE_CHECKING:
    from pytest_longca.outcome import NotVerified
    from pytest_longca.report.record import Record
    from pytest_longca.session import Session

SUITE = Path(__file__).parent / "suite"
OPTIONS_KEY = pytest.StashKey[Options]()
SESSION_KEY = pytest.StashKey["Session"]()
MISTAKE_KEY = pytest.StashKey[str]()
MISTAKE = "longca_mistake"
"""What an xdist worker tells of a mistake in the ini file, in its `workeroutput`."""
ARGUMENTS = (
    "longca_kernel_name",
    "longca_mask_name",
    "longca_case_id",
    "longca_process",
    "longca_sharing",
    "longca_replayed",
    "longca_known_failure",
    "longca_fault",
    "longca_kernel",
    "longca_mask",
    "longca_case",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("longca", "attention kernels (pytest-longca)")
    for option in OPTIONS:
        if option.is_flag:
            group.addoption(option.flag, action="store_true", default=False, help=option.help)
            continue
        default = f" (default: {option.default})" if option.default else ""
        group.addoption(option.flag, metavar=option.metavar, default=None, help=f"{option.help}{default}".replace("%", "%%"))
        parser.addini(option.ini, help=f"{option.flag}: {option.help}", default=None)


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Tell the closest option to one that is spelt as ours and that no plugin and no conftest.py has: pytest itself tells none."""
    if not any(arg.startswith("--longca") for arg in args):
        return
    parsed, unknown = parser.parse_known_and_unknown_args(args)
    flag = next((arg.partition("=")[0] for arg in unknown if arg.startswith("--longca")), None)
    if flag and not parsed.help:
        raise pytest.UsageError(str(unknown_name("option", flag, [option.flag for option in OPTIONS])))


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "longca_outcome(outcome): the cell is refused with this outcome before anything runs")
    try:
        _check_ini_names(config)
    except LongcaError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[OPTIONS_KEY] = _options(config)
    if is_silent(config.stash[OPTIONS_KEY]):
        config.stash[OPTIONS_KEY] = muted(config.stash[OPTIONS_KEY])
        config.pluginmanager.register(Silence(), "longca-silence")
    earlier = _look_at_files(config)
    if not hasattr(config, "workerinput"):
        collector = Collector(config.stash[OPTIONS_KEY], config.invocation_params.args, earlier)
        config.pluginmanager.register(collector, "longca-collector")
    if config.stash[OPTIONS_KEY].selftest:
        from pytest_longca.selftest_session import SelftestSummary

        config.pluginmanager.register(SelftestSummary(), "longca-selftest")
    typed = config.stash[OPTIONS_KEY].typed
    if typed and not any(str(arg).startswith("--benchmark-") for arg in config.invocation_params.args):
        config.option.benchmark_quiet = True  # our closing part shows the times; its table comes back with any --benchmark option
    if typed and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(SUITE)]
        config.args_source = pytest.Config.ArgsSource.ARGS
    else:
        config.args[:] = [_real_path(arg, config.invocation_params.dir) for arg in config.args]


def _check_ini_names(config: pytest.Config) -> None:
    """Raise InvalidArgument for an ini option that is spelt as ours and that no plugin knows: pytest itself only warns, at the end."""
    for name in sorted(config._get_unknown_ini_keys()):
        if name.startswith(("longca_", "longca-")):
            raise unknown_name("ini option", name, [option.ini for option in OPTIONS if not option.is_flag])


def _options(config: pytest.Config) -> Options:
    typed = [str(arg) for arg in config.invocation_params.args if str(arg).startswith("--longca-")]
    names = [arg.partition("=")[0].removeprefix("--longca-") for arg in typed]
    try:
        return parse(lambda option: _raw(config, option), names, _places(config))
    except LongcaError as error:
        return _mistaken(str(error), is_typed=bool(typed))


def _mistaken(mistake: str, is_typed: bool) -> Options:
    """Options of a run without any on its command line, whose ini file is wrong: nobody may ask. Else the run ends."""
    if is_typed:
        raise pytest.UsageError(mistake)
    return dataclasses.replace(parse(lambda option: None), mistake=mistake)


def _places(config: pytest.Config) -> dict[str, str]:
    """Where options were written that are not on the command line, in words, by name."""
    overridden = {text.partition("=")[0].strip() for text in config.getoption("override_ini") or ()}
    file = os.path.relpath(config.inipath, config.rootpath) if config.inipath else ""
    return {
        option.name: f"-o {option.ini}" if option.ini in overridden else f"{option.ini} in {file}"
        for option in OPTIONS
        if not option.is_flag and config.getoption(option.flag) is None and _raw(config, option) is not None
    }


def _look_at_files(config: pytest.Config) -> "Sequence[Record]":
    """Look at every file that the end of the run will need: a run of hours must not end in a typo. Gives the records to go on from."""
    options = config.stash[OPTIONS_KEY]
    if not any((options.html, options.md, options.baseline, options.resume, options.repro)):
        return ()
    from pytest_longca.budget import earlier_records
    from pytest_longca.closing import check_paths

    try:
        check_paths(options)
        return earlier_records(options.resume)
    except LongcaError as error:
        config.stash[OPTIONS_KEY] = _mistaken(options.placed(str(error)), options.typed)
        return ()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Name a mistake in the options once, before anything is collected or an xdist worker starts, however quiet the run is."""
    config = session.config
    if config.stash[OPTIONS_KEY].typed and not hasattr(config, "workerinput"):
        session_of(config)
        config.add_cleanup(interrupted_by_sigterm())


def _raw(config: pytest.Config, option: Option) -> object:
    """What was written, None if nothing was; a list where TOML has one."""
    if option.is_flag:
        return "yes" if config.getoption(option.flag) else None
    typed: str | None = config.getoption(option.flag)
    if typed is not None:
        return typed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pytest 9.2 and later, at a list
        return config.getini(option.ini)


def _real_path(arg: str, directory: Path) -> str:
    """A node id of the suite (`longca/...`) as the path of the installed file; anything else as it is."""
    path, _, rest = arg.partition("::")
    if path.split("/")[0] != "longca" or (directory / path).exists():
        return arg
    return "::".join([str(SUITE.joinpath(*path.split("/")[1:])), *([rest] if rest else [])])


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return SuiteDirectory.from_parent(parent, path=path, nodeid="longca") if path == SUITE else None


class SuiteDirectory(pytest.Directory):
    """The shipped suite; its node ids start with `longca/`, wherever the package lies. A replayed case is all that runs."""

    def collect(self) -> Iterable[pytest.Collector]:
        options = self.config.stash[OPTIONS_KEY]
        alone = {
            "test_case.py": options.case is not None,
            "test_parallel.py": options.chosen("mechanisms", "cpu") is not None,
            "test_selftest.py": options.selftest is not None,
        }
        for path in sorted(self.path.glob("test_*.py")):
            if alone.get(path.name, not any(alone.values())):
                yield SuiteModule.from_parent(self, path=path, nodeid=f"longca/{path.name}")


class SuiteModule(pytest.Module):
    """A module of the suite, whose tests are found whatever the user's python_functions say."""

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")


def session_of(config: pytest.Config) -> "Session":
    """The longca session of a pytest session, made at its first use. Raises UsageError if its options name what is not there."""
    from pytest_longca.session import Session

    if SESSION_KEY not in config.stash:
        options = config.stash[OPTIONS_KEY]
        if options.mistake:
            raise pytest.UsageError(options.mistake)
        session = Session(options, config.pluginmanager)
        try:
            _ = session.kernels, session.masks, session.lengths, session.replayed, session.mechanisms, session.anchor
        except LongcaError as error:
            raise pytest.UsageError(options.placed(str(error))) from None
        config.stash[SESSION_KEY] = session
    return config.stash[SESSION_KEY]


def is_asked(config: pytest.Config) -> bool:
    """Whether a longca option was typed or a test asks for a longca fixture. Any other run is none of ours, whatever its ini file says."""
    return config.stash[OPTIONS_KEY].typed or SESSION_KEY in config.stash


@pytest.fixture(scope="session")
def longca(request: pytest.FixtureRequest) -> "Session":
    """The longca session: options, catalogue, machine and `verify`."""
    return session_of(request.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = [name for name in ARGUMENTS if name in metafunc.fixturenames]
    if not wanted and "longca" not in metafunc.fixturenames:
        return
    from pytest_longca.cells import parametrize

    # pytest takes no usage error here: it would be one of this module
    try:
        session = session_of(metafunc.config)
    except pytest.UsageError as error:  # options of an ini file, which are looked at when a test asks for them
        metafunc.config.stash[MISTAKE_KEY] = str(error)
        return
    try:
        if wanted:
            parametrize(metafunc, wanted, session)
    except InvalidArgument as error:  # what a kernel declares, which is asked for here
        metafunc.config.stash[MISTAKE_KEY] = str(error)


def _tell_mistake(config: pytest.Config, mistake: str, items: list[pytest.Item]) -> None:
    """End the run with a usage error; an xdist worker runs nothing and leaves that to the process that reports."""
    if not hasattr(config, "workeroutput"):
        raise pytest.UsageError(mistake)
    config.workeroutput[MISTAKE] = mistake
    items.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if mistake := getattr(node, "workeroutput", {}).get(MISTAKE):
        raise pytest.UsageError(mistake)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End the run for a mistake; order what is selected for a budget, and leave out what an earlier run has done."""
    if mistake := config.stash.get(MISTAKE_KEY, None):
        _tell_mistake(config, mistake, items)
        return
    options = config.stash[OPTIONS_KEY]
    if not is_asked(config) or (options.budget is None and options.resume is None):
        return
    if not items and options.resume is not None:  # as if an earlier run had done all of it
        typed = (f"{flag} {text!r}" for flag, text in (("-k", config.option.keyword), ("-m", config.option.markexpr)) if text)
        mistake = f"--longca-resume: {' and '.join(typed) or 'the command line'} selects no test: nothing is resumed"
        _tell_mistake(config, options.placed(mistake), items)
        return
    from pytest_longca import budget

    earlier = budget.earlier_records(options.resume)
    to_run, done = budget.split(items, earlier)
    try:
        budget.check_device(earlier, session_of(config).machine.name)
    except LongcaError as error:
        raise pytest.UsageError(options.placed(str(error))) from None
    items[:] = budget.arrange(to_run) if options.budget else to_run
    if done:
        config.hook.pytest_deselected(items=done)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if SESSION_KEY not in session.config.stash or session.config.option.collectonly:
        return
    from pytest_longca.warming import warm

    warm(session_of(session.config), session.items, session.config.pluginmanager.get_plugin("terminalreporter"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("longca_outcome")
    outcome = marker.args[0] if marker else _postponed(item)
    if outcome:
        from pytest_longca.conformance import record_refusal

        record_refusal(item, outcome)


def _postponed(item: pytest.Item) -> "NotVerified | None":
    """Why the session's budget has no time for the item, or None; other tests than the suite's are not held to it."""
    session = item.config.stash.get(SESSION_KEY, None)
    is_ours = item.nodeid.startswith("longca/")
    return session.budget.begin() if is_ours and session and session.budget else None


def pytest_report_header(config: pytest.Config) -> str | None:
    options = config.stash[OPTIONS_KEY]
    if not options.typed:
        return None
    session = session_of(config)
    if options.selftest:
        from pytest_longca.faults import FAULTS

        return f"longca: selftest: {len(FAULTS)} known faults, each planted into naive and hunted, {session.machine.name}"
    what = "one case" if options.case else f"{len(session.masks)} mask{'s' * (len(session.masks) > 1)}, preset {options.preset}"
    return f"longca: {', '.join(session.kernels)} on {what}, {session.machine.name}"


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    if SESSION_KEY in config.stash:
        for line in session_of(config).times():
            terminalreporter.write_line(f"longca: {line}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION_KEY in config.stash:
        config.stash[SESSION_KEY].close()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption("--longca-list"):
        return None
    from pytest_longca.listing import listing

    config._do_configure()
    try:
        print(listing(session_of(config)))
    except InvalidArgument as error:
        raise pytest.UsageError(str(error)) from None
    finally:
        config._ensure_unconfigure()
    return 0
