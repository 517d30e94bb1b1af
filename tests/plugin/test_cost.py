"""What the plugin costs a session that does not use it. Processor time, so that a busy machine does not decide."""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.machine_speed import cpu_ms, slowdown, yardstick

PLAIN = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_a_session_without_our_options_imports_neither_torch_nor_triton(tmp_path: Path) -> None:
    (tmp_path / "test_modules.py").write_text(
        "import sys\ndef test_modules():\n    assert 'pytest_longca.plugin' in sys.modules\n"
        "    assert not {'torch', 'triton', 'jinja2'} & set(sys.modules)\n"
    )
    done = subprocess.run(PLAIN, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_plugin_imports_under_the_oldest_pytest_that_it_takes(tmp_path: Path) -> None:
    """Pytest 8.2 and 8.3 have no `pytest.TerminalReporter`; an import that fails ends every pytest run where the plugin is installed."""
    modules = "pytest_longca.plugin, pytest_longca.selftest_session"
    subprocess.run([sys.executable, "-c", f"import pytest; del pytest.TerminalReporter; import {modules}"], check=True, cwd=tmp_path)


def test_the_plugin_costs_under_30_ms(tmp_path: Path, one_core: None) -> None:
    """On a quiet machine; and as many times that as a fixed piece of work takes longer here, timed in turns with the sessions."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="")  # as a user has it: else what is judged is how fast Python compiles the plugin

    def seconds(*extra: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PLAIN, *extra], cwd=tmp_path, env=env, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def difference() -> float:
        """In turns. The least of each, as another process on the same cores only ever adds; or the median, if it never stops adding."""
        least = min(with_it for with_it, _, _ in rounds) - min(without for _, without, _ in rounds)
        return min(least, statistics.median(with_it - without for with_it, without, _ in rounds))

    def limit() -> float:
        return 0.030 * slowdown(min(fixed_ms for _, _, fixed_ms in rounds))

    seconds()
    rounds: list[tuple[float, float, float]] = []
    while len(rounds) < 5 or (len(rounds) < 25 and difference() >= limit()):
        rounds.append((seconds(), seconds("-p", "no:longca"), cpu_ms(yardstick)))
    assert difference() < limit(), rounds


def test_collecting_2000_items_takes_under_3_s(pytester: pytest.Pytester) -> None:
    lengths = ",".join(str(100 + n) for n in range(500))
    args = ("--longca-kernels=naive,sdpa", "--longca-masks=causal", f"--longca-seqlens={lengths}", "--collect-only", "-qq")
    pytester.runpytest_inprocess(*args)
    start = time.process_time()
    result = pytester.runpytest_inprocess(*args)
    taken = time.process_time() - start
    assert result.outlines[0].startswith("longca/")
    assert taken < 3.0
