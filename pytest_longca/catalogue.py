"""Which kernels and masks there are: built-in ones by name, then what hooks add. Names first, imports when used."""

import importlib
from typing import Any

KERNELS: dict[str, str] = {
    "naive": "pytest_longca.kernels.naive:Naive",
    "sdpa": "pytest_longca.kernels.sdpa:Sdpa",
    "flex": "pytest_longca.kernels.flex:Flex",
}

MASKS: dict[str, str] = {
    "full": "pytest_longca.masks.regular:Full",
    "causal": "pytest_longca.masks.regular:Causal",
    "full_sliding_window": "pytest_longca.masks.regular:FullSlidingWindow",
    "causal_sliding_window": "pytest_longca.masks.regular:CausalSlidingWindow",
    "full_document": "pytest_longca.masks.document:FullDocument",
    "causal_document": "pytest_longca.masks.document:CausalDocument",
    "shared_question": "pytest_longca.masks.document:SharedQuestion",
    "global_sliding_window": "pytest_longca.masks.window:GlobalSlidingWindow",
    "causal_blockwise": "pytest_longca.masks.document:CausalBlockwise",
    "prefix_lm_causal": "pytest_longca.masks.prefix:PrefixLmCausal",
    "prefix_lm_document": "pytest_longca.masks.prefix:PrefixLmDocument",
    "block_causal_document": "pytest_longca.masks.document:BlockCausalDocument",
    "uniform_block": "pytest_longca.masks.block:UniformBlock",
    "variable_block": "pytest_longca.masks.block:VariableBlock",
}

_REGULAR = ("full", "causal", "full_sliding_window", "causal_sliding_window", "full_document", "causal_document")
_HETEROGENEOUS = (
    "shared_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_causal",
    "prefix_lm_document",
    "block_causal_document",
)
_BLOCK = ("uniform_block", "variable_block")

MASK_GROUPS: dict[str, tuple[str, ...]] = {
    "regular": _REGULAR,
    "heterogeneous": _HETEROGENEOUS,
    "static": _REGULAR + _HETEROGENEOUS,
    "block": _BLOCK,
    "all": _REGULAR + _HETEROGENEOUS + _BLOCK,
}


def load(path: str) -> Any:
    """The attribute that a "module:attribute" string names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
