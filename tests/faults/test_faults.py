"""Every fault model is caught by the default checks, in seconds, with a message that names what is wrong."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_longca.checknames import CHECK_INFO, GROUPS
from pytest_longca.checks import verify
from pytest_longca.faults import FAULTS
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.machine import CPU
from pytest_longca.outcome import Wrong
from pytest_longca.selftest import hunt, selftest
from pytest_longca.strategies import probe_cases

EXPECTED = {
    "window_left_wide": ("count", "reads key 0, which the mask hides; 132 pairs (query, key) in all: all 1 left of the diagonal"),
    "window_left_narrow": ("count", "does not read key 1, which the mask shows; 132 pairs (query, key) in all"),
    "window_right_wide": ("count", "which the mask hides; 96 pairs (query, key) in all: all 4 right of the diagonal"),
    "window_ignored": ("count", "which the mask hides"),
    "window_backward_wide": ("support", "its own dq is wrong"),
    "global_rows_lost": ("count", "query 0 does not read key 12, which the mask shows"),
    "causal_top_left": ("count", "query 0 does not read key 1, which the mask shows"),
    "causal_strict": ("count", "which the mask shows; 144 pairs (query, key) in all: all on the diagonal"),
    "causal_one_ahead": ("count", "which the mask hides; 132 pairs (query, key) in all: all 1 right of the diagonal"),
    "backward_mask_dropped": ("support", "its own dq is wrong"),
    "backward_only_causal": ("support", "its own dq is wrong"),
    "backward_pairs_dropped": ("support", "do is non-zero in query 11 of head 0 alone: its own dq is wrong"),
    "backward_tile_dropped": ("support", "its own dq is wrong (0, due"),
    "document_leak": ("count", "query 0 reads key 1, which the mask hides; 12 pairs (query, key) in all: all 1 right of the diagonal"),
    "document_first_lost": ("count", "query 1 does not read key 1, which the mask shows"),
    "documents_merged": ("count", "which the mask hides"),
    "document_lengths_reversed": ("count", "which the mask hides"),
    "question_half_shared": ("count", "does not read key 6, which the mask shows; 72 pairs (query, key) in all: all in query 12"),
    "blocks_from_start": ("count", "which the mask hides"),
    "prefix_long": ("count", "reads key 9, which the mask hides; 108 pairs (query, key) in all: all at key 9"),
    "prefix_short": ("count", "does not read key 8, which the mask shows; 96 pairs (query, key) in all: all at key 8"),
    "prefixes_long": ("count", "which the mask hides; 72 pairs (query, key) in all"),
    "prefixes_shifted": ("count", "which the mask"),
    "phantom_zero_keys": ("count", "the weight 0.0625, and its 12 visible keys share 1 equally"),
    "phantom_large_keys": ("count", "and its 12 visible keys share 1 equally"),
    "phantom_nan_keys": ("count", "gives NaN or infinity for key 0"),
    "last_tile_dropped": ("count", "query 0 does not read key 16, which the mask shows"),
    "finite_sentinel": ("count", "which sees nothing: -inf is due"),
    "block_map_of_other_head": ("count", "which the mask"),
    "block_map_ignored": ("count", "which the mask hides"),
    "block_map_transposed": ("count", "which the mask"),
    "block_map_shifted": ("count", "which the mask"),
    "block_map_backward_ignored": ("support", "its own dq is wrong"),
    "empty_nan": ("count", "gives NaN or infinity for key 0, in rows that see nothing, which must give 0"),
    "empty_mean": ("count", "which the mask hides"),
    "empty_lse_zero": ("count", "lse: is 0 at batch 0, head 0, query 0, which sees nothing: -inf is due"),
    "empty_dq_nan": ("support", "gets a dq of nan"),
    "dq_tail_unwritten": ("support", "dq"),
    "dv_tail_unwritten": ("support", "dv"),
    "dq_accumulated": ("layout", "dq"),
    "last_row_repeated": ("count", "query 11 does not read key 11, which the mask shows; 12 pairs (query, key) in all"),
    "group_not_summed": ("support", "of head 1 alone: key 0 of key/value head 0 gets no dk, and the query sees it"),
    "group_averaged": ("support", "times what is due, which is 1 / the group"),
    "group_last_dropped": ("support", "of head 2 alone: key 0 of key/value head 0 gets no dk, and the query sees it"),
    "heads_interleaved": ("count", "only heads 1, 4, never the first of a group of 3: the head map"),
    "heads_first": ("count", "only heads 3, 4, 5"),
    "heads_reversed": ("count", "does not read key 0, which the mask shows"),
    "q_strides_ignored": ("layout", "out: with q bhsd"),
    "k_strides_ignored": ("layout", "out: with q bhsd"),
    "v_strides_ignored": ("layout", "out: with q fused, k bhsd, v padded"),
    "do_strides_ignored": ("layout", "dq: with q bhsd"),
    "offset_ignored": ("layout", "out: with q bhsd"),
    "dq_scaled_twice": ("support", "times what is due, which is the scale"),
    "dk_scaled_twice": ("support", "times what is due, which is the scale"),
    "dk_unscaled": ("support", "times what is due, which is 1 / the scale"),
    "custom_scale_ignored": ("truth", "looks like scale 1/sqrt(head_dim), not"),
    "scale_clipped": ("truth", "out: batch "),
    "lse_base_2": ("count", "(this is log2: the lse is in base 2)"),
    "lse_negative": ("count", "is -0.693147 at batch 0, head 0, query 1, which sees 2 keys with score 0: log 2 = 0.693147 is due"),
    "lse_rounded": ("", "lse"),
    "low_precision_softmax": ("support", "its own dq is wrong"),
    "no_maximum": ("count", "lse: is 0"),
    "padding_overflows": ("", "dq"),
    "delta_dropped": ("support", "dq"),
    "delta_halved": ("support", "dq"),
    "dk_one_key_one_percent": ("support", "dk of key 6 of key/value head 0 is wrong"),
    "out_corner_zero": ("", "out"),
    "race_out": ("", "out"),
    "race_dv": ("", "dv"),
    "mask_cached_by_shape": ("", ""),
    "backward_of_latest": ("state", "dk: with another case"),
    "out_buffer_reused": ("state", "out: with another case"),
    "q_changed_in_place": ("support", "q: the call wrote to the operand q"),
    "do_changed_in_place": ("support", "do: the call wrote to the operand do"),
    "reads_beyond_values": ("layout", "out: with q"),
    "writes_beyond_keys": ("guard", "k: the call wrote to 1 elements outside the operand k"),
    "window_right_exclusive": ("count", "which the mask shows"),
    "causal_ahead_if_longer": ("count", "all 1 right of the diagonal"),
    "document_leak_after_empty": ("count", "which the mask hides"),
    "document_leak_after_tiles": ("truth", "out: "),
    "documents_beyond_warp": ("count", "which the mask shows"),
    "document_of_tile_leaks": ("truth", ""),
    "document_of_tiles_cut": ("truth", "out: "),
    "prefix_of_tiles_long": ("count", "which the mask hides"),
    "prefix_first_only": ("count", "which the mask shows"),
    "block_map_of_group": ("count", "never the first of a group"),
    "blocks_taken_for_uniform": ("count", "which the mask hides"),
    "keys_beyond_lost": ("truth", ""),
    "keys_beyond_lost_backward": ("", ""),
    "queries_beyond_lost": ("truth", ""),
    "key_splits_lost": ("truth", ""),
    "first_tile_hidden": ("count", "gives NaN or infinity"),
    "group_of_four_halved": ("truth", "dk: "),
    "group_of_seven_cut": ("truth", "dk: "),
    "heads_beyond_32": ("truth", ""),
    "q_padding_ignored": ("layout", "out: with q padded"),
    "do_single_ignored": ("truth", "truth: d"),
    "k_shared_ignored": ("truth", "out"),
    "scale_backward_usual": ("truth", "looks like scale 1/sqrt(head_dim), not"),
    "maximum_of_all": ("", ""),
    "last_tile_not_rescaled": ("truth", "out: "),
    "do_faint_lost": ("truth", "dq"),
    "do_loud_overflows": ("truth", "holds inf"),
    "dq_one_key_nan": ("support", "gets a dq of nan"),
    "dk_beyond_128": ("truth", "dk: "),
    "dq_last_8": ("truth", "dq: "),
    "lse_one_key_base_2": ("truth", "lse: "),
    "lse_of_other_head": ("truth", "lse"),
    "scale_kept_by_shape": ("state", "right after this one"),
    "mask_kept_by_longest": ("state", "right after this one"),
    "out_kept_by_address": ("state", "in memory that held others"),
    "backward_twice": ("repeat", "dq"),
    "do_of_first": ("repeat", "dq: call 3 differs from the first"),
    "forward_twice": ("repeat", "out"),
    "default_dtype_left": ("guard", "settings: the kernel leaves default dtype torch.float64 (it was torch.float32): it shares them"),
    "default_device_left": ("guard", "settings: the kernel leaves default device meta (it was cpu)"),
    "threads_left": ("guard", "settings: the kernel leaves number of threads "),
    "deterministic_left_once": ("guard", "settings: the kernel leaves deterministic debug mode 2 (it was 0)"),
    "tf32_left": ("guard", "settings: the kernel leaves float32 matmul precision high (it was highest)"),
    "autocast_left": ("guard", "settings: the kernel leaves autocast on the CPU True (it was False)"),
    "directory_left": ("guard", "settings: the kernel leaves working directory / (it was "),
    "seeded": ("guard", "generator: the call seeds the global random generator of CPU, or draws from it"),
    "draws": ("guard", "generator: the call seeds the global random generator of CPU, or draws from it"),
}
"""Which check catches each fault first ("" where the draw decides), and what its message says."""

DRAWN = frozenset(
    {
        "custom_scale_ignored",
        "scale_clipped",
        "padding_overflows",
        "mask_cached_by_shape",
        "backward_of_latest",
        "out_buffer_reused",
        "writes_beyond_keys",
        "document_leak_after_tiles",
        "document_of_tiles_cut",
        "queries_beyond_lost",
        "group_of_seven_cut",
        "last_tile_not_rescaled",
        "lse_one_key_base_2",
        "keys_beyond_lost",
        "keys_beyond_lost_backward",
        "key_splits_lost",
        "group_of_four_halved",
        "heads_beyond_32",
        "do_single_ignored",
        "k_shared_ignored",
        "scale_backward_usual",
        "maximum_of_all",
        "do_faint_lost",
        "do_loud_overflows",
        "dk_beyond_128",
        "dq_last_8",
        "lse_of_other_head",
        "scale_kept_by_shape",
        "mask_kept_by_longest",
        "out_kept_by_address",
        "backward_twice",
        "do_of_first",
        "forward_twice",
        "default_dtype_left",
        "default_device_left",
        "threads_left",
        "deterministic_left",
        "autocast_left",
        "directory_left",
        "seeded",
        "draws",
    }
)
"""Faults that no probe shows. They are hunted among drawn cases alone: the probes would be passed once more for each of them."""


def test_every_fault_has_an_expectation_and_every_family_two_variants() -> None:
    assert EXPECTED.keys() == FAULTS.keys()
    families = [fault.family for fault in FAULTS.values()]
    assert {family for family in families if families.count(family) < 2} == set()


@pytest.mark.parametrize("name", FAULTS)
def test_the_default_checks_catch_the_fault_and_say_what_it_is(name: str) -> None:
    start = time.process_time()  # not what else runs on the machine
    catch = hunt(FAULTS[name], CPU, with_probes=name not in DRAWN)
    seconds = time.process_time() - start
    check, words = EXPECTED[name]
    assert catch.check is not None, f"{name} was missed by {catch.num_cases} cases"
    assert catch.check in CHECK_INFO and check in ("", catch.check) and words in catch.message, str(catch)
    assert seconds < 20


@pytest.mark.parametrize("name", ["window_left_wide", "group_not_summed", "heads_interleaved", "backward_mask_dropped"])
def test_a_fault_planted_into_another_correct_kernel_is_caught_as_well(name: str) -> None:
    fault = FAULTS[name]
    kernel = fault.plant(Sdpa())
    outcomes = [verify(kernel, case, CPU, GROUPS["probes"]).outcome for case in probe_cases(fault.mask, kernel, CPU)[:4]]
    assert any(isinstance(outcome, Wrong) for outcome in outcomes)


def test_the_selftest_hunts_the_faults_it_is_given() -> None:
    catches = list(selftest([FAULTS["causal_strict"], FAULTS["dk_unscaled"]], CPU))
    assert [catch.check for catch in catches] == ["count", "support"]
    assert str(catches[0]).startswith("causal_strict: count, case 1, ")


def test_a_fault_that_nothing_shows_is_reported_as_missed() -> None:
    harmless = replace(
        FAULTS["causal_strict"], name="none", description="does nothing", bind=lambda inner, case, inputs: inner.bind(case, inputs)
    )
    catch = hunt(harmless, CPU, examples=1)
    assert catch.check is None
    assert str(catch) == f"none: MISSED by {catch.num_cases} cases (does nothing)"


def test_the_page_about_checks_lists_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checks.md").read_text("utf-8")
    assert [name for name in FAULTS if f"| `{name}` | {FAULTS[name].description} | {FAULTS[name].mask} |" not in page] == []
