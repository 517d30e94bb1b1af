"""Communicators: how key/value blocks travel among ring ranks and their gradients travel home, and the tokens-heads exchange of Ulysses.

Each communicator is a generator of blocks, with the next transfer in flight while the consumer computes, and its adjoint. Both sides of the
adjoint launch and finish apart, so that a block's work is launched before the one before it is waited for.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_longca.parallel.lanes import Finish
from pytest_longca.parallel.merge import accumulation_dtype, summed


class Block(NamedTuple):
    """Key/value rows `[tokens, ...]` and the ring ranks that they belong to."""

    data: Tensor
    sources: tuple[int, ...]


Wait = Finish[Tensor]
Message = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What each rank is sent, and where what it sends is put."""
Body = Callable[[Block], Finish[list[Tensor]]]
"""Launches a block's work, and finishes with what the gradient of its rows is the sum of: at most two tensors, none if it has none."""


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
        received = self.landing(x, num_rows)
        if self.group is None:
            return lambda: received
        sent, into = self._host(x), self._host(received)
        ops = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, into, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return _then(partial(_landed, dist.batch_isend_irecv(ops), [(received, into)], sent), received)

    def gather(self, x: Tensor, lengths: Sequence[int]) -> Wait:
        """The rows of all other ranks, in rank order. Any `lengths` (this rank's among them): sent peer to peer, straight into place."""
        num_rows = self.without_own(lengths)
        received = self.landing(x, sum(num_rows))
        (wait,) = self.all_to_all([([x] * self.size, received.split(num_rows))], kind="gather")
        return _then(wait, received)

    def all_to_all(self, messages: Sequence[Message], kind: str = "all_to_all") -> list[Finish[None]]:
        """Send `sent[r]` to every other rank r and fill `received[r]` (of `landing`) from it, for each of these messages, in one batch.

        A rank's own part is left to the caller. One wait for each message.
        """
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        for sent, _ in messages:
            self._count(kind, sum(sent[rank].nbytes for rank in others), len(others))
        if self.group is None:
            return [lambda: None for _ in messages]
        ops: list[dist.P2POp] = []
        staged = [[(received[rank], self._send(ops, sent[rank], received[rank], rank)) for rank in others] for sent, received in messages]
        works = dist.batch_isend_irecv(ops) if ops else []
        return [partial(_landed, works, targets, messages) for targets in staged]

    def _send(self, ops: list[dist.P2POp], sent: Tensor, received: Tensor, rank: int) -> Tensor:
        """Add the operations with one rank; returns what it will send to, which is on the host where the transfer is staged."""
        out, into = self._host(sent), self._host(received)
        ops += [dist.P2POp(dist.isend, out, group=self.group, group_peer=rank)] if out.numel() else []
        ops += [dist.P2POp(dist.irecv, into, group=self.group, group_peer=rank)] if into.numel() else []
        return into

    def landing(self, x: Tensor, num_rows: int) -> Tensor:
        """Where `num_rows` rows like those of `x` will be received."""
        return self._stand_in(x, num_rows) if self.group is None else x.new_empty(num_rows, *x.shape[1:])

    def reduce_scatter(self, others: Tensor, lengths: Sequence[int]) -> Wait:
        """The sum of all other ranks' shares of this rank's rows. `others` is what it has for their rows, in rank order.

        Shares travel in their own dtype; the sum of several is fp32 (fp64 for fp64).
        """
        received = self.landing(others, (self.size - 1) * lengths[self.rank])
        each = self.without_own([lengths[self.rank]] * self.size)
        (wait,) = self.all_to_all([(others.split(self.without_own(lengths)), received.split(each))], kind="reduce_scatter")

        def summed() -> Tensor:
            wait()
            parts = received.view(self.size - 1, -1, *others.shape[1:])
            return parts[0] if len(parts) == 1 else parts.sum(0, dtype=accumulation_dtype(others.dtype))

        return summed

    @property
    def others(self) -> list[slice]:
        """The places of the other ranks."""
        return [places for places in (slice(0, self.rank), slice(self.rank + 1, self.size)) if places.start < places.stop]

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
        return self._stand_ins[key].data  # counts no versions: where data of this shape is kept for a backward, other data lands meanwhile


