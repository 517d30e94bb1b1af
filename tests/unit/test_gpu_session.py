"""tests/gpu/everything.py without a GPU: jobs end, are interrupted, or find no time; what they wrote stays."""

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.interrupts import heeding_interrupts

SCRIPT = Path(__file__).parents[1] / "gpu/everything.py"


@pytest.fixture(scope="module")
def everything() -> ModuleType:
    spec = importlib.util.spec_from_file_location("everything", SCRIPT)
    assert spec and spec.loader
    module = sys.modules["everything"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_job_that_hangs_is_interrupted_with_all_it_started_and_keeps_its_log(everything: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    session = everything.Session(tmp_path, 1, minutes=1)
    began = time.monotonic()
    with heeding_interrupts():
        session.run(everything.Job("hangs", 2.0, f"{tmp_path}/hangs.py"), [0])
    assert time.monotonic() - began < 10
    (end,) = session.ends
    assert end.startswith("hangs: interrupted")
    child = (tmp_path / "hangs.txt").read_text().split()[0]
    assert eventually(lambda: is_gone(child)), "killed, and perhaps not yet dead on a busy machine"


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def test_jobs_side_by_side_see_their_gpu_and_one_without_time_does_not_start(everything: ModuleType, tmp_path: Path) -> None:
    session = everything.Session(tmp_path, 2, minutes=0.1)
    show = '-c \'import os; print(os.environ["CUDA_VISIBLE_DEVICES"], "{out}")\''
    session.side_by_side([everything.Job("one", 5, show), everything.Job("two", 5, show)], [1])
    session.one_after_another([everything.Job("long", 100, show)], [0])
    assert {end.split(" after")[0] for end in session.ends[:2]} == {"one: status 0", "two: status 0"}
    assert (tmp_path / "one.txt").read_text() == f"1 {tmp_path}/one.jsonl\n"
    assert session.ends[2] == "long: no time left" and not (tmp_path / "long.txt").exists()


def test_dry_run_prints_every_command_and_an_unknown_job_is_refused(everything: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert everything.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# gate, 320 s" in printed and "bench_gate.py --minutes 5" in printed and "--gpus 2 --json" in printed
    with pytest.raises(SystemExit):
        everything.main(["--jobs", "gat"])
    assert "no job 'gat'" in capsys.readouterr().err
