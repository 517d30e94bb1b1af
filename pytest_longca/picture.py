"""A failing mask as a small picture: its visible tiles, and the rows and keys that are wrong."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_longca.drawing import Drawing, as_text
from pytest_longca.predicates import check_predicate_result

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.mask import Mask
    from pytest_longca.subject import Finding

WIDTH = 40
"""Columns and rows of a picture, at most."""
SAMPLES = 8
"""Queries and keys looked at in each cell of a picture of a long mask, in each direction."""


def drawing_of(case: "Case", findings: Sequence["Finding"] = (), width: int = WIDTH) -> Drawing:
    """The case's mask where the first finding that has a place is, with the pairs that it names, else all wrong rows and keys there."""
    places = [finding.place for finding in findings if finding.place]
    first: dict[str, Any] = places[0] if places else {}
    batch, head = int(first.get("batch") or 0), int(first.get("head") or 0)
    if pairs := [(int(row), int(key)) for row, key in first.get("pairs") or ()]:
        wrong_rows, wrong_keys = zip(*pairs, strict=True)
        return drawing(case.mask, batch % case.mask.batch, head % case.mask.heads, wrong_rows, wrong_keys, width, pairs)
    here = [place for place in places if (place.get("batch") or 0, place.get("head") or 0) == (batch, head)]
    rows = {row for place in here for row in place.get("rows") or ()}
    keys = {key for place in here for key in place.get("keys") or ()}
    return drawing(case.mask, batch % case.mask.batch, head % case.mask.heads, rows, keys, width)


def drawing(
    mask: "Mask",
    batch: int = 0,
    head: int = 0,
    rows: Iterable[int] = (),
    keys: Iterable[int] = (),
    width: int = WIDTH,
    pairs: Iterable[tuple[int, int]] = (),
) -> Drawing:
    """One batch and head of a mask, with wrong rows and keys, and the wrong pairs of them where they are known."""
    tile = max(1, -(-max(mask.seqlen_q, mask.seqlen_kv) // width))
    density = tile_density(mask, batch, head, tile)
    cells = tuple("".join("#" if cell == 1 else "." if cell == 0 else "+" for cell in row) for row in density.tolist())
    # A finding about another case (the one before, say) may name rows that this mask does not have.
    wrong_rows = {row // tile for row in rows if row < mask.seqlen_q}
    wrong_keys = {key // tile for key in keys if key < mask.seqlen_kv}
    wrong_cells = {(row // tile, key // tile) for row, key in pairs if row < mask.seqlen_q and key < mask.seqlen_kv}
    wrong = tuple(sorted(wrong_rows)), tuple(sorted(wrong_keys)), tuple(sorted(wrong_cells))
    return Drawing(_title(mask, batch, head, tile), cells, *wrong)


def draw(case: "Case", findings: Sequence["Finding"] = (), width: int = WIDTH) -> str:
    """The case's mask as text, where it is wrong."""
    return as_text(drawing_of(case, findings, width))


def picture(mask: "Mask", batch: int = 0, head: int = 0, rows: Iterable[int] = (), keys: Iterable[int] = (), width: int = WIDTH) -> str:
    """One batch and head of a mask as text.

    >>> from pytest_longca.masks.regular import Causal
    >>> print(picture(Causal(4, 4), rows=[1], keys=[2]))
    causal, 4 queries (down) x 4 keys, one character each: # all visible, . none, X wrong there, < wrong row, ^ wrong key
    #...
    ##X. <
    ###.
    ####
      ^
    """
    return as_text(drawing(mask, batch, head, rows, keys, width))


def _title(mask: "Mask", batch: int, head: int, tile: int) -> str:
    size = "one character each" if tile == 1 else f"a character is {tile} x {tile}"
    where = "".join(f", {name} {index}" for name, index, many in (("batch", batch, mask.batch), ("head", head, mask.heads)) if many > 1)
    return f"{mask.name}{where}, {mask.seqlen_q} queries (down) x {mask.seqlen_kv} keys, {size}"


def tile_density(mask: "Mask", batch: int, head: int, tile: int) -> Tensor:
    """The visible share of each tile, `[tiles_q, tiles_kv]`, from SAMPLES x SAMPLES positions of it; exact for tiles up to that size."""
    rows, row_tile = _positions(mask.seqlen_q, tile)
    keys, key_tile = _positions(mask.seqlen_kv, tile)
    b, h = torch.tensor(batch), torch.tensor(head)
    seen = mask.predicate("cpu")(b, h, rows[:, None], keys[None, :])
    check_predicate_result(mask.label, seen, (len(rows), len(keys)))
    visible = seen.expand(len(rows), len(keys)).double()
    shape = (-(-mask.seqlen_q // tile), -(-mask.seqlen_kv // tile))
    sums = torch.zeros(shape, dtype=torch.float64)
    index = (row_tile[:, None].expand_as(visible), key_tile[None, :].expand_as(visible))
    counts = torch.zeros_like(sums).index_put_(index, torch.ones_like(visible), accumulate=True)
    return sums.index_put_(index, visible, accumulate=True) / counts.clamp(min=1)


def _positions(seqlen: int, tile: int) -> tuple[Tensor, Tensor]:
    """The positions that are looked at, first and last of each tile among them, and the tile of each."""
    within = torch.linspace(0, tile - 1, min(tile, SAMPLES)).round().long()
    positions = (torch.arange(0, max(seqlen, 1), tile)[:, None] + within).flatten()
    positions = positions[positions < seqlen]
    return positions, positions // tile
