"""Which kernels and masks there are: built-in ones by name, then what hooks add. Names first, imports when used."""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_longca.errors import InvalidArgument, unknown_name

if TYPE_CHECKING:
    from pytest_longca.kernel import Kernel
    from pytest_longca.mask import Mask

KERNELS: dict[str, str] = {
    "naive": "pytest_longca.kernels.naive:Naive",
    "sdpa": "pytest_longca.kernels.sdpa:Sdpa",
    "sdpa_math": "pytest_longca.kernels.sdpa:SdpaMath",
    "sdpa_flash": "pytest_longca.kernels.sdpa:SdpaFlash",
    "sdpa_efficient": "pytest_longca.kernels.sdpa:SdpaEfficient",
    "sdpa_cudnn": "pytest_longca.kernels.sdpa:SdpaCudnn",
    "flex": "pytest_longca.kernels.flex:Flex",
    "flashmask": "pytest_longca.kernels.flashmask:FlashMask",
    "fa2": "pytest_longca.kernels.fa2:Fa2",
    "fa3": "pytest_longca.kernels.fa3:Fa3",
    "fa4": "pytest_longca.kernels.fa4:Fa4",
    "cudnn": "pytest_longca.kernels.cudnn:Cudnn",
    "cudnn_flex": "pytest_longca.kernels.cudnn_flex:CudnnFlex",
    "vsa": "pytest_longca.kernels.vsa:Vsa",
    "vsa_triton": "pytest_longca.kernels.vsa_triton:VsaTriton",
    "vsa_fastvideo_triton": "pytest_longca.kernels.vsa_fastvideo_triton:VsaFastvideoTriton",
    "fa2_sparse": "pytest_longca.kernels.fa2_sparse:Fa2Sparse",
    "flashinfer": "pytest_longca.kernels.flashinfer:FlashInfer",
    "cudnn_sparse": "pytest_longca.kernels.cudnn_sparse:CudnnSparse",
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


KERNEL_GROUPS: dict[str, tuple[str, ...]] = {"all": tuple(KERNELS)}


def load(path: str) -> Any:
    """The attribute that a "module:attribute" string names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Catalogue:
    """Kernels and masks by name: the built-in ones and a session's own. Built-in ones are imported when asked for.

    A mask of the session's own comes with the place that it is from, and is tried when it is first asked for.
    """

    def __init__(self, kernels: "Iterable[Kernel]" = (), masks: "Iterable[tuple[type[Mask], str]]" = ()) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._masks: dict[str, type[Mask]] = {}
        self._untried: dict[str, str] = {}
        for kernel in kernels:
            _add("kernel", kernel.name, kernel, self._kernels, KERNELS, KERNEL_GROUPS)
        for mask, place in masks:
            _add("mask", mask.name, mask, self._masks, MASKS, MASK_GROUPS)
            self._untried[mask.name] = place
        self.kernel_names = (*KERNELS, *self._kernels)
        self.mask_names = (*MASKS, *self._masks)
        self.kernel_groups = {**KERNEL_GROUPS, "all": self.kernel_names}
        self.mask_groups = {**MASK_GROUPS, "all": self.mask_names}

    def kernel(self, name: str) -> "Kernel":
        """The kernel of that name. Raises InvalidArgument, with the closest names, if there is none."""
        if name not in self.kernel_names:
            raise unknown_name("kernel", name, self.kernel_names)
        if name not in self._kernels:
            self._kernels[name] = load(KERNELS[name])()
        return self._kernels[name]

    def mask(self, name: str) -> "type[Mask]":
        """The class of the mask of that name. Raises InvalidArgument, with the closest names, if there is none.

        And, with its place, if it is one of the session's own whose predicate is none.
        """
        if name not in self.mask_names:
            raise unknown_name("mask", name, self.mask_names)
        if name not in self._masks:
            self._masks[name] = load(MASKS[name])
        if name in self._untried:
            self._try(name)
        return self._masks[name]

    def _try(self, name: str) -> None:
        from pytest_longca.mask import try_mask

        try:
            try_mask(self._masks[name])
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._untried[name]}: {error}") from None
        del self._untried[name]

    def masks(self) -> "Mapping[str, type[Mask]]":
        """All mask classes by name, as ids are parsed with; each as `mask` gives it, when it is looked up."""
        return _Masks(self)


class _Masks(Mapping[str, "type[Mask]"]):
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def __getitem__(self, name: str) -> "type[Mask]":
        if name not in self._catalogue.mask_names:
            raise KeyError(name)
        return self._catalogue.mask(name)

    def __contains__(self, name: object) -> bool:
        return name in self._catalogue.mask_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue.mask_names)

    def __len__(self) -> int:
        return len(self._catalogue.mask_names)


def _add(kind: str, name: str, value: Any, into: dict[str, Any], built_in: dict[str, str], groups: dict[str, tuple[str, ...]]) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InvalidArgument(f"{kind} name {name!r}: use lower-case letters, digits and underscores, starting with a letter")
    if name in groups:
        raise InvalidArgument(f"{kind} name {name!r} is that of a group of {kind}s: rename it")
    if name in into or name in built_in:
        raise InvalidArgument(f"two {kind}s are named {name!r}: rename one of them")
    into[name] = value
