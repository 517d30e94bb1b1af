"""Faults of masks: edges, alignment, documents, prefixes, block maps, tails, and masks that only one pass knows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.faulty import (
    Bind,
    Fresh,
    Hooked,
    inside,
    masked_by,
    other_mask,
    wrong_backward_mask,
    wrong_mask,
)
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel
from pytest_longca.mask import MaskMod

TILE = 16


def _wider_left(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, h, i, j) | (mod(b, h, i, (j + 1).clamp(max=case.seqlen_kv - 1)) & (j + 1 < case.seqlen_kv))


def _wider_right(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, h, i, j) | (mod(b, h, i, (j - 1).clamp(min=0)) & (j > 0))


def _narrower_left(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, h, i, j) & ((j == 0) | mod(b, h, i, (j - 1).clamp(min=0)))


def _only_causal(case: Case, mod: MaskMod) -> MaskMod:
    off = case.seqlen_kv - case.seqlen_q
    return lambda b, h, i, j: (j <= i + off) & (i >= 0)


def _everything(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: (i >= 0) & (j >= 0)


def _top_left(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: j <= i


def _strictly_causal(case: Case, mod: MaskMod) -> MaskMod:
    off = case.seqlen_kv - case.seqlen_q
    return lambda b, h, i, j: j < i + off


def _one_ahead(case: Case, mod: MaskMod) -> MaskMod:
    off = case.seqlen_kv - case.seqlen_q
    return lambda b, h, i, j: j <= i + off + 1


def _last_tile_dropped(case: Case, mod: MaskMod) -> MaskMod:
    start = case.seqlen_kv - case.seqlen_kv % TILE
    return lambda b, h, i, j: mod(b, h, i, j) & (j < (start or case.seqlen_kv))


def _one_pair_dropped(case: Case, mod: MaskMod) -> MaskMod:
    """The last query loses the 4 keys of the middle."""
    middle = case.seqlen_kv // 2
    return lambda b, h, i, j: mod(b, h, i, j) & ((i != case.seqlen_q - 1) | (j < middle - 2) | (j >= middle + 2))


def _other_head(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, (h + 1) % case.mask.heads, i, j)


def _one_block_right(case: Case, mod: MaskMod) -> MaskMod:
    size = getattr(case.mask, "block_size", 4)
    return lambda b, h, i, j: mod(b, h, i, (j - size).clamp(min=0)) & (j >= size)


def _transposed(case: Case, mod: MaskMod) -> MaskMod:
    if case.seqlen_q != case.seqlen_kv:
        return mod
    return lambda b, h, i, j: mod(b, h, j, i)


def _only_global_columns(case: Case, mod: MaskMod) -> MaskMod:
    window, num_global = (getattr(case.mask, name) for name in ("window", "num_global"))
    return lambda b, h, i, j: ((i - j).abs() <= window) | (j < num_global)


def _blocks_from_sequence_start(case: Case, mod: MaskMod) -> MaskMod:
    size = getattr(case.mask, "block_size", 1)
    return lambda b, h, i, j: (mod(b, h, i, j) | mod(b, h, j, i)) & (j // size <= i // size)


def _question_is_causal_document(case: Case, mod: MaskMod) -> MaskMod:
    """Only the first half of the question is shared."""
    half = getattr(case.mask, "doc_lens")[0] // 2  # noqa: B009  # a field of this mask kind alone
    return lambda b, h, i, j: mod(b, h, i, j) & ((i < 2 * half) | (j < half) | (j >= 2 * half))


def _documents_merged(mask: Any) -> Any:
    if len(mask.doc_lens) < 2:
        return mask
    merged = {"doc_lens": (*mask.doc_lens[:-2], sum(mask.doc_lens[-2:]))}
    if getattr(mask, "doc_lens_kv", None) is not None:
        merged["doc_lens_kv"] = (*mask.doc_lens_kv[:-2], sum(mask.doc_lens_kv[-2:]))
    return replace(mask, **merged)


def _lengths_reversed(mask: Any) -> Any:
    if getattr(mask, "doc_lens_kv", None) is not None:
        return replace(mask, doc_lens_kv=mask.doc_lens_kv[::-1])
    return replace(mask, doc_lens=mask.doc_lens[::-1])


def _prefix_moved(step: int) -> Bind:
    return other_mask(lambda mask: replace(mask, prefix=min(max(0, mask.prefix + step), mask.seqlen_q)))


def _prefixes_moved(mask: Any) -> Any:
    """Every document has the prefix of the one before it, as far as it is long."""
    moved = (*mask.prefixes[-1:], *mask.prefixes[:-1])
    return replace(mask, prefixes=tuple(min(prefix, length) for prefix, length in zip(moved, mask.doc_lens, strict=True)))


def _prefixes_one_longer(mask: Any) -> Any:
    return replace(mask, prefixes=tuple(min(prefix + 1, length) for prefix, length in zip(mask.prefixes, mask.doc_lens, strict=True)))


def _phantom_keys(value: float) -> Bind:
    """K and V are padded to whole tiles with `value`, and the padding is masked like the last key."""

    def bind(inner: Kernel, case: Case, inputs: Inputs) -> Call:
        extra = -case.seqlen_kv % TILE
        last = case.seqlen_kv - 1
        k, v = (torch.nn.functional.pad(x.contiguous(), (0, 0, 0, 0, 0, extra), value=value) for x in (inputs.k, inputs.v))

        def change(_: Case, mod: MaskMod) -> MaskMod:
            return lambda b, h, i, j: mod(b, h, i, j.clamp(max=last))

        call = inner.bind(masked_by(case, change, seqlen_kv=case.seqlen_kv + extra), Inputs(inputs.q, k, v, inputs.do))
        return Hooked(call, after_backward=lambda dq, dk, dv: (dq, dk[:, : last + 1], dv[:, : last + 1]))

    return bind


def _dropped_in_ds(case: Case, ds: Tensor) -> Tensor:
    """The backward skips the last partial tile of keys in dS."""
    start = case.seqlen_kv - (case.seqlen_kv % TILE or TILE)
    return torch.cat([ds[..., :start], torch.zeros_like(ds[..., start:])], -1)


def _finite_sentinel(case: Case, scores: Tensor) -> Tensor:
    return scores.masked_fill(scores == -torch.inf, -10000.0)


ROWS: list[tuple[str, str, str, str, Bind | Fresh]] = [
    ("window", "window_left_wide", "causal_sliding_window", "the window reaches one key too far to the left", wrong_mask(_wider_left)),
    ("window", "window_left_narrow", "causal_sliding_window", "the window ends one key too early on the left", wrong_mask(_narrower_left)),
    ("window", "window_right_wide", "full_sliding_window", "the window reaches one key too far to the right", wrong_mask(_wider_right)),
    ("window", "window_ignored", "causal_sliding_window", "the window is ignored, only causality is left", wrong_mask(_only_causal)),
    (
        "window",
        "window_backward_wide",
        "full_sliding_window",
        "the window is one too wide in the backward alone",
        wrong_backward_mask(_wider_left),
    ),
    ("window", "global_rows_lost", "global_sliding_window", "global tokens are seen but do not see all", wrong_mask(_only_global_columns)),
    ("alignment", "causal_top_left", "causal", "the diagonal is aligned top-left where lengths differ", wrong_mask(_top_left)),
    ("alignment", "causal_strict", "causal", "a query does not see its own position", wrong_mask(_strictly_causal)),
    ("alignment", "causal_one_ahead", "causal", "a query sees the next position", wrong_mask(_one_ahead)),
    (
        "backward mask",
        "backward_mask_dropped",
        "prefix_lm_causal",
        "the custom mask is dropped in the backward",
        wrong_backward_mask(_everything),
    ),
    (
        "backward mask",
        "backward_only_causal",
        "causal_document",
        "the backward knows causality but no documents",
        wrong_backward_mask(_only_causal),
    ),
    (
        "backward mask",
        "backward_pairs_dropped",
        "full",
        "the backward skips four visible keys of the last query",
        wrong_backward_mask(_one_pair_dropped),
    ),
    ("backward mask", "backward_tile_dropped", "full", "the backward skips the last tile of keys in dS", inside(ds=_dropped_in_ds)),
    ("document", "document_leak", "full_document", "each document sees the first token of the next", wrong_mask(_wider_right)),
    ("document", "document_first_lost", "full_document", "each document but the first loses its first token", wrong_mask(_narrower_left)),
    ("document", "documents_merged", "causal_document", "the last two documents are one", other_mask(_documents_merged)),
    ("document", "document_lengths_reversed", "full_document", "the lengths are taken in the wrong order", other_mask(_lengths_reversed)),
    (
        "document",
        "question_half_shared",
        "shared_question",
        "only half of the question is shared",
        wrong_mask(_question_is_causal_document),
    ),
    (
        "document",
        "blocks_from_start",
        "block_causal_document",
        "blocks count from the sequence's start",
        wrong_mask(_blocks_from_sequence_start),
    ),
    ("prefix", "prefix_long", "prefix_lm_causal", "the prefix is one token too long", _prefix_moved(1)),
    ("prefix", "prefix_short", "prefix_lm_causal", "the prefix is one token too short", _prefix_moved(-1)),
    ("prefix", "prefixes_long", "prefix_lm_document", "each document's prefix is one token too long", other_mask(_prefixes_one_longer)),
    ("prefix", "prefixes_shifted", "prefix_lm_document", "each document has its neighbour's prefix", other_mask(_prefixes_moved)),
    ("tail", "phantom_zero_keys", "full", "the last partial tile of keys is not masked: keys of 0", _phantom_keys(0.0)),
    ("tail", "phantom_large_keys", "full", "the last partial tile of keys is not masked: keys of 1e4", _phantom_keys(1e4)),
    ("tail", "phantom_nan_keys", "full", "the last partial tile of keys is not masked: NaN", _phantom_keys(float("nan"))),
    ("tail", "last_tile_dropped", "full", "the last partial tile of keys is never read", wrong_mask(_last_tile_dropped)),
    ("softmax", "finite_sentinel", "causal", "masked scores are -10000 instead of -inf", inside(scores=_finite_sentinel)),
    ("block map", "block_map_of_other_head", "uniform_block", "each head has the next head's block map", wrong_mask(_other_head)),
    ("block map", "block_map_ignored", "uniform_block", "the block map is ignored", wrong_mask(_everything)),
    (
        "block map",
        "block_map_transposed",
        "variable_block",
        "the block map is read with queries and keys exchanged",
        wrong_mask(_transposed),
    ),
    ("block map", "block_map_shifted", "uniform_block", "the block map is read one block to the right", wrong_mask(_one_block_right)),
    ("block map", "block_map_backward_ignored", "variable_block", "the backward ignores the block map", wrong_backward_mask(_everything)),
]
