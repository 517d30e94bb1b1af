"""Peers of the mechanisms, where they are installed: ring-flash-attn, yunchang and PyTorch's context_parallel, timed the same way.

Each row makes, for a rank's share, a differentiable function of BSHD q, k and v. Layouts are the peer's own; FLOPs are the same.
"""

import contextlib
import importlib
import itertools
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.parallel.setup import document_lengths
from pytest_longca.parallel.timing import Effort, Measured, RankClock, share_inputs
from pytest_longca.parallel.world import World

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, the masks that it serves, and how it is bound: `(case, world) -> function of q, k, v`."""

    name: str
    masks: frozenset[str]
    bind: Callable[[Case, World], Attention]

    @property
    def package(self) -> str:
        return self.name.split()[0]


def _ring_flash_attn(module: str) -> Any:
    """A module of ring-flash-attn without its adapters, which do not import beside a current transformers and are not needed."""
    stub = types.ModuleType("ring_flash_attn.adapters")
    stub.substitute_hf_flash_attn = stub.update_ring_flash_attn_params = None  # type: ignore[attr-defined]  # names that its __init__ imports
    sys.modules.setdefault("ring_flash_attn.adapters", stub)
    return importlib.import_module(f"ring_flash_attn.{module}")


def _ring(case: Case, world: World) -> Attention:
    attend = _ring_flash_attn("ring_flash_attn").ring_flash_attn_func
    return lambda q, k, v: attend(q, k, v, causal=False, softmax_scale=case.scale)


def _zigzag(case: Case, world: World) -> Attention:
    attend = _ring_flash_attn("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    return lambda q, k, v: attend(q, k, v, causal=True, softmax_scale=case.scale)


def _llama3(case: Case, world: World) -> Attention:
    module = _ring_flash_attn("llama3_flash_attn_varlen")
    ends = torch.tensor([0, *itertools.accumulate(document_lengths(case.mask))], dtype=torch.int32, device=world.device)
    is_causal = case.mask.name == "causal_document"
    cu_q, cu_k, max_q, max_k, k_slice = module.llama3_flash_attn_prepare_cu_seqlens(ends, is_causal, world.rank, world.size)
    return lambda q, k, v: module.llama3_flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=k_slice, causal=is_causal, softmax_scale=case.scale
    )[None]


def _yunchang(case: Case, world: World) -> Attention:
    from yunchang import UlyssesAttention

    layer = UlyssesAttention(dist.group.WORLD)
    return lambda q, k, v: layer(q, k, v, causal=case.mask.name == "causal", softmax_scale=case.scale)


PEERS = (
    Peer("ring-flash-attn ring", frozenset({"full"}), _ring),
    Peer("ring-flash-attn zigzag", frozenset({"causal"}), _zigzag),
    Peer("ring-flash-attn llama3", frozenset({"full_document", "causal_document"}), _llama3),
    Peer("yunchang ulysses", frozenset({"full", "causal"}), _yunchang),
)


def measure_peer(peer: Peer, world: World, case: Case, effort: Effort) -> Measured:
    """Time a peer on a rank's share."""
    num_tokens = case.seqlen_q // world.size
    shared = share_inputs(case, num_tokens, world)
    q, k, v = (x.detach()[None].requires_grad_() for x in shared[:3])
    with contextlib.nullcontext() if world.is_connected else own_data_received():
        return _measure(world, effort, peer.bind(case, world), q, k, v, shared[3][None])


@contextlib.contextmanager
def own_data_received() -> Iterator[None]:
    """In a process group that sends nothing a rank receives a copy of what it sends.

    Otherwise the peers would compute on memory that was never written, which takes less power than data does, so that they would be faster
    than the kernel alone. The copies are within 0.1 % of the kernels that work on them at 32K tokens a rank.
    """

    def exchange(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
        sent, received = ([x.tensor for x in operations if x.op is op] for op in (dist.isend, dist.irecv))
        for to, data in zip(received, sent, strict=True):
            to.copy_(data)
        return []

    def all_to_all(output: Tensor, data: Tensor, **options: Any) -> None:
        output.copy_(data.view_as(output))

    with unittest.mock.patch.multiple(dist, batch_isend_irecv=exchange, all_to_all_single=all_to_all):
        yield


def measure_torch(world: World, case: Case, effort: Effort) -> Measured:
    """Time PyTorch's context_parallel around SDPA's flash backend (full and causal masks)."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with torch_context(world, case) as (q, k, v, do), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # By its module: context_parallel replaces it there.
            return functional.scaled_dot_product_attention(q, k, v, is_causal=case.mask.name == "causal", scale=case.scale, enable_gqa=True)

        return _measure(world, effort, attend, q, k, v, do)


@contextlib.contextmanager
def torch_context(world: World, case: Case) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v (leaves) and do as context_parallel shards them: `[1, heads, tokens, head_dim]`.

    It resizes its buffers in place, which tensors that require gradients refuse: the leaves are other tensors over the same memory, and
    the buffers are not restored.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(world.device.type, (world.size,))
    buffers = [x.detach().transpose(0, 1)[None].contiguous() for x in share_inputs(case, case.seqlen_q, World(0, 1, world.device))]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        q, k, v = (x.detach().requires_grad_() for x in buffers[:3])
        yield q, k, v, buffers[3]


def _measure(world: World, effort: Effort, attend: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Measured:
    clock = RankClock(world, effort)
    fwd_ms = clock.samples(lambda: attend(q, k, v))
    out = attend(q, k, v)
    return Measured(fwd_ms, clock.samples(lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)), None)
