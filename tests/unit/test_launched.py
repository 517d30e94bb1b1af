"""Sessions that torchrun started: who writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_longca.collector import PROPERTY, Collector
from pytest_longca.launched import is_silent, muted
from pytest_longca.options import Options, parse
from pytest_longca.outcome import Passed
from pytest_longca.report.record import Record


def options(**given: str) -> Options:
    return parse(lambda option: given.get(option.attribute))


@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("1", False)])
def test_only_rank_0_appends_to_the_records_that_a_run_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, writes: bool
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "records.jsonl"
    chosen = options(mechanisms="usp", resume=str(path))
    assert is_silent(chosen) is not writes
    collector = Collector(muted(chosen) if is_silent(chosen) else chosen, [])
    record = Record(stage="parallel", kernel="naive", mask="full", outcome=Passed().to_json())
    report: Any = SimpleNamespace(when="teardown", user_properties=[(PROPERTY, record.to_json())])
    collector.pytest_runtest_logreport(cast(pytest.TestReport, report))
    assert len(collector.records) == 1
    assert path.exists() is writes
