"""Document lengths: exact totals, seeds, the histograms' own statistics, and a user's file."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_longca.errors import InvalidArgument
from pytest_longca.lengths import Lengths
from pytest_longca.sampling import HISTOGRAMS, awkward_lengths, draw, draw_lengths, draw_prefixes, histogram, histogram_for, read_lengths


@given(st.sampled_from((*HISTOGRAMS, "long", "short", "uniform1-8x1024", "uniform3-5x1")), st.integers(0, 200_000), st.integers(0, 1 << 30))
def test_lengths_have_the_exact_total_and_no_empty_document(name: str, total: int, seed: int) -> None:
    lens = draw(f"{name}:{total}:s{seed}")
    assert sum(lens) == total
    assert all(n > 0 for n in lens) or lens == (0,)


def test_a_seed_draws_the_same_and_another_does_not() -> None:
    assert draw_lengths(8192, 4) == draw_lengths(8192, 4) != draw_lengths(8192, 5)
    assert draw("prolong512k:9000:s1")[:4] == (100, 191, 734, 525), "a recipe in an old id draws other lengths now"


@pytest.mark.parametrize(
    ("total", "name"),
    [(1024, "pile"), (8192, "pile"), (8193, "prolong64k"), (65536, "prolong64k"), (65537, "prolong512k"), (524288, "prolong512k")],
)
def test_the_total_chooses_the_histogram(total: int, name: str) -> None:
    assert histogram_for(total) == name
    lens = draw_lengths(total)
    assert isinstance(lens, Lengths) and lens.recipe == f"{name}:{total}:s0"


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_drawn_lengths_follow_the_histogram(name: str) -> None:
    """Shares of rows, within five standard deviations; the published rows sum to one."""
    rows = histogram(name).rows
    assert abs(sum(p for _, _, p in rows) - 1) < 0.02
    rng, total = Random(0), 20_000
    lens = [histogram(name).one(rng) for _ in range(total)]
    for low, high, p in rows:
        share = sum(low <= n < high for n in lens)
        assert abs(share - p * total) <= 5 * (p * total) ** 0.5


def test_a_short_total_has_the_documents_of_8k_tokens_scaled_down() -> None:
    """The share of documents up to 256 of 8K tokens, of which those above a third are left out, within five standard deviations."""
    assert draw_lengths(512, 7).recipe == "short:512:s7"  # type: ignore[attr-defined]  # drawn by a recipe
    rows, num = histogram("pile").rows, 4000
    p = sum(p for _, high, p in rows if high <= 256) / sum(p for _, high, p in rows if high <= 8192 // 3)
    share = sum(draw_lengths(512, seed)[0] <= 256 // 16 for seed in range(num))
    assert abs(share - p * num) <= 5 * (p * (1 - p) * num) ** 0.5
    for total in (0, 1, 2, 5):
        assert sum(draw_lengths(total)) == total


def test_long_documents_hold_60_percent_of_the_tokens() -> None:
    lens = draw("long:524288:s1")
    long = sum(n for n in lens if 8 * 1024 <= n <= 30 * 1024)
    assert 0.55 <= long / 524288 <= 0.8, "60 %, less one cut document, plus what the histogram has of that size"
    assert list(lens) != sorted(lens)


def test_uniform_lengths_are_multiples_within_bounds() -> None:
    lens = draw("uniform2-4x10:5000:s3")
    assert set(lens[:-1]) == {20, 30, 40}


@given(st.integers(0, 5000), st.integers(0, 1000))
def test_prefixes_fit_their_documents(total: int, seed: int) -> None:
    for lens in (draw_lengths(total, seed), tuple(draw_lengths(total, seed))):
        prefixes = draw_prefixes(lens, seed)
        assert len(prefixes) == len(lens) and all(0 <= p <= n for p, n in zip(prefixes, lens, strict=True))
    assert tuple(draw(draw_prefixes(draw_lengths(total, seed), seed).recipe)) == prefixes  # type: ignore[attr-defined]  # of a recipe


@given(st.integers(0, 300), st.none() | st.integers(1, 9), st.integers(0, 1000))
def test_awkward_lengths_have_the_total_and_number(total: int, num: int | None, seed: int) -> None:
    lens = awkward_lengths(Random(seed), total, num)
    assert sum(lens) == total and min(lens) >= 0 and len(lens) == (num or len(lens))


@pytest.mark.parametrize("tile", [64, 128])
def test_awkward_lengths_are_often_a_whole_tile_with_something_behind_it(tile: int) -> None:
    drawn = [awkward_lengths(Random(seed), 150, 3) for seed in range(200)]
    assert sum(tile in lens[:-1] and lens[-1] > 0 for lens in drawn) > 20


@pytest.mark.parametrize(
    "recipe", ["pile", "pile:x:s1", "pile:8:1", "uniform0-4x1:8:s1", "uniform4-2x1:8:s1", "prefix:pile:s1", "pile:-1:s1", ""]
)
def test_a_malformed_recipe_is_refused(recipe: str) -> None:
    with pytest.raises(InvalidArgument, match="lengths"):
        draw(recipe)


def written(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_users_file_is_a_list_or_a_histogram(tmp_path: Path) -> None:
    of_list = read_lengths(written(tmp_path / "list.json", [100, 7]))
    lens = of_list.draw(1000, 0)
    assert sum(lens) == 1000 and set(lens[:-1]) == {100, 7} and lens == of_list.draw(1000, 0) != of_list.draw(1000, 1)
    for data in ([[5, 10, 0.5], [20, 21, 0.5]], {"rows": [[5, 10, 1], [20, 21, 1]]}):
        lens = read_lengths(written(tmp_path / "rows.json", data)).draw(1000, 0)
        assert sum(lens) == 1000 and {n for n in lens[:-1] if not 5 <= n < 10} == {20}
    assert draw_lengths(1000, 0, of_list) == of_list.draw(1000, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[1, 2", "it is not JSON"),
        ([], "it must hold a list of lengths"),
        ({"lengths": [1]}, "it must hold a list of lengths"),
        (7, "it must hold a list of lengths"),
        ([3, 0], "item 1 is 0: it must be between 1 and"),
        ([True, 5], "item 0 is True: it must be an integer"),
        ([[True, 5, 0.5]], r"row 0 is \[True, 5, 0.5\]"),
        ([[1, 5, True]], r"row 0 is \[1, 5, True\]"),
        ([3, "x"], "item 1 is 'x': it must be an integer"),
        ([[1, 2, 0.5], [3, 2, 0.5]], r"row 1 is \[3, 2, 0.5\]: it must be \[from, to, probability\]"),
        ([[1, 2, -0.5]], r"row 0 is \[1, 2, -0.5\]"),
        ([[1, 2]], r"row 0 is \[1, 2\]"),
        ([[1, 2, 0]], "all probabilities are 0"),
    ],
)
def test_a_users_file_that_cannot_be_is_explained(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_lengths(written(tmp_path / "bad.json", data))


def test_a_users_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.json: it cannot be read \(No such file"):
        read_lengths(tmp_path / "none.json")
