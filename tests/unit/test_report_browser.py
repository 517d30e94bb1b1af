"""The page in a real browser: what it draws, that it filters and sorts, and how fast. Skipped where Chromium is not installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_longca.catalogue import KERNELS, MASKS
from pytest_longca.outcome import Passed, Unsupported, Wrong
from pytest_longca.report.html import html_report
from pytest_longca.report.record import Record
from tests.unit.test_parallel_scaling import scaling_records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=document.title='taken'></script><script>document.title='taken'</script>"
REPLAY = "pytest --longca-kernels=naive --longca-case='full(seqlen_q=16,seqlen_kv=20)/b2/h4:2/d64/bf16/fwd_bwd/s0'"
OFFLINE = ("disable-background-networking", "disable-component-update", "disable-sync")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", *OFFLINE)
LENGTHS = (1024, 4096, 16384)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROBE = """
<script>
const said = {};
said.errors = window.pageErrors;
said.title = document.title;
said.images = document.images.length;
said.heatRows = document.querySelectorAll("#heat tbody tr").length;
said.charts = document.querySelectorAll("#lengths svg[role=img]").length;
said.legend = document.getElementById("legend").textContent;
const find = document.getElementById("find");
find.value = "slow";
find.dispatchEvent(new Event("input", { bubbles: true }));
said.found = document.documentElement.dataset.records;
find.value = "";
find.dispatchEvent(new Event("input", { bubbles: true }));
const reason = document.querySelector("#records tr.below .reason").getBoundingClientRect();
said.reason = [reason.left >= 0, reason.right <= document.documentElement.clientWidth];
const rows = () => [...document.querySelectorAll("#records tbody tr:not(.below)")];
const cells = () => rows().map(row => Number(row.cells[SORTED].textContent)).filter(Boolean);
const header = () => [...document.querySelectorAll("#records thead button")].find(button => button.textContent === "TFLOP/s");
const SORTED = [...document.querySelectorAll("#records thead th")].findIndex(th => th.textContent === "TFLOP/s");
header().click();
said.descending = cells().slice(0, 3);
header().click();
said.ascending = cells().slice(0, 3);
said.first = document.querySelector("main section").id;
said.failures = [...document.querySelectorAll("#failures .failure")].map(failure => failure.querySelector("h3").textContent);
said.failed = document.querySelector("#failures .failure").textContent;
said.failedDrawn = document.querySelectorAll("#failures svg").length;
document.querySelector("#failures .replay button").click();
said.selected = getSelection().toString();
document.querySelector("#heat td.wrong button").click();
said.detail = document.getElementById("detail").textContent;
said.drawn = [...document.querySelectorAll("#detail .drawings svg path")].filter(path => path.getBBox().width > 0).length;
said.width = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const output = document.createElement("output");
output.id = "said";
output.textContent = JSON.stringify(said).replaceAll("<", "\\\\u003c");
document.body.append(output);
</script>
"""


def records(count: int) -> list[Record]:
    """`count` records over all kernels, masks and lengths: timed, refused, and one wrong."""
    found = []
    for number in range(count):
        kernel, mask = list(KERNELS)[number % 3], list(MASKS)[number // 3 % len(MASKS)]
        seqlen = LENGTHS[number // 42 % 3]
        shape = {"batch": 1, "seqlen_q": seqlen, "seqlen_kv": seqlen, "heads_q": 64, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
        common = {"kernel": kernel, "mask": mask, "shape": {**shape, "dtype": "bf16"}, "case": f"{mask}({seqlen})", "direction": "fwd"}
        figures = {"samples_ms": [1.0 + number / count] * 30, "flop": 10**11, "plan_ms": 1.0, "peak_bytes": 2**30}
        verdicts = [{"tensor": "out", "error_over_limit": 0.3}]
        found.append(Record(stage="timing", outcome=Passed().to_json(), verdicts=verdicts, **common, **figures))
    drawing = {"title": HOSTILE, "cells": ["#.", "##"], "wrong_rows": [1], "wrong_keys": []}
    wrong = {"outcome": Wrong(f"slow and off {HOSTILE}").to_json(), "facts": {"drawing": drawing}, "replay": REPLAY}
    found[0] = Record(stage="examples", kernel="naive", mask="full", **wrong)
    found[1] = Record(stage="examples", kernel=HOSTILE, mask="full", outcome=Unsupported("takes no mask").to_json())
    return found


def dumped(page: str, folder: Path, size: str = "1280,900") -> str:
    """The page's DOM after its scripts ran in a browser without a network."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = (*FLAGS, "dump-dom", f"user-data-dir={folder / 'profile'}", f"window-size={size}")
    command = [str(CHROMIUM), *(f"--{flag}" for flag in flags), path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def probed(page: str, probe: str = PROBE) -> str:
    watch = "<script>window.pageErrors = []; addEventListener('error', event => pageErrors.push(event.message));</script>"
    return page.replace("<body>", "<body>" + watch).replace("</body>", probe + "</body>")


@pytest.mark.parametrize("size", ["1280,900", "500,900"], ids=["desk", "phone"])
def test_page_draws_filters_and_sorts_and_treats_names_as_data(size: str, tmp_path: Path) -> None:
    dom = dumped(probed(html_report(records(252))), tmp_path, size)
    found = re.search(r'<output id="said">(.*?)</output>', dom, re.DOTALL)
    assert found, dom[-2000:]
    said = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert said["errors"] == []
    assert (said["title"], said["images"]) == ("Attention kernels", 0)
    assert (said["heatRows"], said["charts"]) == (len(MASKS), 2)
    assert "disagrees with the reference" in said["legend"]
    assert said["found"] == "1"
    assert said["descending"] == sorted(said["descending"], reverse=True)
    assert said["ascending"] == sorted(said["ascending"])
    assert said["ascending"][0] < said["descending"][0]
    assert (said["first"], said["failures"]) == ("failures", ["naive on full: disagrees with the reference"])
    assert "slow and off <img" in said["failed"]
    assert (said["failedDrawn"], said["selected"]) == (1, REPLAY)
    assert said["reason"] == [True, True], "on the page, and not beyond its right edge"
    assert "slow and off <img" in said["detail"]
    assert said["drawn"] == 2, "the visible tiles and the wrong row"
    assert said["width"] <= 0, "nothing but the tables scrolls sideways"


COLUMNS_PROBE = """
<script>
const heads = id => [...document.querySelectorAll(`#${id} th[scope=col]`)].map(th => th.textContent).filter(Boolean);
const rows = [...document.querySelectorAll("#fastest tbody tr")].map(row => [...row.cells].map(cell => cell.textContent));
const said = { errors: window.pageErrors, fastest: heads("fastest"), records: heads("records"), plan: heads("plan"), rows };
said.failures = document.getElementById("failures").hidden;
said.rough = document.getElementById("rough").hidden;
const output = document.createElement("output");
output.id = "said";
output.textContent = JSON.stringify(said);
document.body.append(output);
</script>
"""


def said_of_columns(found: list[Record], folder: Path) -> dict[str, Any]:
    match = re.search(r'<output id="said">(.*?)</output>', dumped(probed(html_report(found), COLUMNS_PROBE), folder), re.DOTALL)
    assert match
    said: dict[str, Any] = json.loads(match[1])
    assert said["errors"] == []
    return said


def timed(kernel: str, samples: list[float], **more: Any) -> Record:
    values = {"mask": "causal", "case": "c", "direction": "fwd", "flop": 10**11, "samples_ms": samples, "plan_ms": 1.0, "launch_ms": 0.1}
    return Record(**{"stage": "timing", "kernel": kernel, "outcome": Passed().to_json(), **values, **more})


def test_columns_that_no_record_fills_are_left_out_and_so_is_what_a_cpu_does_not_launch(tmp_path: Path) -> None:
    said = said_of_columns([timed("naive", [1.0] * 30, device="CPU")], tmp_path)
    assert said["fastest"] == ["mask", "kernel", "TFLOP/s", "ms", "pass", "shape"]
    assert not {"of peak", "memory", "reason"} & set(said["records"])
    assert said["plan"] == ["kernel", "mask", "shape", "pass", "plan (ms)", "in calls", "call (ms)"]
    assert said["failures"] and said["rough"]


def test_columns_that_a_record_fills_are_there_and_kernels_that_overlap_are_tied(tmp_path: Path) -> None:
    more: dict[str, Any] = {"device": "NVIDIA H200", "peak_bytes": 2**30, "peaks": {"matmul_tflop_per_s": 800.0}, "compile_ms": 5.0}
    rough = {"facts": {"shared_machine": True}}
    found = [timed("naive", [2.0, 2.1, 2.2], **more), timed("sdpa", [2.05, 2.15, 2.25], **more, **rough), timed("flex", [4.2] * 3, **more)]
    said = said_of_columns(found, tmp_path)
    assert said["fastest"] == ["mask", "kernel", "TFLOP/s", "ms", "next", "pass", "shape", "of peak", "memory"]
    assert said["plan"][-3:] == ["compile (ms)", "launch (ms)", "call (ms)"]
    (row,) = said["rows"]
    assert row[1] == "naive"
    assert row[4] == "tied with sdpa, then flex (2x the time)"
    assert not said["rough"]


SCALING_PROBE = """
<script>
const section = document.getElementById("scaling"), count = selector => section.querySelectorAll(".charts " + selector).length;
const said = { errors: window.pageErrors, hidden: section.hidden, charts: count("svg[role=img]"), titles: [] };
said.open = count("path.open");
said.assumed = count("path.assumed");
said.titles = [...section.querySelectorAll(".charts path title")].map(title => title.textContent);
said.keys = section.querySelector(".kinds").textContent;
said.notes = section.querySelector(".errors").textContent;
said.lengths = document.getElementById("lengths").hidden;
said.inside = [...section.querySelectorAll(".charts svg")].every(svg => [...svg.querySelectorAll("path")].every(path => {
  const box = path.getBBox(), view = svg.viewBox.baseVal;
  return box.x >= 0 && box.y >= 0 && box.x + box.width <= view.width && box.y + box.height <= view.height;
}));
said.width = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const output = document.createElement("output");
output.id = "said";
output.textContent = JSON.stringify(said);
document.body.append(output);
</script>
"""


@pytest.mark.parametrize("size", ["1280,900", "500,900"], ids=["desk", "phone"])
def test_speed_against_gpus_is_drawn_with_measured_predicted_and_simulated_apart(size: str, tmp_path: Path) -> None:
    found = re.search(
        r'<output id="said">(.*?)</output>', dumped(probed(html_report(scaling_records()), SCALING_PROBE), tmp_path, size), re.DOTALL
    )
    assert found
    said = json.loads(found[1])
    assert (said["errors"], said["hidden"], said["charts"], said["inside"]) == ([], False, 2, True)
    assert said["titles"].count("ulysses, 2 GPUs: 300 TFLOP/s per GPU, measured") == 2, "one in each pass"
    assert sum("8 GPUs" in title and "simulated: one rank computes, communication is off" in title for title in said["titles"]) == 4
    assert said["open"] == 6 and said["assumed"] == 2, "two, four and eight GPUs in each pass, of which four were not run"
    assert "measured" in said["keys"] and "simulated" in said["keys"]
    assert said["notes"].startswith("2 GPUs: the model is at most ")
    assert said["lengths"], "no length belongs to these records"
    assert said["width"] <= 0


def test_five_thousand_records_open_in_less_than_a_second(tmp_path: Path) -> None:
    page = html_report(records(5000))
    opened = []
    for _ in range(3):  # the best of three: the machine may be busy
        found = re.search(r'data-ms="(\d+)"', dumped(page, tmp_path))
        assert found
        opened.append(int(found[1]))
        if min(opened) < 1000:
            break
    assert min(opened) < 1000
