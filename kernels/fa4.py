"""FA4: FlashAttention-4 in CuTe DSL (flash_attn.cute), for Hopper and later.

Algorithm: warp-specialised online softmax, compiled just in time. Masks: regular ones natively, by band and cu_seqlens; every other mask
with row intervals by a mask_mod that reads their endpoints, and exact lists of partial and full 128 x 128 tiles for both directions
(without the lists for the backward, FA4's gradients would ignore or dearly pay for the mask). Uniform blocks of a multiple of 128 are
lists of full tiles, one for each head.
Layout: BSHD, THD for several documents; other strides than multiples of 16 bytes, and stride 0, are copied. Dtypes: bf16, fp16.
Head dims: multiples of 8 up to 256 (backward up to 192), up to 128 where tile lists are needed; head_dim_v = head_dim, or (192, 128), whose
backward takes no grouped heads.
GQA: yes. Directions: forward and backward. lse: yes, differentiable. Architectures: sm90 and later. Determinism: forward; not dq.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_longca.backend import REFUSALS, BackendCall
from pytest_longca.case import Case
from pytest_longca.inputs import Inputs
from pytest_longca.intervals import endpoint_rows
from pytest_longca.kernel import Capabilities, Kernel, Requirement
from pytest_longca.kernels.cudnn_flex import DSL, row_intervals_of
from pytest_longca.machine import Machine
from pytest_longca.mask import Form, Mask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.packing import Packing, aligned, copied, dense_or_varlen, packing_of
from pytest_longca.snippets import flash_attention_call

if TYPE_CHECKING:
    from pytest_longca.tiles import TileLists

TILE = 128
"""The only size of a listed tile that forward and backward both take on sm90."""
DISK_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""What FA4 compiled is kept for other processes where this is set when it is imported."""
UNEQUAL_HEAD_DIMS = (192, 128)
"""The one pair that FA4 has tile sizes for. On Hopper its own check lets all multiples of 8 from 8 to 256 pass."""
ROW_PADDING = 256
"""Rows of endpoints beyond the last query: FA4 asks its mask_mod about whole tiles (of up to 192 rows) and does not read past these."""


