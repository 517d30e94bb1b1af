"""Ulysses' exchange: from some tokens of all heads to all tokens of some heads, and back.

In `groups` of heads, each one packed message: only the first way in and the last way out are waited for, the others travel beside the
attention of another group. What comes amid a running kernel has to wait for room between its blocks, and keeps them from starting until
it has it. So all goes in, and is copied, before there is any work; it goes back in two batches, and is copied when the work is over.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pytest_longca.parallel.comm import Channel
from pytest_longca.parallel.lanes import Finish

Shares = Sequence[Sequence[Tensor]]
"""Of each operand its tensors, `[U, tokens, heads, dim]`: what each rank of the axis gets of this rank's tokens."""


@dataclass(slots=True, eq=False)
class HeadExchange:
    """The exchange over one mesh axis of U ranks. A rank's head h of H lies at (rank of the axis, key/value head, query head of its group).

    `lengths` are the tokens of each of the U ranks, `groups` the key/value heads of a rank in each pipelined part.
    """

    channel: Channel
    lengths: Sequence[int]
    groups: Sequence[int] = (1,)

    def to_heads(self, *operands: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Each group's share of the operands, all tokens of the axis: the first group as soon as it is there.

        An operand is tensors `[tokens, heads, dim]` that come to lie side by side in the last axis.
        """
        if self.channel.size == 1:
            yield [torch.cat(list(operand), -1) if len(operand) > 1 else operand[0] for operand in operands]
            return
        first, *others = self.parts()
        arriving = [*self._sent(operands, [first]), *self._sent(operands, others)]
        for received, shares, _ in arriving:  # beside the first transfer
            _pack(received.split(list(self.lengths))[self.channel.rank], shares, self.channel.rank)
        for received, shares, wait in arriving:
            wait()
            yield _operands(received, shares)

    def parts(self) -> Iterator[slice]:
        """Which key/value heads of a rank are in each group."""
        stop = 0
        for count in self.groups:
            start, stop = stop, stop + count
            yield slice(start, stop)

    def _sent(self, operands: Sequence[Sequence[Tensor]], groups: Sequence[slice]) -> list[tuple[Tensor, Shares, Finish[None]]]:
        """Send these groups in one batch. Of each: where it will be, what it is of this rank's tokens, and the wait."""
        channel, split = self.channel, (self.channel.size, sum(self.groups), -1)
        found, messages = [], []
        for heads in groups:
            shares = [[x.unflatten(1, split)[:, :, heads].flatten(2, 3).transpose(0, 1) for x in operand] for operand in operands]
            like, width = shares[0][0], sum(x.shape[2] * x.shape[3] for operand in shares for x in operand)
            packed = like.new_empty(*like.shape[:2], width)
            for others in channel.others:
                _pack(packed[others], shares, others)
            received = channel.landing(packed[channel.rank - 1], sum(self.lengths))  # another rank's part: this one's own is not packed
            found.append((received, shares))
            messages.append((packed.unbind(), received.split(list(self.lengths))))
        return [(*group, wait) for group, wait in zip(found, channel.all_to_all(messages), strict=True)]


@dataclass(slots=True, eq=False)
class WayBack:
    """The other direction of an exchange: groups go back in order, all before the last one in one batch."""

    exchange: HeadExchange
    _groups: list[tuple[Tensor, ...]] = field(default_factory=list)
    _sent: list[tuple[Sequence[Tensor], Tensor, Finish[None]]] = field(default_factory=list)

    def send(self, *tensors: Tensor) -> None:
        """Take the next group's `[all tokens, group's heads, dim]`, several tensors as one message, and send what is due."""
        self._groups.append(tensors)
        if self.exchange.channel.size > 1 and len(self._groups) >= len(self.exchange.groups) - 1:
            self._send_batch()

    def _send_batch(self) -> None:
        channel, lengths = self.exchange.channel, list(self.exchange.lengths)
        parts = [_side_by_side(tensors).split(lengths) for tensors in self._groups[len(self._sent) :]]
        received = [channel.landing(part[channel.rank], channel.size * lengths[channel.rank]) for part in parts]
        waits = channel.all_to_all([(part, place.chunk(channel.size)) for part, place in zip(parts, received, strict=True)])
        self._sent += zip(parts, received, waits, strict=True)

    def result(self) -> list[Tensor]:
        """The tensors that were sent, `[tokens, heads, dim]` each: this rank's tokens, all heads."""
        channel, groups = self.exchange.channel, self.exchange.groups
        if channel.size == 1:
            return list(self._groups[0])
        own = self.exchange.lengths[channel.rank]
        wholes = [x.new_empty(own, channel.size, sum(groups), x.shape[1] // groups[0], x.shape[2]) for x in self._groups[0]]
        places = [[whole[:, :, heads].transpose(0, 1) for whole in wholes] for heads in self.exchange.parts()]
        for (parts, _, _), targets in zip(self._sent, places, strict=True):  # beside the last transfer
            _unpack(parts[channel.rank], [target[channel.rank] for target in targets])
        for (_, received, wait), targets in zip(self._sent, places, strict=True):
            wait()
            for others in channel.others:
                _unpack(received.unflatten(0, (channel.size, own))[others], [target[others] for target in targets])
        return [whole.flatten(1, 3) for whole in wholes]


def _operands(packed: Tensor, shares: Shares) -> list[Tensor]:
    """Views of the operands that lie side by side in `packed`, `[..., heads, dim]` each."""
    sizes = [(operand[0].shape[2], sum(x.shape[3] for x in operand)) for operand in shares]
    parts = packed.split([heads * dim for heads, dim in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


def _pack(packed: Tensor, shares: Shares, ranks: int | slice) -> None:
    """Write what these ranks get."""
    for place, operand in zip(_operands(packed, shares), shares, strict=True):
        for target, part in zip(place.split([x.shape[3] for x in operand], -1), operand, strict=True):
            _copy(target, part[ranks])


def _unpack(packed: Tensor, places: Sequence[Tensor]) -> None:
    """Write what lies side by side to `[..., kv heads, query heads of each, dim]` places."""
    for part, place in zip(packed.split([math.prod(place.shape[-3:]) for place in places], -1), places, strict=True):
        _copy(place, part.unflatten(-1, place.shape[-3:]))


def _copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, of rows of whole words: torch copies strided tensors number by number, however small these are."""
    wide, size = torch.int64, source.element_size()
    starts = {x.storage_offset() * size % wide.itemsize for x in (target, source)}
    steps = {step * size % wide.itemsize for x in (target, source) for step in (*x.stride()[:-1], x.shape[-1])}
    if size < wide.itemsize and starts | steps == {0} and target.stride(-1) == source.stride(-1) == 1:
        target, source = target.view(wide), source.view(wide)
    target.copy_(source)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """`[tokens, all their numbers]`; one tensor is not copied."""
    return tensors[0].flatten(1).contiguous() if len(tensors) == 1 else torch.cat([x.flatten(1) for x in tensors], 1)
