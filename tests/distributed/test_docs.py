"""The Python of docs/context-parallel.md, as a stranger would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text()
KERNEL, MECHANISM, BY_HAND, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("script", "launch"),
    [
        pytest.param(MECHANISM, (), id="mechanism"),
        pytest.param(BY_HAND.replace('kernel="naive"', 'kernel="mine:MyBlock"'), (), id="kernel"),
        pytest.param(USE, LAUNCH, id="use"),
    ],
)
def test_what_the_page_shows_runs(tmp_path: Path, script: str, launch: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, *launch, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