class Fa4(Kernel):
    """FlashAttention-4 on every mask that is regular, has row intervals, or is made of uniform blocks of a multiple of 128."""

    name = "fa4"
    source = "flash-attn-4"
    requires = (Requirement(distribution="flash-attn-4", how="pip install 'pytest-longca[fa4]'"), DSL)
    capabilities = Capabilities(
        masks=frozenset({Form.VARLEN, Form.ROW_INTERVALS, Form.BLOCK_MAP}),
        dtypes=frozenset({"bf16", "fp16"}),
        head_dims=range(8, 257, 8),
        devices=frozenset({"cuda"}),
        capability=(9, 0),
    )
    compiles_per_head_dim = True
    device_kernel_pattern = r"flash_attncute\w*flash_(fwd|bwd)"

    def also_refuses(self, case: Case, machine: Machine) -> str | None:
        needs_lists = Form.VARLEN not in case.mask.forms
        is_blocks = Form.BLOCK_MAP in case.mask.forms
        backward, sizes = case.direction.needs_backward, (case.head_dim, case.head_dim_v)
        rules = (
            (
                sizes[0] != sizes[1] and sizes != UNEQUAL_HEAD_DIMS,
                f"needs head_dim_v = head_dim, or {UNEQUAL_HEAD_DIMS}, not {sizes}: it reaches outside of its memory with unequal head dims"
                " such as (24, 96), and fails to launch with (96, 192) (seen in 4.0.0b36)",
            ),
            (backward and max(sizes) > 192, "has a backward for head dims up to 192 only"),
            (backward and case.group > 1 and sizes[0] != sizes[1], "needs head_dim_v = head_dim in the backward of grouped heads"),
            (needs_lists and max(sizes) > 128, f"takes tile lists for head dims up to 128, and {case.mask.name} needs them"),
            (is_blocks and not _is_tiled(case.mask), f"takes uniform blocks of a multiple of {TILE} tokens only"),
            (
                needs_lists and not is_blocks and max(case.mask.batch, case.mask.heads) > 1,
                "takes row intervals for all heads and batch elements at once",
            ),
        )
        return next((reason for broken, reason in rules if broken), None)

    def compiles_to_disk(self, machine: Machine) -> bool:
        return True

    def bind(self, case: Case, inputs: Inputs) -> BackendCall:
        os.environ.setdefault(DISK_CACHE, "1")
        device = inputs.q.device
        packing = packing_of(case, device) if Form.VARLEN in case.mask.forms else None
        kernel = regular_attention(packing, case.scale) if packing else listed_attention(case, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (aligned(x) for x in (q, k, v))
            if packing is None:
                out, lse = kernel(q, k, v)
                return out, lse
            out, lse = kernel(packing.pack(q), packing.pack(k), packing.pack(v))
            return packing.unpack(out), packing.unpack_lse(lse)

        facts = {"source": f"flash_attn.cute {self.version()}", "mask_form": packing.form if packing else f"lists of {TILE} x {TILE} tiles"}
        facts |= {"copies": copied({"q": inputs.q, "k": inputs.k, "v": inputs.v}, packing)}
        # FA4 checks some of its arguments with assert, and some shapes fail only when they are compiled.
        types = (*REFUSALS, "builtins:AssertionError", "cutlass._mlir.ir:MLIRError")
        return BackendCall(self.name, attend, inputs, case.direction.needs_backward, facts, types)

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str | None:
        is_regular = Form.VARLEN in case.mask.forms
        return flash_attention_call(case, "flash_attn.cute", "return_lse=True", None) if is_regular else None


def regular_attention(packing: Packing, scale: float) -> Callable[..., Any]:
    """FA4's function of `(q, k, v)` on a regular mask, giving `(out, lse)`. An unlimited side of the band is None here, never -1."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    band = packing.band
    window = (None, None) if band.is_causal else band.sides(None)
    options = {"softmax_scale": scale, "causal": band.is_causal, "window_size": window, "return_lse": True}
    return dense_or_varlen(packing, flash_attn_func, flash_attn_varlen_func, options)


def listed_attention(case: Case, device: torch.device) -> Callable[..., Any]:
    """FA4's function of `(q, k, v)` on a mask given by lists of tiles, giving `(out, lse)`. No causal flag: its backward would heed it."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def listed(lists: "TileLists") -> Any:
        tensors = (lists.partial_counts, lists.partial_indices, lists.full_counts, lists.full_indices)
        return BlockSparseTensorsTorch(*tensors, block_size=(TILE, TILE))

    tiles = case.mask.tiles(device, TILE, TILE)
    return functools.partial(
        flash_attn_func,
        softmax_scale=case.scale,
        block_sparse_tensors=listed(tiles.by_query()),
        block_sparse_tensors_bwd=listed(tiles.by_key()),
        return_lse=True,
        **({} if Form.BLOCK_MAP in case.mask.forms else _partial_tiles(case, device)),
    )


def _partial_tiles(case: Case, device: torch.device) -> dict[str, Any]:
    """What FA4 does inside partial tiles: a mask_mod and the endpoints that it reads."""
    from pytest_longca.kernels.fa4_mask import MASK_MODS

    endpoints = mask_mod_endpoints(row_intervals_of(case, device))
    return {"mask_mod": MASK_MODS[endpoints.shape[0]], "aux_tensors": [endpoints]}


def _is_tiled(mask: Mask) -> bool:
    """Whether a block mask has no partial 128 x 128 tiles."""
    return isinstance(mask, UniformBlock) and mask.block_size % TILE == 0


def mask_mod_endpoints(rows: Tensor) -> Tensor:
    """Row intervals `[1, 1, seqlen_q, 2, 2]` as FA4's mask functions read them: int32 `[endpoints, seqlen_q + padding]`.

    One endpoint: below it. Two: between them. Three: below the first or between the others. Four: between two pairs.
    """
    first = rows[0, 0, :, 0]  # [seqlen_q, 2]
    moves, _, _, has_second = (rows[0, 0] != 0).any(0).flatten().tolist()  # what the device must be waited for, at once
    if has_second:
        endpoints = endpoint_rows(rows)[0]
        endpoints = endpoints[1:] if endpoints.shape[0] == 5 else endpoints  # of five, the first is 0
    else:
        endpoints = first.T if moves else first[None, :, 1]
    return torch.nn.functional.pad(endpoints, (0, ROW_PADDING)).contiguous()
