"""The page: everything of a record is data in it, and it is small. How it behaves in a browser is in test_report_browser.py."""

import json
import re
from typing import Any

import pytest

from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS, load
from pytest_longca.ids import format_case
from pytest_longca.outcome import Passed, Unsupported, Wrong
from pytest_longca.report.compare import compare
from pytest_longca.report.gallery import draw, gallery
from pytest_longca.report.html import embed, environment, html_report
from pytest_longca.report.markdown import code, escape, markdown
from pytest_longca.report.record import Record, shape_of
from pytest_longca.report.view import FIELDS, TEXTS, view

HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028|`*_[x](y)\nsecond line"


def timing(kernel: str = "flex", ms: float = 2.0, **more: Any) -> Record:
    case = Case(mask=load(MASKS["causal"]).default(256), heads_q=4, heads_kv=2, direction=Direction.FWD)
    values: dict[str, Any] = {
        "stage": "timing",
        "kernel": kernel,
        "mask": "causal",
        "outcome": Passed().to_json(),
        "case": format_case(case),
        "shape": shape_of(case),
        "direction": "fwd",
        "samples_ms": [ms] * 30,
        "flop": 10**12,
        "area": case.area,
        "peaks": {"matmul_tflop_per_s": 800.0},
        "device": "NVIDIA H200",
        "verdicts": [{"tensor": "out", "error_over_limit": 0.25}, {"tensor": "dk", "error_over_limit": "inf"}],
    }
    return Record(**values | more)


def decoded(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a view as dicts, as the page's script reads them."""
    return [
        {name: page["strings"][value] if name in TEXTS else value for name, value in zip(FIELDS, row, strict=True)} for row in page["rows"]
    ]


def embedded(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_view_holds_the_figures_of_a_record() -> None:
    (row,) = decoded(view([timing()]))
    assert row["tflop_per_s"] == 500.0
    assert row["of_peak"] == 0.625
    assert row["errors"] == [["out", 0.25], ["dk", "infinite"]]
    assert row["heads"] == "4:2 d64 fp32"
    assert row["is_trusted"] == 1


@pytest.mark.parametrize(
    ("name", "blocks"), [("uniform_block", "64 at 0.5"), ("variable_block", "variable 32-64 at 0.5"), ("causal", None)]
)
def test_shape_says_what_blocks_a_block_mask_has(name: str, blocks: str | None) -> None:
    case = Case(mask=load(MASKS[name]).default(256))
    record = timing(mask=name, case=format_case(case), shape=shape_of(case))
    assert record.shape.get("blocks") == blocks
    (row,) = decoded(view([record]))
    assert row["blocks"] == (blocks or "")
    assert row["shape"] == f"256 1:1 d64 fp32{f' blocks {blocks}' if blocks else ''}"


def test_page_and_terminal_have_one_figure_for_several_processes() -> None:
    records = [timing(ms=ms, process=f"p{ms}", facts={"shared_machine": True}) for ms in (2.0, 9.0, 3.0, 4.0)]
    page = view([Record(stage="probes", kernel="flex", mask="causal", outcome=Passed().to_json()), *records])
    assert page["timed"] == [[1, 3.5, 2.0, 9.0, 285.71, 0.35714]]
    assert decoded(page)[1]["is_rough"] == 1
    assert "Rough: other tests ran beside the timings." in markdown(records)
    assert "| 3.5 | 285.7 TFLOP/s | 36% |" in markdown(records)


def test_no_speed_of_a_kernel_that_was_not_verified_reaches_the_page() -> None:
    wrong = timing(outcome=Wrong("off").to_json())
    (row,) = decoded(view([wrong]))
    assert [row[name] for name in ("median_ms", "p20_ms", "p80_ms", "tflop_per_s", "of_peak", "is_trusted")] == [None] * 5 + [0]
    elsewhere = Record(stage="examples", kernel="flex", mask="causal", outcome=Wrong("off").to_json())
    assert decoded(view([timing(), elsewhere]))[0]["is_trusted"] == 0


def test_hostile_names_and_reasons_stay_data() -> None:
    records = [timing(kernel=HOSTILE, command=HOSTILE), Record(stage="s", kernel="k", mask=HOSTILE, outcome=Unsupported(HOSTILE).to_json())]
    page = html_report(records, title=HOSTILE)
    assert page.count("</script>") == 2, "the data's and the script's own end"
    assert "<img" not in page
    assert HOSTILE in embedded(page)["strings"]


def test_embedded_json_reads_back_whatever_is_in_it() -> None:
    value = {"text": "<!-- <script> </script> & \u2028 \u2029 \U0001f600"}
    assert json.loads(embed(value)) == value
    assert not set("<>&\u2028\u2029") & set(embed(value))


def test_page_asks_the_network_for_nothing() -> None:
    page = html_report([timing()])
    addresses = set(re.findall(r"https?://[^\s\"')]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the SVG namespace, which nobody fetches"
    assert not re.search(r"<link|@import|url\(|src=", page)
    assert "default-src 'none'" in page


def test_five_thousand_records_weigh_less_than_six_megabytes() -> None:
    records = [timing(f"kernel_{number % 14}", 1.0 + number, replay=f"pytest --longca-case={number}") for number in range(5000)]
    assert len(html_report(records).encode()) < 6_000_000


def test_page_shows_the_comparison_with_its_changes() -> None:
    old = [timing(process=f"p{number}") for number in range(5)]
    new = [timing(ms=3.0, process=f"q{number}") for number in range(2)]
    gate = embedded(html_report(new, compare(old, new)))["gate"]
    assert gate["exit_code"] == 1
    assert "times are absolute" in gate["basis"]
    assert gate["rows"][0][0] == "slower"
    assert gate["rows"][0][3] == 0.5


def test_environment_shows_each_value_once_and_differing_ones_together() -> None:
    records = [timing(versions={"torch": "2.11"}), timing(versions={"torch": "2.13"}, command="pytest --longca-html=r.html")]
    found = dict(environment(records))
    assert found["torch"] == "2.11, 2.13"
    assert found["command"] == "pytest --longca-html=r.html"
    assert found["measured matmul_tflop_per_s"] == "800"


@pytest.mark.parametrize("name", MASKS)
def test_picture_of_a_short_mask_is_the_mask(name: str) -> None:
    mask = load(MASKS[name]).default(128)
    dense = mask.dense()[0, 0]
    assert draw(mask, grid=max(dense.shape)) == tuple("".join("01"[bit] for bit in row) for row in dense.tolist())


def test_gallery_has_one_picture_a_mask_and_none_of_unknown_ones() -> None:
    unknown = [timing(mask="theirs", case="theirs(seqlen=7)/b1"), timing(mask="broken", case="?")]
    (picture,) = gallery([timing(), timing(kernel="sdpa"), *unknown])
    assert (picture.mask, len(picture.rows), len(picture.rows[0])) == ("causal", 64, 64)
    assert picture.density == pytest.approx(257 / 512)


def test_markdown_has_the_matrix_the_reasons_and_the_fastest() -> None:
    refused = Record(stage="s", kernel="vsa", mask="causal", outcome=Unsupported("takes a block map").to_json())
    text = markdown([timing(), refused])
    assert "| mask | flex | vsa |" in text
    assert "| causal | fwd\\* | - |" in text
    assert "| vsa | unsupported: takes a block map | causal |  |" in text
    assert "| causal | 256 4:2 d64 fp32 | fwd | flex | 2 | 500 TFLOP/s | 62% |  |" in text


def test_markdown_shows_the_gate_first() -> None:
    old, new = [timing(process=f"p{number}") for number in range(5)], [timing(ms=3.0, process=f"q{number}") for number in range(2)]
    text = markdown(new, compare(old, new))
    assert text.index("## Gate: REGRESSED (slower): 1 case compared") < text.index("| mask |")
    assert "\n\nlimits: slower 5%, memory 5%, error 25%; times are absolute, without an anchor\n\n|" in text
    assert "ratios to an\\_anchor in the same run" in markdown(new, compare(old, new, anchor="an_anchor"))
    assert re.search(r"\| slower \| time \| `flex causal.*` \| \+50.0% where 5% must be caught \|", text)


def test_markdown_keeps_hostile_text_inside_its_cell() -> None:
    text = markdown([Record(stage="s", kernel="k", mask="m", outcome=Unsupported(HOSTILE).to_json())])
    (line,) = [line for line in text.splitlines() if "unsupported:" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == 5
    assert "<" not in line
    assert "second line" in line
    assert escape("a|b") == "a\\|b"
    assert code("pytest --longca-case='a_b|`c`'") == "`pytest --longca-case='a_b\\|'c''`"
