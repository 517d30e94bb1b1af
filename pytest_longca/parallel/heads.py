"""Ulysses' exchange: from some tokens of all heads to all tokens of some heads, and back.

In `groups` parts, each one packed message: all go in one after another, and only the first way in and the last way out are waited for; the
others travel beside the attention of another group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pytest_longca.parallel.comm import Channel
from pytest_longca.parallel.lanes import Finish


@dataclass(slots=True, eq=False)
class HeadExchange:
    """The exchange over one mesh axis of U ranks. A rank's head h of H lies at (rank of the axis, key/value head, query head of its group).

    `lengths` are the tokens of each of the U ranks, `groups` the key/value heads of a rank in each pipelined part.
    """

    channel: Channel
    lengths: Sequence[int]
    groups: Sequence[int] = (1,)

    def to_heads(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Each group's share of `[tokens, heads, dim]` tensors, all tokens of the axis.

        All groups are sent at once, before there is any work: a transfer that comes later has to wait for room between the blocks of a
        running kernel, and keeps others from starting meanwhile.
        """
        if self.channel.size == 1:
            yield list(tensors)
            return
        for arriving in [self._exchanged(tensors, part) for part in self.parts()]:
            yield arriving()

    def parts(self) -> Iterator[slice]:
        """Which key/value heads of a rank are in each group."""
        stop = 0
        for count in self.groups:
            start, stop = stop, stop + count
            yield slice(start, stop)

    def _exchanged(self, tensors: Sequence[Tensor], heads: slice) -> Finish[list[Tensor]]:
        channel, tokens, split = self.channel, len(tensors[0]), (self.channel.size, sum(self.groups), -1)
        shares = [x.unflatten(1, split)[:, :, heads].flatten(2, 3).transpose(0, 1) for x in tensors]  # [U, tokens, heads, dim]
        widths = [share.shape[2] * share.shape[3] for share in shares]
        packed = tensors[0].new_empty(channel.size, tokens, sum(widths))
        received = channel.landing(packed[channel.rank], sum(self.lengths))
        places = received.split(list(self.lengths))
        for others in channel.others:
            _pack(packed[others], [share[others] for share in shares])
        wait = channel.all_to_all(packed.unbind(), places)

        def arrived() -> list[Tensor]:
            _pack(places[channel.rank], [share[channel.rank] for share in shares])  # beside the transfer
            wait()
            return [part.unflatten(-1, share.shape[2:]) for part, share in zip(received.split(widths, -1), shares, strict=True)]

        return arrived


@dataclass(slots=True, eq=False)
class WayBack:
    """The other direction of an exchange: groups go back one after another, each straight into its place among the rank's own tokens."""

    exchange: HeadExchange
    _wholes: list[Tensor] = field(default_factory=list)
    _to_send: Iterator[slice] = field(init=False)

    def __post_init__(self) -> None:
        self._to_send = self.exchange.parts()

    def send(self, *tensors: Tensor) -> None:
        """Send the next group's `[all tokens, group's heads, dim]`, several tensors as one message."""
        channel, lengths, groups = self.exchange.channel, self.exchange.lengths, self.exchange.groups
        if channel.size == 1:
            self._wholes = list(tensors)
            return
        heads, own = next(self._to_send), lengths[channel.rank]
        if not self._wholes:
            self._wholes = [
                x.new_empty(own, channel.size, sum(groups), x.shape[1] // (heads.stop - heads.start), x.shape[2]) for x in tensors
            ]
        places = [whole[:, :, heads].transpose(0, 1) for whole in self._wholes]  # [U, own tokens, kv heads, query heads of each, dim]
        parts = _side_by_side(tensors).split(list(lengths))
        received = channel.landing(parts[channel.rank], channel.size * own).view(channel.size, own, -1)
        wait = channel.all_to_all(parts, received.unbind())
        _unpack(parts[channel.rank], [place[channel.rank] for place in places])  # beside the transfer
        wait()
        for others in channel.others:
            _unpack(received[others], [place[others] for place in places])

    def result(self) -> list[Tensor]:
        """The tensors that were sent, `[tokens, heads, dim]` each: this rank's tokens, all heads."""
        return self._wholes if self.exchange.channel.size == 1 else [whole.flatten(1, 3) for whole in self._wholes]


def _pack(packed: Tensor, parts: Sequence[Tensor]) -> None:
    """Write `[..., heads, dim]` parts side by side."""
    for place, part in zip(packed.split([part.shape[-2] * part.shape[-1] for part in parts], -1), parts, strict=True):
        _copy(place.unflatten(-1, part.shape[-2:]), part)


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
