"""What a kernel offers to context parallelism: the attention of one block and its explicit backward. The plain one in PyTorch is here."""

from typing import Protocol

import torch
from torch import Tensor

from pytest_longca.catalogue import Catalogue, load
from pytest_longca.errors import unknown_name
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.mask import Form
from pytest_longca.parallel.merge import GradSum, OutSum, accumulation_dtype
from pytest_longca.parallel.segment import Round, Segment

INTERVALS = frozenset({Form.ROW_INTERVALS})
BLOCK_KERNELS: dict[str, str] = {
    "naive": "pytest_longca.parallel.kernel:NaiveBlock",
    "flex": "pytest_longca.kernels.blocks_flex:FlexBlock",
    "fa2": "pytest_longca.kernels.blocks_flash:fa2_block",
    "fa2_torch": "pytest_longca.kernels.blocks_flash:TorchFa2Block",
    "fa3": "pytest_longca.kernels.blocks_flash:Fa3Block",
    "fa4": "pytest_longca.kernels.blocks_cute:Fa4Block",
    "flashmask": "pytest_longca.kernels.blocks_flashmask:FlashMaskBlock",
    "cudnn": "pytest_longca.kernels.blocks_cudnn:CudnnBlock",
    "cudnn_flex": "pytest_longca.kernels.blocks_cudnn:CudnnFlexBlock",
}
"""Kernels that serve context parallelism, by name: names first, imports when used."""


class BlockKernel(Protocol):
    """Attention of packed local queries over one block of keys. Operands may be strided; only the last axis is dense.

    `capabilities` say what it can do; its mask form is ROW_INTERVALS, since every segment is given by them.
    """

    name: str
    capabilities: Capabilities

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        """(out `[rows, heads_q, head_dim_v]`, lse fp32 `[heads_q, rows]`, natural log); rows that see no key: out 0, lse -inf."""

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this block, from the *merged* out and lse of all blocks."""


def offers_blocks(kernel: Kernel) -> bool:
    """Whether a kernel of a third party has the two methods of a BlockKernel."""
    return hasattr(kernel, "block_forward") and hasattr(kernel, "block_backward")


def serves_blocks(name: str, catalogue: Catalogue) -> bool:
    """Whether a kernel of the catalogue can be shared among ranks: by a block kernel of its name, or its own two methods."""
    return name in BLOCK_KERNELS or offers_blocks(catalogue.kernel(name))


def find_block_kernel(name: str, catalogue: Catalogue | None = None) -> BlockKernel:
    """The block kernel of that name, of a "module:attribute" path, or a catalogue's own kernel that offers blocks.

    Raises InvalidArgument with the closest names.
    """
    if catalogue and name in catalogue.kernel_names and offers_blocks(catalogue.kernel(name)):
        return catalogue.kernel(name)  # type: ignore[return-value]  # a Kernel with the methods of a BlockKernel
    if ":" not in name and name not in BLOCK_KERNELS:
        raise unknown_name("block kernel", name, BLOCK_KERNELS)
    return load(BLOCK_KERNELS.get(name, name))()  # type: ignore[no-any-return]  # load gives whatever the name names


class NaiveBlock:
    """Dense attention in the accumulation dtype (fp64 stays fp64): the truth of the tests, for any mask and device."""

    name = "naive"
    capabilities = Capabilities(masks=INTERVALS)

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, segment, scale)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        return torch.einsum("hqk,khd->qhd", weights, _expanded(v, q)).to(q.dtype), lse

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulation_dtype(q.dtype)
        do, heads_kv = do.to(wide), k.shape[1]
        weights = torch.exp(_scores(q, k, segment, scale) - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        delta = (do * out).sum(-1).mT[..., None]  # [heads_q, rows, 1]
        ds = weights * (torch.einsum("qhd,khd->hqk", do, _expanded(v, q)) - delta) * scale
        dq = torch.einsum("hqk,khd->qhd", ds, _expanded(k, q))
        dk = torch.einsum("hqk,qhd->khd", ds, q.to(wide)).unflatten(1, (heads_kv, -1)).sum(2)
        dv = torch.einsum("hqk,qhd->khd", weights, do).unflatten(1, (heads_kv, -1)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _expanded(x: Tensor, q: Tensor) -> Tensor:
    """Key/value heads repeated to the query heads, in the accumulation dtype."""
    return x.to(accumulation_dtype(q.dtype)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, segment: Segment, scale: float) -> Tensor:
    """Scaled scores `[heads_q, rows, keys]`, -inf where masked."""
    scores = torch.einsum("qhd,khd->hqk", q.to(accumulation_dtype(q.dtype)), _expanded(k, q)) * scale
    return scores.masked_fill(~segment.dense(), -torch.inf)


class VarlenBlock:
    """A block kernel for varlen backends: the rounds of a segment, one call each. A subclass computes one round."""

    name: str
    capabilities: Capabilities

    def round_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Round, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) of one round, operands cut to its slices."""
        raise NotImplementedError

    def round_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Round, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one round."""
        raise NotImplementedError

    def block_forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float) -> tuple[Tensor, Tensor]:
        total = OutSum(q, dim=v.shape[-1])
        for call in segment.rounds:
            total.add(call.rows, *self.round_forward(q[call.rows], k[call.keys], v[call.keys], call, scale))
        return total.result()

    def block_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment: Segment, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = GradSum(q), GradSum(k), GradSum(v)
        for call in segment.rounds:
            rows, keys = call.rows, call.keys
            dq, dk, dv = self.round_backward(do[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous(), call, scale)
            for total, part, grad in zip(sums, (rows, keys, keys), (dq, dk, dv), strict=True):
                total.add(part, grad)
        dq, dk, dv = (total.result(total.like.dtype) for total in sums)
        return dq, dk, dv
