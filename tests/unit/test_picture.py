"""The picture of a failing mask."""

import json
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.case import Case
from pytest_longca.drawing import WRONG, as_text, svg, svg_of_facts
from pytest_longca.mask import PredicateMask
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, CausalSlidingWindow
from pytest_longca.picture import draw, drawing, drawing_of, picture
from pytest_longca.subject import Finding


def test_a_short_mask_is_drawn_key_by_key_with_what_is_wrong() -> None:
    assert picture(CausalDocument((2, 3)), rows=[3], keys=[0, 2]).splitlines() == [
        "causal_document, 5 queries (down) x 5 keys, one character each: # all visible, . none, X wrong there, < wrong row, ^ wrong key",
        "#....",
        "##...",
        "..#..",
        "X.X#. <",
        "..###",
        "^ ^",
    ]


def test_a_long_mask_is_drawn_in_tiles() -> None:
    lines = picture(Causal(640, 640), rows=[0, 639], width=64).splitlines()
    assert "a character is 10 x 10" in lines[0]
    assert lines[1] == "+" + "." * 63 + " <"
    assert lines[2] == "#+" + "." * 62
    assert lines[64] == "#" * 63 + "+ <"


def test_a_very_long_mask_costs_no_dense_mask() -> None:
    lines = picture(CausalSlidingWindow(2**19, 2**19, window=2**17), width=64).splitlines()
    assert len(lines) == 65 and all(len(line) == 64 for line in lines[1:])
    assert lines[-1] == "." * 47 + "+" + "#" * 15 + "+"


@given(st.integers(0, 300), st.integers(0, 300), st.integers(8, 64))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_picture_is_wider_or_higher_than_asked(seqlen_q: int, seqlen_kv: int, width: int) -> None:
    lines = picture(Causal(seqlen_q, seqlen_kv), width=width).splitlines()[1:]
    assert len(lines) <= width and all(len(line) <= width for line in lines)


def test_the_head_and_batch_of_the_first_place_are_drawn() -> None:
    mask = PredicateMask(lambda b, h, i, j: (j <= i + h) & (b >= 0), 3, 4, num_heads=2, num_batches=2)
    case = Case(mask=mask, batch=2, heads_q=2, heads_kv=1, head_dim=8)
    findings = [
        Finding("truth", "lse", "no place"),
        Finding("truth", "out", "", {"batch": 1, "head": 1, "rows": [2]}),
        Finding("truth", "dk", "", {"batch": 1, "head": 1, "keys": [3]}),
        Finding("truth", "dq", "", {"batch": 0, "head": 1, "rows": [0]}),
    ]
    lines = draw(case, findings).splitlines()
    assert lines[0].startswith("custom, batch 1, head 1, 3 queries")
    assert lines[1:] == ["##..", "###.", "###X <", "   ^"]


def test_a_finding_that_knows_its_pairs_marks_these_alone() -> None:
    pairs = [(0, 1), (1, 2)]
    findings = [
        Finding("count", "out", "", {"batch": 0, "head": 0, "rows": [0, 1], "keys": [1, 2], "pairs": pairs}),
        Finding("support", "dv", "", {"batch": 0, "head": 0, "rows": [2], "keys": [0]}),
    ]
    found = drawing_of(Case(mask=Causal(3, 3), head_dim=8), findings)
    assert as_text(found).splitlines()[1:] == ["#X. <", "##X <", "###", " ^^"]
    assert paths(svg(found))[-1]["d"] == "M1 0h1v1h-1zM2 1h1v1h-1z"
    assert svg_of_facts(json.loads(json.dumps({"drawing": asdict(found)}))) == svg(found)


@pytest.mark.parametrize(
    ("marked", "legend"),
    [
        ({}, "# all visible, . none"),
        ({"rows": [1]}, "# all visible, . none, < wrong row"),
        ({"keys": [0]}, "# all visible, . none, ^ wrong key"),
        ({"rows": [0], "keys": [1]}, "# all visible, X wrong there, < wrong row, ^ wrong key"),
    ],
)
def test_the_legend_explains_what_the_picture_holds_and_nothing_else(marked: dict[str, list[int]], legend: str) -> None:
    assert picture(Causal(2, 2), **marked).splitlines()[0] == f"causal, 2 queries (down) x 2 keys, one character each: {legend}"  # type: ignore[arg-type]


@pytest.mark.parametrize("findings", [[], [Finding("truth", "out", "shape")]])
def test_findings_without_a_place_leave_the_mask_unmarked(findings: list[Finding]) -> None:
    assert draw(Case(mask=Causal(2, 2), head_dim=8), findings).splitlines()[1:] == ["#.", "##"]


def test_rows_and_keys_beyond_the_mask_are_left_out() -> None:
    text = picture(Causal(4, 4), rows=[1, 99], keys=[2, 77])
    assert text.splitlines()[2] == "##X. <"
    assert "".join(text.splitlines()[1:]).count("<") == 1


def paths(image: str) -> list[dict[str, str]]:
    """The attributes of an SVG's paths; it must be well-formed."""
    root = ElementTree.fromstring(image)
    return [dict(element.attrib) for element in root if element.tag.endswith("path")]


def test_the_image_shows_what_the_text_shows() -> None:
    found = drawing(Causal(4, 4), rows=[1], keys=[2])
    visible, row, key = paths(svg(found))
    assert visible["d"] == "M0 0h1v1h-1zM0 1h2v1h-2zM0 2h3v1h-3zM0 3h4v1h-4z"
    assert (row["d"], key["d"]) == ("M0 1h4v1h-4z", "M2 0h1v4h-1z")
    assert row["fill"] == key["fill"] == WRONG != visible["fill"]
    assert 'viewBox="0 0 4 4"' in svg(found)


def test_a_partly_visible_tile_is_paler_than_a_full_one() -> None:
    full, partial = paths(svg(drawing(Causal(640, 640))))
    assert float(partial["fill-opacity"]) < float(full["fill-opacity"])


def test_an_image_survives_the_way_through_a_record_and_is_small() -> None:
    found = drawing(CausalSlidingWindow(8192, 8192, window=1024), rows=range(100, 200))
    facts = json.loads(json.dumps({"drawing": asdict(found)}))
    assert svg_of_facts(facts) == svg(found)
    assert len(json.dumps(facts)) < 5000 and len(svg(found)) < 10_000


@pytest.mark.parametrize("facts", [{}, {"drawing": None}, {"drawing": {"title": "x"}}, {"drawing": {"title": "", "cells": 1}}])
def test_facts_without_a_drawing_have_no_image(facts: dict[str, Any]) -> None:
    assert svg_of_facts(facts) == ""


def test_nothing_of_a_record_gets_into_an_image_as_markup() -> None:
    hostile = "</title><script>alert(1)</script>\"'"
    fields = {"title": hostile, "cells": [hostile, "#"], "wrong_rows": [0], "wrong_keys": ["1"]}
    image = svg_of_facts({"drawing": fields})
    assert "<script" not in image and len(ElementTree.fromstring(image)) == 4
