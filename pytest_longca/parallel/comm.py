"""Communicators: how key/value blocks travel among ring ranks and their gradients travel home, and the tokens-heads exchange of Ulysses.

Each communicator is a generator of blocks, with the next transfer in flight while the consumer computes, and its adjoint. Both sides of the
adjoint launch and finish apart, so that a block's work is launched before the one before it is waited for.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_longca.parallel.lanes import Finish
from pytest_longca.parallel.merge import accumulation_dtype


class Block(NamedTuple):
    """Key/value rows `[tokens, ...]` and the ring ranks that they belong to."""

    data: Tensor
    sources: tuple[int, ...]


Wait = Finish[Tensor]
Body = Callable[[Block], Finish[Tensor | None]]
"""Launches a block's work, and finishes with the gradient of its rows in their dtype; None if it has none."""


@dataclass(eq=False)
class Channel:
    """The ranks along one mesh axis and this rank's place among them.

    Without a process group communication is switched off: every transfer returns data of the right shape that is at hand.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None
    is_staged: bool = False  # CUDA tensors over a CPU process group
    traffic: Counter[str] = field(default_factory=Counter)
    _stand_ins: dict[object, Tensor] = field(default_factory=dict)

    def shift(self, x: Tensor, num_rows: int) -> Wait:
        """Send `x` to the next rank, receive `num_rows` rows from the previous one."""
        self._count("shift", x.nbytes, 1)
        if self.group is None:
            return lambda: self._stand_in(x, num_rows)
        sent, received = self._host(x), self._host(x.new_empty(num_rows, *x.shape[1:]))
        ops = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return _waiter(dist.batch_isend_irecv(ops), received, x.device, sent)

    def gather(self, x: Tensor, lengths: Sequence[int]) -> Wait:
        """The rows of all other ranks, in rank order. Any `lengths` (this rank's among them): sent peer to peer, straight into place."""
        self._count("gather", x.nbytes * (self.size - 1), self.size - 1)
        num_rows = self.without_own(lengths)
        if self.group is None:
            return lambda: self._stand_in(x, sum(num_rows))
        sent, received = self._host(x), self._host(x.new_empty(sum(num_rows), *x.shape[1:]))
        parts, ops = received.split(num_rows), []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            ops.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
            ops.append(dist.P2POp(dist.irecv, parts[source], group=self.group, group_peer=source))
        return _waiter(dist.batch_isend_irecv(ops), received, x.device, sent)

    def all_to_all(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], kind: str = "all_to_all") -> Wait:
        """Send `sent_rows[r]` rows of `x` to rank r and receive `received_rows[r]` from it, concatenated in rank order."""
        row_bytes = x.nbytes // max(1, len(x))
        self._count(kind, (len(x) - sent_rows[self.rank]) * row_bytes, self.size - 1)
        if self.group is None:
            return lambda: self._stand_in(x, sum(received_rows))
        sent, received = self._host(x), self._host(x.new_empty(sum(received_rows), *x.shape[1:]))
        work = dist.all_to_all_single(received, sent, list(received_rows), list(sent_rows), group=self.group, async_op=True)
        return _waiter([work], received, x.device, sent)

    def reduce_scatter(self, own: Tensor, others: Tensor, lengths: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over all ranks: `own` is its share of them, `others` its shares of the others' rows, in rank order.

        Shares travel in their own dtype; the sum is fp32 (fp64 for fp64).
        """
        each = self.without_own([len(own)] * self.size)
        parts = self.all_to_all(others, self.without_own(lengths), each, kind="reduce_scatter")()
        return parts.view(self.size - 1, *own.shape).sum(0, dtype=accumulation_dtype(own.dtype)).add_(own)

    def without_own(self, lengths: Sequence[int]) -> list[int]:
        """The lengths with 0 for this rank."""
        return [length if rank != self.rank else 0 for rank, length in enumerate(lengths)]

    def _count(self, kind: str, num_bytes: int, messages: int) -> None:
        self.traffic.update({f"{kind}_bytes": num_bytes, f"{kind}_messages": messages})

    def _host(self, x: Tensor) -> Tensor:
        return x.cpu() if self.is_staged else x

    def _stand_in(self, x: Tensor, num_rows: int) -> Tensor:
        if len(x) == num_rows:
            return x
        key = (num_rows, x.shape[1:], x.dtype)
        if key not in self._stand_ins:
            self._stand_ins[key] = x[torch.arange(num_rows, device=x.device) % len(x)]
        return self._stand_ins[key]


def _waiter(works: Sequence[dist.Work | None], received: Tensor, device: torch.device, sent: Tensor) -> Wait:
    def wait(keep_alive: Tensor = sent) -> Tensor:
        for work in works:
            if work is not None:
                work.wait()
        return received.to(device)

    return wait


class Communicator(Protocol):
    """What a mechanism needs of the ring axes."""

    def blocks(self, block: Block) -> Iterator[Block]:
        """Every rank's block, this rank's first."""

    def adjoint(self, block: Block, body: Body) -> Finish[Tensor | None]:
        """The gradient of this rank's block: `body`'s, summed over every rank that saw it; None if no rank did, as far as that is known."""


@dataclass(slots=True, eq=False)
class Ring:
    """Blocks move from neighbour to neighbour; a gradient follows its block one hop behind, in fp32, and makes the last hop home.

    `stride` is the distance between neighbours in ring ranks, `lengths` the tokens of each ring rank. `is_last`: nothing is added to what
    comes home, so that it makes its last hop in the block's own dtype.
    """

    channel: Channel
    stride: int
    lengths: Sequence[int]
    is_last: bool = True

    def blocks(self, block: Block) -> Iterator[Block]:
        for hop in range(self.channel.size):
            arriving = self._shift(block) if hop + 1 < self.channel.size else None
            yield block
            if arriving is not None:
                block = arriving()

    def adjoint(self, block: Block, body: Body) -> Finish[Tensor | None]:
        if self.channel.size == 1:
            return body(block)
        travelling: Finish[Block] | None = None
        launched: list[tuple[Block, Finish[Tensor | None]]] = []

        def grad() -> Block:
            """The gradient of the block whose work was launched first, this rank's share added."""
            visitor, finish = launched.pop(0)
            own = finish()  # before the wait: the gradient of the hop before is still in flight
            return Block(_added(travelling().data if travelling else None, own, visitor.data), visitor.sources)

        for visitor in self.blocks(block):
            launched.append((visitor, body(visitor)))
            if len(launched) > 1:
                travelling = self._shift(grad())

        def home() -> Tensor:
            last = grad()
            return self._shift(Block(last.data.to(block.data.dtype), last.sources) if self.is_last else last)().data

        return home

    def _shift(self, block: Block) -> Finish[Block]:
        (source,) = block.sources
        place = source // self.stride % self.channel.size
        before = source + ((place - 1) % self.channel.size - place) * self.stride
        wait = self.channel.shift(block.data, self.lengths[before])
        return lambda: Block(wait(), (before,))


def _added(travelling: Tensor | None, grad: Tensor | None, block: Tensor) -> Tensor:
    if travelling is None:
        dtype = accumulation_dtype(block.dtype)
        return torch.zeros_like(block, dtype=dtype) if grad is None else grad.to(dtype)
    return travelling if grad is None else travelling.add_(grad)


@dataclass(slots=True, eq=False)
class Gather:
    """This rank's block, and then all others as one, gathered meanwhile and sorted by token id; gradients are summed where they belong."""

    channel: Channel
    stride: int
    lengths: Sequence[int]
    order: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]

    def blocks(self, block: Block) -> Iterator[Block]:
        members, lengths = self._members(block)
        others = tuple(member for member in members if (member,) != block.sources)
        arriving = self.channel.gather(block.data, lengths) if others else None
        yield block
        if arriving is not None:
            yield Block(self._ordered(arriving(), others, 0), others)

    def adjoint(self, block: Block, body: Body) -> Finish[Tensor | None]:
        launched = [(visitor, body(visitor)) for visitor in self.blocks(block)]
        if len(launched) == 1:
            return launched[0][1]

        def home() -> Tensor:
            own, others = (torch.zeros_like(visitor.data) if (grad := finish()) is None else grad for visitor, finish in launched)
            sources = launched[1][0].sources
            return self.channel.reduce_scatter(own, self._ordered(others, sources, 1), self._members(block)[1])

        return home

    def _ordered(self, rows: Tensor, sources: tuple[int, ...], direction: int) -> Tensor:
        """Rows of these ring ranks sorted by token id (`direction` 0), or back in the order of ranks (1)."""
        return rows if len(sources) == 1 else rows.index_select(0, self.order(sources)[direction])

    def _members(self, block: Block) -> tuple[tuple[int, ...], list[int]]:
        (source,) = block.sources
        first = source - source // self.stride % self.channel.size * self.stride
        members = tuple(first + place * self.stride for place in range(self.channel.size))
        return members, [self.lengths[member] for member in members]


@dataclass(slots=True, eq=False)
class Chain:
    """One communicator around another: LoongTrain's double ring, or a ring of gathers."""

    outer: Communicator
    inner: Communicator

    def blocks(self, block: Block) -> Iterator[Block]:
        for window in self.outer.blocks(block):
            yield from self.inner.blocks(window)

    def adjoint(self, block: Block, body: Body) -> Finish[Tensor | None]:
        return self.outer.adjoint(block, lambda window: self.inner.adjoint(window, body))
