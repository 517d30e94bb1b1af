"""The tables of docs/block-sparse.md are what their commands print."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "tests/gpu/bench_sparse.py", ROOT / "docs/block-sparse.md"


def test_the_tables_are_those_of_the_records(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    subprocess.run([sys.executable, str(SCRIPT), "--update", str(copy)], check=True, cwd=ROOT, timeout=120)
    assert "bench_sparse.py --table docs/results/" in copy.read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), f"write them: {SCRIPT.name} --update docs/{PAGE.name}"
