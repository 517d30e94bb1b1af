"""Layouts: which tokens each ring rank holds. Ascending token ids, no padding, every token exactly once."""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pytest_longca.errors import unknown_name

Layout = Callable[[Sequence[int], Tensor, int], list[Tensor]]
"""(document lengths, visible keys of each row int64 `[tokens]`, ring ranks) -> int64 ascending token ids of each ring rank."""

CHUNK = 512  # tokens; smaller chunks balance better, larger ones meet fewer others and keep a kernel's tiles whole
BALANCE = 1.01  # of the mean, what the most loaded rank and the one of most tokens may have


def contiguous(lengths: Sequence[int], row_area: Tensor, ring: int) -> list[Tensor]:
    """Near-equal slices of the sequence, as Ulysses needs them and as a plain ring takes them."""
    return list(torch.arange(len(row_area)).tensor_split(ring))


def zigzag(lengths: Sequence[int], row_area: Tensor, ring: int) -> list[Tensor]:
    """The paper's layout: each document falls into 2 * ring chunks and rank r gets the r-th from the head and from the tail."""
    return _zigzag(lengths, ring)


def zigzag_global(lengths: Sequence[int], row_area: Tensor, ring: int) -> list[Tensor]:
    """Zigzag over the whole sequence, blind to documents."""
    return _zigzag([len(row_area)], ring)


def balanced(lengths: Sequence[int], row_area: Tensor, ring: int) -> list[Tensor]:
    """Chunks of up to 512 tokens, heaviest first, each to the least loaded rank that has room; 2 to 8 times as large if that balances."""
    finest = max(1, min(CHUNK, len(row_area) // (16 * ring)))
    held: list[Tensor] = []
    for coarser in (8, 4, 2, 1):
        held = _heaviest_first(torch.arange(len(row_area)).split(coarser * finest), row_area, ring)
        if max(_imbalance([len(ids) for ids in held]), _imbalance([int(row_area[ids].sum()) for ids in held])) <= BALANCE:
            break
    return held


def _imbalance(loads: Sequence[int]) -> float:
    """The largest over the mean."""
    return max(loads) * len(loads) / max(1, sum(loads))


def _heaviest_first(chunks: Sequence[Tensor], row_area: Tensor, ring: int) -> list[Tensor]:
    work = [int(row_area[ids].sum()) for ids in chunks]
    room = -(-len(chunks) // ring)
    heap = [(0, rank) for rank in range(ring)]
    held: list[list[int]] = [[] for _ in range(ring)]
    for index in sorted(range(len(chunks)), key=lambda i: -work[i]):
        load, rank = heapq.heappop(heap)
        held[rank].append(index)
        if len(held[rank]) < room:
            heapq.heappush(heap, (load + work[index], rank))
    return [_cat([chunks[index] for index in sorted(indices)]) for indices in held]


def striped(lengths: Sequence[int], row_area: Tensor, ring: int) -> list[Tensor]:
    """Every ring-th token, as in Striped Attention (arXiv:2311.09431): each block of a causal mask is causal itself."""
    tokens = torch.arange(len(row_area))
    return [tokens[rank::ring].contiguous() for rank in range(ring)]


LAYOUTS: dict[str, Layout] = {f.__name__: f for f in (contiguous, zigzag, zigzag_global, balanced, striped)}


def find_layout(name: str) -> Layout:
    """The layout of that name, or InvalidArgument with the closest names."""
    if name not in LAYOUTS:
        raise unknown_name("layout", name, LAYOUTS)
    return LAYOUTS[name]


def _zigzag(lengths: Sequence[int], ring: int) -> list[Tensor]:
    totals = [0] * ring
    sizes = [size for length in lengths for size in _chunk_sizes(length, totals)]
    ranks = torch.arange(ring)
    chunk_owner = torch.cat((ranks, ranks.flip(0))).repeat(len(lengths))
    token_owner = chunk_owner.repeat_interleave(torch.tensor(sizes))
    return list(token_owner.argsort(stable=True).split(totals))


def _chunk_sizes(length: int, totals: list[int]) -> list[int]:
    """Sizes of a document's 2 * ring chunks, added to `totals`.

    The remainder goes to the ranks that hold fewest, one token each and head chunk first: totals differ by one at most.
    """
    ring = len(totals)
    size, remainder = divmod(length, 2 * ring)
    sizes = [size] * (2 * ring)
    by_need = sorted(range(ring), key=totals.__getitem__)
    for turn in range(remainder):
        rank = by_need[turn % ring]
        sizes[rank if turn < ring else 2 * ring - 1 - rank] += 1
        totals[rank] += 1
    for rank in range(ring):
        totals[rank] += 2 * size
    return sizes


def _cat(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
