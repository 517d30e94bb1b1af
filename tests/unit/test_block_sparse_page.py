"""The tables of docs/block-sparse.md are what their commands print."""

import shutil
import subprocess
import sys
from pathlib import Path

from pytest_longca.report.record import Record

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "tests/gpu/bench_sparse.py", ROOT / "docs/block-sparse.md"


def test_the_tables_are_those_of_the_records(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    subprocess.run([sys.executable, str(SCRIPT), "--update", str(copy)], check=True, cwd=ROOT, timeout=120)
    assert "bench_sparse.py --table docs/results/" in copy.read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), f"write them: {SCRIPT.name} --update docs/{PAGE.name}"


def test_a_kernel_without_a_backward_shows_the_plan_of_its_forward(tmp_path: Path) -> None:
    def line(kernel: str, direction: str, plan_ms: float) -> str:
        lengths = {"batch": 1, "seqlen_q": 1024, "seqlen_kv": 1024, "heads_q": 8, "heads_kv": 8, "head_dim": 64, "head_dim_v": 64}
        shape = {**lengths, "dtype": "bf16", "blocks": "64 at 0.5"}
        about = {"stage": "timing", "mask": "uniform_block", "case": "x", "outcome": {"kind": "passed"}, "shape": shape}
        return Record(**about, kernel=kernel, direction=direction, samples_ms=[1.0, 2.0, 3.0], flop=4 * 10**12, plan_ms=plan_ms).to_line()

    file = tmp_path / "records.jsonl"
    file.write_text("\n".join([line("both", "bwd", 5.0), line("both", "fwd", 3.0), line("forward", "fwd", 4.0)]), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--table", str(file)]
    table = subprocess.run(command, check=True, cwd=ROOT, timeout=120, capture_output=True, text=True).stdout.splitlines()
    cells = "| 1,024 | 8:8 | 64 | 0.5 |"
    assert table[2:] == [
        "| forward | | | | | |", f"{cells} 2000 | 2000 |",
        "| backward | | | | | |", f"{cells} 2000 |  |",
        "| plan, ms | | | | | |", f"{cells} 5.0 | 4.0 |",
    ]  # fmt: skip
