"""Ranks that misbehave: each function is what every rank of a pool runs instead of the honest job."""

import os
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_longca.ids import parse_case
from pytest_longca.parallel import merge, peers
from pytest_longca.parallel.comm import Block, Body, Chain, Ring
from pytest_longca.parallel.job import judge_bound, judge_case, sharing_from_json
from pytest_longca.parallel.kernel import NaiveBlock
from pytest_longca.parallel.lanes import Finish
from pytest_longca.parallel.setup import bind, shards_of
from pytest_longca.parallel.world import World

Answer = dict[str, Any]


class LocalKeys(Ring):
    """The backward uses the local keys and values at each step."""

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        return super().adjoint(block, lambda visitor: body(Block(block.data, visitor.sources)))


class OneRankOff(Ring):
    """Gradients of keys and values arrive one rank further."""

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        home = super().adjoint(block, body)

        def one_further() -> list[Tensor]:
            return [self.channel.shift(part, len(part))() for part in home()]

        return one_further


def _with_ring(kind: type[Ring], world: World, request: Answer) -> Answer:
    case, sharing = parse_case(request["case"]), sharing_from_json(request["sharing"])
    shards = shards_of(case, sharing)
    bound = bind(case, sharing, world, NaiveBlock(), shards)
    assert isinstance(bound.communicator, Chain) and isinstance(bound.communicator.inner, Ring)
    honest = bound.communicator.inner
    bound.communicator.inner = kind(honest.channel, honest.stride, honest.lengths)
    return judge_bound(world, case, shards, bound)


def local_keys(world: World, request: Answer) -> Answer:
    return _with_ring(LocalKeys, world, request)


def one_rank_off(world: World, request: Answer) -> Answer:
    return _with_ring(OneRankOff, world, request)


def bf16_accumulation(world: World, request: Answer) -> Answer:
    honest = merge.accumulation_dtype
    merge.accumulation_dtype = lambda dtype: torch.bfloat16
    try:
        return judge_case(world, request)
    finally:
        merge.accumulation_dtype = honest


def rank_1_dies(world: World, request: Answer) -> Answer:
    if world.rank == 1:
        os._exit(7)
    return judge_case(world, request)


def rank_1_raises(world: World, request: Answer) -> Answer:
    if world.rank == 1:
        raise ValueError("no such thing")
    return judge_case(world, request)


def rank_1_hangs(world: World, request: Answer) -> Answer:
    if world.rank == 1:
        time.sleep(600)
    return judge_case(world, request)


def different_options(world: World, request: Answer) -> Answer:
    return {"same": [world.agrees_on("a command line"), not world.agrees_on(f"the command line of rank {world.rank}")], "traffic": {}}


def torch_context(world: World, request: Answer) -> Answer:
    """Whether PyTorch's context_parallel gives this rank leaves of its share and an SDPA of its own, and ends without an error."""
    case = parse_case(request["case"])
    plain = functional.scaled_dot_product_attention
    with peers.torch_context(world, case) as (q, k, v, do):
        shapes = [list(x.shape) for x in (q, k, v, do)]
        leaves = [x.is_leaf and x.requires_grad for x in (q, k, v)]
        is_replaced = functional.scaled_dot_product_attention is not plain
        torch.autograd.grad((q * do).sum() + k.sum() + v.sum(), (q, k, v))
    return {"shapes": shapes, "same": [*leaves, not do.requires_grad, is_replaced], "traffic": {}}


def ids_travel(world: World, request: Answer) -> Answer:
    """Token ids through the real communicator, and the ids that the plan says."""
    case, sharing = parse_case(request["case"]), sharing_from_json(request["sharing"])
    shards = shards_of(case, sharing)
    bound = bind(case, sharing, world, NaiveBlock(), shards)
    own = bound.plan.own
    same = [
        torch.equal(block.data.flatten(), torch.cat([shards.ring[source] for source in block.sources]).sort().values)
        for block in bound.communicator.blocks(Block(shards.ring[own][:, None], (own,)))
    ]
    return {"same": same, "traffic": {}}
