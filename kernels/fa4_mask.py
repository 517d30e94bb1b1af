"""FA4's mask functions in CuTe DSL: is a key inside its query's row intervals? Imported only where the DSL is installed.

All read `aux[0]`, int32 `[endpoints, rows]`: the endpoints of each query's visible runs, as `pytest_longca.intervals.endpoint_rows`
orders them. One function for each number of endpoints, as a load that is not needed costs speed. Data goes through `aux`, never through a
closure: FA4 compiles once for each function.
"""

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import utils


@cute.jit
def below(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux: Any) -> Any:
    """kv < F0."""
    end = utils.scalar_to_ssa(aux[0][0, q_idx[0]], cutlass.Int32)
    return kv_idx < end


@cute.jit
def between(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux: Any) -> Any:
    """F0 <= kv < F1."""
    start = utils.scalar_to_ssa(aux[0][0, q_idx[0]], cutlass.Int32)
    end = utils.scalar_to_ssa(aux[0][1, q_idx[0]], cutlass.Int32)
    return (kv_idx >= start) & (kv_idx < end)


@cute.jit
def below_or_between(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux: Any) -> Any:
    """kv < F0, or F1 <= kv < F2."""
    end0 = utils.scalar_to_ssa(aux[0][0, q_idx[0]], cutlass.Int32)
    start1 = utils.scalar_to_ssa(aux[0][1, q_idx[0]], cutlass.Int32)
    end1 = utils.scalar_to_ssa(aux[0][2, q_idx[0]], cutlass.Int32)
    return (kv_idx < end0) | ((kv_idx >= start1) & (kv_idx < end1))


@cute.jit
def between_or_between(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux: Any) -> Any:
    """F0 <= kv < F1, or F2 <= kv < F3."""
    start0 = utils.scalar_to_ssa(aux[0][0, q_idx[0]], cutlass.Int32)
    end0 = utils.scalar_to_ssa(aux[0][1, q_idx[0]], cutlass.Int32)
    start1 = utils.scalar_to_ssa(aux[0][2, q_idx[0]], cutlass.Int32)
    end1 = utils.scalar_to_ssa(aux[0][3, q_idx[0]], cutlass.Int32)
    return ((kv_idx >= start0) & (kv_idx < end0)) | ((kv_idx >= start1) & (kv_idx < end1))


MASK_MODS = {1: below, 2: between, 3: below_or_between, 4: between_or_between}
"""The function for each number of endpoints."""
