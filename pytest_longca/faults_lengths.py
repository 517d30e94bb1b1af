"""Faults that show only at certain lengths: of sequences, documents, windows, prefixes and blocks, in tiles."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.faulty import Bind, Fresh, inside, other_mask, wrong_backward_mask, wrong_mask, wrong_results
from pytest_longca.inputs import Inputs
from pytest_longca.mask import MaskMod

TILE = 64
WARP = 32


def _right_edge_lost(case: Case, mod: MaskMod) -> MaskMod:
    window, off = getattr(case.mask, "window", 0), case.seqlen_kv - case.seqlen_q
    return mod if window < TILE else lambda b, h, i, j: mod(b, h, i, j) & (j != i + off + window)


def _ahead_if_keys_are_more(case: Case, mod: MaskMod) -> MaskMod:
    off = case.seqlen_kv - case.seqlen_q
    return lambda b, h, i, j: j <= i + off + int(off > 0)


def _leak_at(starts: list[int], mod: MaskMod) -> MaskMod:
    """The first queries of some documents see the last key of the document before."""
    return lambda b, h, i, j: mod(b, h, i, j) | (torch.isin(i, torch.tensor(starts or [-1], device=i.device)) & (j == i - 1))


def documents(case: Case) -> list[tuple[int, int]]:
    """Start and length of each document."""
    lengths: tuple[int, ...] = getattr(case.mask, "doc_lens")  # noqa: B009  # a field of these mask kinds alone
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _leak_after_empty(case: Case, mod: MaskMod) -> MaskMod:
    found = documents(case)
    return _leak_at([start for (_, before), (start, _) in pairwise(found) if before == 0 and start > 0], mod)


def _leak_after_whole_tiles(case: Case, mod: MaskMod) -> MaskMod:
    found = documents(case)
    return _leak_at([start for (_, before), (start, _) in pairwise(found) if before and before % TILE == 0], mod)


def _leak_after_64(case: Case, mod: MaskMod) -> MaskMod:
    """The last query of a document of one tile sees the next document's first key."""
    last = [start + TILE - 1 for start, length in documents(case) if length == TILE]
    return lambda b, h, i, j: mod(b, h, i, j) | (torch.isin(i, torch.tensor(last or [-1], device=i.device)) & mod(b, h, i, j - 1) & (j > 0))


def _first_lost_after_128(case: Case, mod: MaskMod) -> MaskMod:
    """The last query of a document of two tiles does not see the key as far back as there are others."""
    last = [start + 2 * TILE - 1 for start, length in documents(case) if length == 2 * TILE]
    off = 2 * TILE - 1
    return lambda b, h, i, j: mod(b, h, i, j) & ~(torch.isin(i, torch.tensor(last or [-1], device=i.device)) & (j == i - off))


def _beyond_a_warp_lost(case: Case, mod: MaskMod) -> MaskMod:
    """Documents after the 31st see only their first token."""
    found = documents(case)
    if len(found) < WARP:
        return mod
    first = found[WARP - 1][0]
    return lambda b, h, i, j: mod(b, h, i, j) & ((i < first) | (j == first))


def _prefix_of_whole_tiles(mask: Any) -> Any:
    is_whole = mask.prefix and mask.prefix % 16 == 0 and mask.prefix < mask.seqlen_q
    return replace(mask, prefix=mask.prefix + 1) if is_whole else mask


def _prefix_of_first_only(mask: Any) -> Any:
    return replace(mask, prefixes=(*mask.prefixes[:1], *(0 for _ in mask.prefixes[1:])))


