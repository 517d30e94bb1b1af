"""Context-parallel attention of one rank: the mesh's exchange of heads around the ring's blocks, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_longca.parallel.comm import Block, Communicator
from pytest_longca.parallel.heads import HeadExchange, WayBack
from pytest_longca.parallel.kernel import BlockKernel
from pytest_longca.parallel.lanes import Finish, Lanes, ahead
from pytest_longca.parallel.merge import GradSum, OutSum, accumulation_dtype, summed
from pytest_longca.parallel.plan import Plan

T = TypeVar("T")
Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""One head group's q, packed kv, merged out and lse, as the ring saw them."""


@dataclass(eq=False)
class ContextParallel:
    """A mechanism bound to a rank: called with local q `[tokens, heads_q, head_dim]`, k and v, it is differentiable attention.

    Returns local out `[tokens, heads_q, head_dim_v]` and lse `[heads_q / U, tokens of the ring shard]`, as the rank computed it.
    """

    plan: Plan
    communicator: Communicator
    heads: HeadExchange
    kernel: BlockKernel
    scale: float
    lanes: Lanes

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attend.apply(q, k, v, self)  # type: ignore[no-any-return, no-untyped-call]  # Function.apply is untyped

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Saved]]:
        """out and lse, and what the backward needs."""
        saved: list[Saved] = []
        with self.lanes.apart():
            way_back = WayBack(self.heads)
            for part in ahead(self._blocks_forward(*operands) for operands in self.heads.to_heads((q,), self._replicated(k, v))):
                way_back.send(part[2])
                saved.append(part)
            (out,) = way_back.result()
            lse = torch.cat([part[3] for part in saved]) if len(saved) > 1 else saved[0][3]
        return out, lse, saved

    def backward(self, do: Tensor, saved: Sequence[Saved]) -> tuple[Tensor, Tensor]:
        """dq `[tokens, heads_q, head_dim]` and packed dkv, the key/value heads still replicated, in the operands' dtype."""
        with self.lanes.apart():
            way_back, groups = WayBack(self.heads), zip(self.heads.to_heads((do,)), saved, strict=True)
            for grads in ahead(self._blocks_backward(do_part, *part) for (do_part,), part in groups):
                way_back.send(*grads)
            dq, dkv = way_back.result()
        return dq, dkv

    def _blocks_forward(self, q: Tensor, kv: Tensor) -> Finish[Saved]:
        """Launch the work on every block; each is merged when the next has been launched, the first, which is the rank's own, last."""
        if len(self.plan.shards) > 1:
            kv = kv.contiguous()  # to travel on
        total = OutSum(q, dim=kv.shape[-1] - q.shape[-1])
        launched: list[Finish[None]] = []
        for block in self.communicator.blocks(Block(kv, (self.plan.own,))):
            if step := self.plan.step(block.sources):
                k, v = _split(block.data[step.keys], q.shape[-1])
                call = partial(self.kernel.block_forward, q[step.rows], k, v, step.segment, self.scale)
                launched.append(partial(_add, total, step.rows, self._launch(("forward", step.segment, q.shape), call, block)))
            if len(launched) > 2:
                launched.pop(1)()

        def finish() -> Saved:
            for add in (*launched[1:], *launched[:1]):
                add()
            return q, kv, *total.result()

        return finish

    def _blocks_backward(self, do: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> Finish[tuple[Tensor, Tensor]]:
        dq_total = GradSum(q)

        def body(block: Block) -> Finish[list[Tensor]]:
            step = self.plan.step(block.sources)
            if step is None:
                return list
            rows, keys, (k, v) = step.rows, step.keys, _split(block.data[step.keys], q.shape[-1])
            operands = do[rows], q[rows], k, v, out[rows], lse[:, rows], step.segment, self.scale
            finish = self._launch(("backward", step.segment, q.shape), partial(self.kernel.block_backward, *operands), block)

            def grad() -> list[Tensor]:
                dq, dk, dv = finish()
                dq_total.add(rows, dq)
                return [_placed(dk, dv, keys, block.data)]

            return grad

        home = self.communicator.adjoint(Block(kv, (self.plan.own,)), body)

        def finish() -> tuple[Tensor, Tensor]:
            parts = home()
            return dq_total.result(q.dtype), summed(parts, kv.dtype) if parts else torch.zeros_like(kv)

        return finish

    def _launch(self, key: object, call: Callable[[], T], block: Block) -> Finish[T]:
        """On a lowest lane if others travel and this block does not."""
        return self.lanes.launch(key, call, is_lowest=len(self.plan.shards) > 1 and block.sources == (self.plan.own,))

    def _replicated(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, which the exchange puts side by side, one message a hop; heads repeated where ranks outnumber them."""
        copies = self.heads.channel.size // k.shape[1]
        return (k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)) if copies > 1 else (k, v)


class _Attend(torch.autograd.Function):
    """One autograd node for the whole exchange, so that the order of collectives is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bound: ContextParallel) -> tuple[Tensor, Tensor]:
        out, lse, saved = bound.forward(q, k, v)
        ctx.save_for_backward(*(tensor for part in saved for tensor in part))
        ctx.bound, ctx.heads_kv, ctx.head_dim = bound, k.shape[1], k.shape[2]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        flat = ctx.saved_tensors
        dq, dkv = ctx.bound.backward(do, [flat[i : i + 4] for i in range(0, len(flat), 4)])
        if dkv.shape[1] != ctx.heads_kv:
            dkv = dkv.unflatten(1, (ctx.heads_kv, -1)).sum(2, dtype=accumulation_dtype(dkv.dtype)).to(dkv.dtype)
        dk, dv = _split(dkv, ctx.head_dim)
        return dq, dk, dv, None


def _split(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    return kv[..., :head_dim], kv[..., head_dim:]


def _add(total: OutSum, rows: slice, finish: Finish[tuple[Tensor, Tensor]]) -> None:
    total.add(rows, *finish())


def _placed(dk: Tensor, dv: Tensor, keys: slice, block: Tensor) -> Tensor:
    """A block's packed gradient; keys that no row saw get zero."""
    dkv = torch.empty_like(block) if len(dk) == len(block) else torch.zeros_like(block)
    torch.cat((dk, dv), -1, out=dkv[keys])
    return dkv
