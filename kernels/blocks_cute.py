"""FlashAttention-4 on one block of context parallelism: one run natively, anything else by row intervals and exact tile lists."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from pytest_longca.kernels.fa4 import TILE, Fa4, mask_mod_endpoints
from pytest_longca.packing import aligned
from pytest_longca.parallel.kernel import INTERVALS
from pytest_longca.parallel.segment import Segment
from pytest_longca.tiles import TileLists, tile_lists


class Fa4Block:
    """flash_attn.cute: any segment in one call. Tile lists are made once for each segment."""

    name = "fa4"
    capabilities = replace(Fa4.capabilities, masks=INTERVALS, head_dims=range(8, 129, 8))  # tile lists take no larger ones

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        operands = (aligned(x)[None] for x in (q, k, v))
        out, lse = _flash_attn_fwd(*operands, softmax_scale=scale, return_lse=True, **_mask(segment)[0])[:2]
        return out[0], lse[0]

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, do = (aligned(x)[None] for x in (q, k, v, out, do))
        dq, dk, dv = _flash_attn_bwd(q, k, v, out, do, lse.contiguous()[None], softmax_scale=scale, **_mask(segment)[1])[:3]
        return dq[0], dk[0], dv[0]


def _mask(segment: Segment) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that say what is visible, for the forward and for the backward."""
    if "fa4" not in segment.cache:
        segment.cache["fa4"] = _native(segment) or _listed(segment)
    return segment.cache["fa4"]  # type: ignore[no-any-return]  # a kernel's own entry


def _native(segment: Segment) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """FA4's own causal flag and window, where one run fills the segment."""
    if len(segment.rounds) != 1:
        return None
    (call,) = segment.rounds
    is_whole = (call.rows, call.keys) == (slice(0, segment.num_rows), slice(0, segment.num_keys))
    if not call.is_dense or not is_whole:
        return None
    left, right = (None, None) if call.is_causal else call.window
    arguments = {"causal": call.is_causal, "window_size_left": left, "window_size_right": right}
    return arguments, arguments


def _listed(segment: Segment) -> tuple[dict[str, Any], dict[str, Any]]:
    """A mask_mod over the intervals' endpoints inside partial tiles; the backward reads its lists by key."""
    from pytest_longca.kernels.fa4_mask import MASK_MODS

    rows = segment.intervals[None, None]
    endpoints = mask_mod_endpoints(rows)
    shared = {"mask_mod": MASK_MODS[endpoints.shape[0]], "aux_tensors": [endpoints]}
    by_query, by_key = tile_lists(rows, segment.num_keys, TILE, TILE)
    return {**shared, "block_sparse_tensors": _tensors(by_query)}, {**shared, "block_sparse_tensors": _tensors(by_key)}


def _tensors(lists: TileLists) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    tensors = (lists.partial_counts, lists.partial_indices, lists.full_counts, lists.full_indices)
    return BlockSparseTensorsTorch(*tensors, block_size=(TILE, TILE))