def _taken_for_uniform(mask: Any) -> Any:
    """Key blocks as if all had one size, where their sum is a multiple of a tile."""
    total, number = mask.seqlen_kv, len(mask.block_sizes_kv)
    even = tuple(total // number + int(at < total % number) for at in range(number))
    return mask if total % TILE else replace(mask, block_sizes_kv=even)


def _beyond_four_tiles_lost(case: Case, mod: MaskMod) -> MaskMod:
    return lambda b, h, i, j: mod(b, h, i, j) & (j < 4 * TILE)


def _splits_lost(case: Case, mod: MaskMod) -> MaskMod:
    """With as few queries as decoding has, only the first split of the keys is read."""
    return _beyond_four_tiles_lost(case, mod) if case.seqlen_q <= 4 else mod


def _first_tile_hidden(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows that see nothing of the first 128 keys: exp(-inf - -inf)."""
    visible = case.mask.dense(out.device).expand(case.batch, case.heads_q, -1, -1)
    is_lost = ~visible[..., : 2 * TILE].any(-1) & visible.any(-1)
    return out.masked_fill(is_lost.transpose(1, 2)[..., None], float("nan")), lse


def _queries_beyond_lost(case: Case, ds: Tensor) -> Tensor:
    return torch.cat([ds[..., : 4 * TILE, :], 0 * ds[..., 4 * TILE :, :]], -2)


def _last_tile_not_rescaled(case: Case, p: Tensor) -> Tensor:
    """What was added up before the last tile keeps the weight that it had under the maximum of its time."""
    start = max(0, case.seqlen_kv - 1) // TILE * TILE
    before, last = p[..., :start], p[..., start:]
    if not start:
        return p
    grown = p.amax(-1, keepdim=True) / before.amax(-1, keepdim=True)
    return torch.cat([before * grown.nan_to_num(), last], -1)


ROWS: list[tuple[str, str, str, str, Bind | Fresh]] = [
    (
        "window",
        "window_right_exclusive",
        "full_sliding_window",
        "a window of a tile or more lacks its last key",
        wrong_mask(_right_edge_lost),
    ),
    (
        "alignment",
        "causal_ahead_if_longer",
        "causal",
        "with more keys than queries, a query sees the next position",
        wrong_mask(_ahead_if_keys_are_more),
    ),
    (
        "document",
        "document_leak_after_empty",
        "full_document",
        "the document after an empty one sees the one before",
        wrong_mask(_leak_after_empty),
    ),
    (
        "document",
        "document_leak_after_tiles",
        "causal_document",
        "the document after one of whole tiles sees it",
        wrong_mask(_leak_after_whole_tiles),
    ),
    (
        "document",
        "document_of_tile_leaks",
        "full_document",
        "the last query of a document of exactly 64 sees the next token",
        wrong_mask(_leak_after_64),
    ),
    (
        "document",
        "document_of_tiles_cut",
        "causal_document",
        "the last query of a document of exactly 128 lacks its first key",
        wrong_mask(_first_lost_after_128),
    ),
    ("document", "documents_beyond_warp", "causal_document", "documents after the 31st are lost", wrong_mask(_beyond_a_warp_lost)),
    (
        "prefix",
        "prefix_of_tiles_long",
        "prefix_lm_causal",
        "a prefix of whole tiles is one token too long",
        other_mask(_prefix_of_whole_tiles),
    ),
    ("prefix", "prefix_first_only", "prefix_lm_document", "only the first document has its prefix", other_mask(_prefix_of_first_only)),
    (
        "block map",
        "blocks_taken_for_uniform",
        "variable_block",
        "blocks that sum to whole tiles are taken for equal",
        other_mask(_taken_for_uniform),
    ),
    ("tile", "keys_beyond_lost", "full", "keys after the fourth tile of 64 are not read", wrong_mask(_beyond_four_tiles_lost)),
    (
        "tile",
        "keys_beyond_lost_backward",
        "causal",
        "the backward does not read keys after the fourth tile of 64",
        wrong_backward_mask(_beyond_four_tiles_lost),
    ),
    ("tile", "queries_beyond_lost", "full", "queries after the fourth tile of 64 have no dS", inside(ds=_queries_beyond_lost)),
    ("tile", "key_splits_lost", "full", "with few queries only the first split of the keys is read", wrong_mask(_splits_lost)),
    (
        "tile",
        "first_tile_hidden",
        "causal_document",
        "rows that see nothing of the first 128 keys give NaN",
        wrong_results(_first_tile_hidden),
    ),
    (
        "softmax",
        "last_tile_not_rescaled",
        "full",
        "what was added up is not rescaled in the last tile of 64 keys",
        inside(p=_last_tile_not_rescaled),
    ),
]
