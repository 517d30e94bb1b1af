"""Files of records: strict reading, whole writing, and lines that survive killed and competing writers."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import OUTCOMES, Passed
from pytest_longca.report.record import SCHEMA, Record
from pytest_longca.report.store import read_records, write_atomically, write_records
from pytest_longca.report.writer import Writer

GOOD = Record(stage="timing", kernel="flex", mask="causal", outcome=Passed().to_json(), samples_ms=[1.0, 2.0])

APPEND = """
import sys
from pytest_longca.report.record import Record
from pytest_longca.report.writer import Writer
writer = Writer(sys.argv[1])
for number in range(int(sys.argv[3])):
    writer.write(Record(stage="case", kernel=sys.argv[2], mask="m" * 3000, outcome={"kind": "passed"}, num_examples=number))
print("written", flush=True)
sys.stdin.read()
"""


def test_a_record_survives_its_line() -> None:
    assert Record.from_line(GOOD.to_line()) == GOOD


def test_numbers_in_a_line_are_finite_and_infinities_are_strings() -> None:
    line = Record(stage="s", kernel="k", mask="m", outcome={"kind": "passed"}, verdicts=[{"error_over_limit": math.inf}]).to_line()
    assert json.loads(line)["verdicts"] == [{"error_over_limit": "inf"}]


def test_half_a_character_in_a_text_is_written_as_one_that_any_file_holds() -> None:
    record = dataclasses.replace(GOOD, reason="no file a\udc80b", facts={"path\udc80": ["\ud800"]})
    back = Record.from_line(record.to_line())
    assert (back.reason, back.facts) == ("no file a?b", {"path?": ["?"]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no records"),
        ("\n\n", "holds no records"),
        ("[]\n", "line 1: not a record"),
        ("17\n", "line 1: not a record"),
        ('{"a": 1}\n', "line 1: not a record"),
        (GOOD.to_line() + "\n" + GOOD.to_line()[:50], r"line 2: not a record.*delete this last line"),
        (GOOD.to_line()[:50] + "\n" + GOOD.to_line() + "\n", "line 1: not a record"),
        (GOOD.to_line().replace(f'"schema":{SCHEMA}', '"schema":99') + "\n", "schema 99; this version reads schema 1"),
        (GOOD.to_line().replace('"kernel"', '"colonel"') + "\n", "not a record: .*colonel"),
        (GOOD.to_line().replace('"mask":"', '"mask":null,"command":"'), "not a record: mask is None"),
        (GOOD.to_line().replace('"world_size":1', '"world_size":"1"'), "not a record: world_size is '1'"),
        (GOOD.to_line().replace('"verdicts":[', '"verdicts":7,"device_kernels":['), "not a record: verdicts is 7"),
        ("[" * 100_000, "line 1: not a record"),
        (GOOD.to_line().replace('"shape":{}', '"shape":{"seqlen_q":9}'), "not a record: shape lacks batch, seqlen_kv, heads_q"),
        (GOOD.to_line().replace('"flex"', r'"flex\udc80"'), "not a record: .*surrogates not allowed"),
        (GOOD.to_line().replace('"passed"', '"splendid"') + "\n", "not a record: 'splendid'"),
    ],
)
def test_a_file_that_is_no_file_of_records_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_records(path)
    assert path.read_text() == text


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_records(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_records(tmp_path / "binary")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "baseline.jsonl"
    write_records(path, [GOOD])
    assert read_records(path) == [GOOD]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidArgument, match=r"No space left on device.*nothing was changed"):
        write_atomically(path, "half")
    assert read_records(path) == [GOOD]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent.*cannot be written"):
        write_atomically(tmp_path / "absent" / "report.html", "")


def test_writer_appends_to_what_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        writer = Writer(tmp_path / "records.jsonl")
        writer.write(GOOD)
        writer.close()
        writer.close()
    assert read_records(tmp_path / "records.jsonl") == [GOOD, GOOD]


def test_writer_goes_on_after_the_torn_line_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"torn')
    writer = Writer(path)
    writer.write(GOOD)
    writer.close()
    assert path.read_text().splitlines() == ['{"torn', GOOD.to_line()]


def test_an_unwritable_path_loses_nothing_and_says_where_it_went(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "absent" / "records.jsonl")
    writer.write(GOOD)
    writer.close()
    assert writer.notice is not None
    assert str(writer.path) in writer.notice
    assert "No such file or directory" in writer.notice
    assert read_records(writer.path) == [GOOD]
    writer.path.unlink()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_loses_no_later_record() -> None:
    writer = Writer("/dev/full")
    writer.write(GOOD)
    writer.close()
    assert read_records(writer.path) == [GOOD]
    writer.path.unlink()


def test_lines_of_killed_and_competing_writers_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", APPEND, path, f"w{number}", "200"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for number in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    records = read_records(path)
    assert len(records) == 600
    assert [record.num_examples for record in records if record.kernel == "w1"] == list(range(200))


def test_every_outcome_is_known_to_records() -> None:
    for kind, cls in OUTCOMES.items():
        fields = {name: "x" for name in ("reason", "entry", "how") if name in cls.__dataclass_fields__}
        record = Record(stage="s", kernel="k", mask="m", outcome={"kind": kind, **fields})
        assert Record.from_line(record.to_line()).kind == kind
        assert record.result.kind == kind
