"""What the calls of block-sparse kernels in standalone files have in common: the map, its lists, and blocks padded to one size."""

from collections.abc import Sequence

from pytest_longca.block_layout import PaddedBlocks, PaddedSide

LISTS = """\
# The key blocks that each query block sees, ascending, -1 behind the last, and their number: int32.
INDEX = torch.arange(len(SIZES_KV), device=DEVICE).masked_fill(~BLOCK_MAP, len(SIZES_KV)).sort(-1).values
INDEX = INDEX.masked_fill(INDEX == len(SIZES_KV), -1).to(torch.int32)
NUM = BLOCK_MAP.sum(-1, dtype=torch.int32)
"""
"""Lines that define INDEX `[1 or heads_q, blocks_q, blocks_kv]` and NUM `[1 or heads_q, blocks_q]`."""

PADDING = '''
def slots(sizes):
    """Where tokens lie when every block has {block} places, its tokens first."""
    return torch.cat([{block} * i + torch.arange(size, device=DEVICE) for i, size in enumerate(sizes)])


def padded(x, sizes):
    """[batch, tokens, heads, dim] to [batch, heads, {block} * blocks, dim], zeros between."""
    x = x.transpose(1, 2)
    return x.new_zeros(*x.shape[:2], {block} * len(sizes), x.shape[3]).index_copy(2, slots(sizes), x)


def unpadded(x, sizes):
    """[batch, heads, {block} * blocks, ...] to [batch, heads, tokens, ...]."""
    return x.index_select(2, slots(sizes))

'''


def block_map(sizes_q: Sequence[int], sizes_kv: Sequence[int]) -> str:
    """Lines that define the lists SIZES_Q and SIZES_KV and the bool tensor BLOCK_MAP `[1 or heads_q, blocks_q, blocks_kv]`."""
    return f"""\
# Tokens of each block of queries and of keys, and which blocks of keys each block of queries sees, for each query head or for all.
SIZES_Q, SIZES_KV = {_listed(sizes_q)}, {_listed(sizes_kv)}
FIRST_Q, FIRST_KV = (list(itertools.accumulate(sizes, initial=0))[:-1] for sizes in (SIZES_Q, SIZES_KV))
BLOCK_MAP = VISIBLE[0][:, FIRST_Q][:, :, FIRST_KV]
"""


def padded_map(layout: PaddedBlocks) -> str:
    """`block_map` of the blocks of a padded layout."""
    return block_map(layout.q.sizes.tolist(), layout.kv.sizes.tolist())


def padding(layout: PaddedBlocks, block: int) -> str:
    """The functions that `pad` and `unpad` call, where some block is shorter than `block`."""
    return PADDING.format(block=block) if layout.is_padded else ""


def pad(layout: PaddedBlocks) -> str:
    """The operands as BHSD, in the padded layout where it differs."""
    return f"{_pad(layout.q, 'q', 'SIZES_Q')}, {_pad(layout.kv, 'k', 'SIZES_KV')}, {_pad(layout.kv, 'v', 'SIZES_KV')}"


def unpad(layout: PaddedBlocks, name: str) -> str:
    """A result `[batch, heads, tokens, ...]` without the padding."""
    return name if layout.q.slots is None else f"unpadded({name}, SIZES_Q)"


def _pad(side: PaddedSide, name: str, sizes: str) -> str:
    return f"{name}.transpose(1, 2)" if side.slots is None else f"padded({name}, {sizes})"


def _listed(sizes: Sequence[int]) -> str:
    return f"[{sizes[0]}] * {len(sizes)}" if len(sizes) > 1 and min(sizes) == max(sizes) else str(list(sizes))