def _landed(works: list[dist.Work], targets: Sequence[tuple[Tensor, Tensor]], operands: object) -> None:
    """Wait, once for the whole batch (a second wait never ends), and copy what came to the host; the operands are kept until then."""
    while works:
        works.pop().wait()
    for target, into in targets:
        if into is not target:
            target.copy_(into)


def _then(wait: Finish[None], received: Tensor) -> Wait:
    def arrived() -> Tensor:
        wait()
        return received

    return arrived


class Communicator(Protocol):
    """What a mechanism needs of the ring axes."""

    def blocks(self, block: Block) -> Iterator[Block]:
        """Every rank's block, this rank's first."""

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        """What the gradient of this rank's block is the sum of: `body`'s of every rank that saw it, nothing if none did.

        At most one tensor more than `body` gives. They are added where their sum is needed, in the dtype in which it is.
        """


@dataclass(slots=True, eq=False)
class Ring:
    """Blocks move from neighbour to neighbour; a gradient follows its block one hop behind, in fp32, until it comes home.

    What a rank adds to its own block's gradient stays there and is added last, so that the way home is beside the work on it.
    `stride` is the distance between neighbours in ring ranks, `lengths` the tokens of each ring rank. `is_first`: a rank's share is what a
    kernel gave, which no dtype but the block's own is needed for; so the first hop, of one share, is in that. `is_last`: nothing else is
    added to what comes home, so that the last hop is, too.
    """

    channel: Channel
    stride: int
    lengths: Sequence[int]
    is_first: bool = True
    is_last: bool = True

    def blocks(self, block: Block) -> Iterator[Block]:
        for hop in range(self.channel.size):
            arriving = self._shift(block) if hop + 1 < self.channel.size else None
            yield block
            if arriving is not None:
                block = arriving()

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        if self.channel.size == 1:
            return body(block)
        narrow, wide = block.data.dtype, accumulation_dtype(block.data.dtype)
        visitors = self.blocks(block)
        own = body(next(visitors))
        travelling: Finish[Block] | None = None
        launched: list[tuple[Block, Finish[list[Tensor]]]] = []

        def send(is_narrow: bool) -> Finish[Block]:
            """Send on the gradient of the block whose work was launched first, this rank's share added."""
            visitor, finish = launched.pop(0)
            share = finish()  # before the wait: the gradient of the hop before is still in flight
            parts = [*([travelling().data] if travelling else []), *share]
            dtype = narrow if is_narrow or (self.is_first and travelling is None) else wide
            grad = summed(parts, dtype) if parts else torch.zeros_like(visitor.data, dtype=dtype)
            return self._shift(Block(grad, visitor.sources))

        for visitor in visitors:
            launched.append((visitor, body(visitor)))
            if len(launched) > 1:
                travelling = send(is_narrow=False)

        def home() -> list[Tensor]:
            arriving = send(is_narrow=self.is_last)
            share = own()
            return [arriving().data, *share]

        return home

    def _shift(self, block: Block) -> Finish[Block]:
        (source,) = block.sources
        place = source // self.stride % self.channel.size
        before = source + ((place - 1) % self.channel.size - place) * self.stride
        wait = self.channel.shift(block.data, self.lengths[before])
        return lambda: Block(wait(), (before,))


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

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        launched = [(visitor, body(visitor)) for visitor in self.blocks(block)]
        if len(launched) == 1:
            return launched[0][1]

        def home() -> list[Tensor]:
            (visitor, others), (_, own) = launched[1], launched[0]
            grad = summed(found, visitor.data.dtype) if (found := others()) else torch.zeros_like(visitor.data)
            lengths = self._members(block)[1]
            arriving = self.channel.reduce_scatter(self._ordered(grad, visitor.sources, 1), lengths)
            share = own()
            return [arriving(), *share]

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

    def adjoint(self, block: Block, body: Body) -> Finish[list[Tensor]]:
        return self.outer.adjoint(block, lambda window: self.inner.adjoint(window, body))
