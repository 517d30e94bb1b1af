"""Options: each parser's good and bad input, and what an error says."""

from pathlib import Path

import pytest

from pytest_longca import options
from pytest_longca.errors import InvalidArgument
from pytest_longca.options import OPTIONS, parse, select


def given(**values: str) -> options.Options:
    return parse(lambda option: values.get(option.attribute))


def typed(**values: str) -> options.Options:
    return parse(lambda option: values.get(option.attribute), typed=[name.replace("_", "-") for name in values])


def test_defaults_are_the_default_preset_on_all_masks_with_seed_0() -> None:
    parsed = given()
    assert (parsed.preset, parsed.chosen("masks", "cpu"), parsed.seed, parsed.kernels) == ("default", ("all",), 0, None)


def test_an_option_beats_the_preset_and_the_preset_knows_the_device() -> None:
    assert given(preset="smoke").chosen("dtypes", "cpu") == ("fp32",)
    assert given(preset="smoke").chosen("dtypes", "cuda") == ("bf16",)
    assert given(preset="smoke", dtypes="fp16").chosen("dtypes", "cuda") == ("fp16",)
    assert given(preset="smoke", examples="7").chosen("examples", "cuda") == 7


def test_lengths_heads_sizes_and_times_are_read_with_their_units() -> None:
    parsed = given(seqlens="1k,8k,100", heads="64:8,64:64", memory_limit="80GB", timeout="9m", densities="0.1,1")
    assert parsed.seqlens == (1024, 8192, 100)
    assert parsed.heads == ((64, 8), (64, 64))
    assert parsed.memory_limit == 80 * 10**9
    assert parsed.timeout == 540.0
    assert parsed.densities == (0.1, 1.0)


def test_a_presets_masks_passes_and_densities_are_its_own_until_an_option_says_otherwise() -> None:
    sparse = given(preset="paper-sparse")
    assert sparse.chosen("masks", "cuda") == ("block",)
    assert sparse.chosen("densities", "cuda") == (0.1, 0.2, 0.5, 0.8, 1.0)
    assert sparse.chosen("seqlens", "cuda") == (32768, 65536, 131072)
    dense = given(preset="paper-dense", seqlens="1k", passes="fwd")
    assert (dense.chosen("masks", "cuda"), dense.chosen("seqlens", "cuda")) == (("static",), (1024,))
    assert (dense.chosen("passes", "cuda"), dense.chosen("heads", "cuda")) == (("fwd",), ((64, 8), (64, 64)))


def test_the_gates_limits_are_fractions_and_off_is_none() -> None:
    parsed = given(fail_slower="3%", fail_memory="off", allow="added")
    assert (parsed.fail_slower, parsed.fail_memory, parsed.fail_error) == (0.03, None, 0.25)
    assert (parsed.allow, parsed.forbid) == ({"added"}, None)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("heads", "64:7", "multiple"),
        ("heads", "64", "64:8"),
        ("heads", "8:0", "multiple"),
        ("seqlens", "-1", "positive whole number"),
        ("seqlens", "0", "positive whole number"),
        ("seqlens", "1e9", "positive whole number"),
        ("seqlens", "9000000", "above"),
        ("examples", "many", "positive whole number"),
        ("densities", "1.5", "outside 0"),
        ("densities", "0", "outside 0"),
        ("densities", "x", "not a number"),
        ("preset", "smok", "did you mean 'smoke'"),
        ("dtypes", "bf61", "did you mean 'bf16'"),
        ("passes", "forward", "Known passes: bwd"),
        ("isolate", "of", "did you mean 'off'"),
        ("timeout", "9", "9m"),
        ("timeout", "0s", "above 0"),
        ("budget", "0.0m", "above 0"),
        ("memory_limit", "0GB", "above 0"),
        ("memory_limit", "80", "80GB"),
        ("seed", "-3", "whole number"),
        ("fail_slower", "5", "5%"),
        ("fail_memory", "0%", "or off"),
        ("allow", "added,other-drivr", "did you mean 'other-driver'"),
        ("forbid", "noisy", "unknown verdict"),
        ("budget", "9 minutes", "9m"),
        ("processes", "0", "positive whole number"),
        ("kernels", "", "names nothing"),
        ("masks", " , ", "names nothing"),
        ("seqlens", "", "names nothing"),
        ("mesh", "2x2", "as in 2x2x2"),
        ("examples", "-3", "such as 50"),
        ("world_sizes", "0", "such as 2 or 8"),
        ("head_dims", "0", "such as 64 or 128"),
        ("block_sizes", "x", "such as 64 or 128"),
        ("processes", "0", "such as 2 or 5"),
        ("seqlens", "x", "such as 512 or 8k"),
    ],
)
def test_a_bad_value_names_the_option_and_says_what_to_write(name: str, value: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        given(**{name: value})
    assert str(error.value).startswith(f"--longca-{name.replace('_', '-')}: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "needed", "enough"),
    [
        ("fail_slower", "3%", "--longca-baseline=FILE", {"baseline": "b.jsonl"}),
        ("fail_memory", "off", "--longca-baseline=FILE", {"baseline": "b.jsonl"}),
        ("fail_error", "3%", "--longca-baseline=FILE", {"baseline": "b.jsonl"}),
        ("allow", "added", "--longca-baseline=FILE", {"baseline": "b.jsonl"}),
        ("forbid", "too-noisy", "--longca-baseline=FILE", {"baseline": "b.jsonl"}),
        ("mesh", "1x2x1", "--longca-mechanisms=NAMES", {"mechanisms": "usp"}),
        ("mesh", "1x2x1", "--longca-mechanisms=NAMES", {"preset": "paper-cp"}),
        ("world_sizes", "2", "--longca-mechanisms=NAMES", {"mechanisms": "usp"}),
    ],
)
def test_an_option_that_means_nothing_alone_is_refused_where_it_was_typed(
    name: str, value: str, needed: str, enough: dict[str, str]
) -> None:
    flag = f"--longca-{name.replace('_', '-')}"
    with pytest.raises(InvalidArgument, match=f"^{flag}: it means nothing without .*: add {needed}"):
        typed(**{name: value})
    assert given(**{name: value}).values[name] == typed(**{name: value}, **enough).values[name]


def test_a_kernel_to_time_in_turns_with_means_something_without_a_gate() -> None:
    assert typed(anchor="sdpa").anchor == "sdpa"


def test_an_error_names_the_place_that_it_was_told() -> None:
    with pytest.raises(InvalidArgument, match=r"^longca_examples in tox\.ini: 'many' is not"):
        parse(lambda option: {"examples": "many"}.get(option.name), places={"examples": "longca_examples in tox.ini"})


def test_the_help_and_the_readme_show_both_forms_of_a_file_of_lengths() -> None:
    (help_text,) = (option.help for option in OPTIONS if option.name == "lengths")
    for text in (help_text, (Path(__file__).parents[2] / "README.md").read_text()):
        assert "[100, 7, 2048]" in text and "[[1, 128, 0.6], [128, 4096, 0.4]]" in text


def test_select_expands_groups_keeps_order_and_drops_repeats() -> None:
    known, groups = ("a", "b", "c"), {"ab": ("a", "b")}
    assert select("mask", ("c", "ab", "a"), known, groups) == ("c", "a", "b")
    assert select("mask", None, known, groups) == known


def test_select_suggests_the_closest_name() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'causal'"):
        select("mask", ("casual",), ("causal", "full"))


def test_every_option_has_help_and_a_name_that_pytest_takes() -> None:
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)
    assert all(option.help and option.flag.startswith("--longca-") for option in OPTIONS)
