"""Ulysses' exchange: from some tokens of all heads to all tokens of some heads, and back.

In `groups` pipelined parts, each one packed message. On a GPU packing, unpacking and the transfers run on a stream of their own, beside
the attention of the group before, so that only the first way in and the last way out are waited for.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pytest_longca.parallel.comm import Channel

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class HeadExchange:
    """The exchange over one mesh axis of U ranks. A rank's head h of H lies at (rank of the axis, group, head of the group).

    `lengths` are the tokens of each of the U ranks; `side` is the stream of the exchange, None on the CPU.
    """

    channel: Channel
    lengths: Sequence[int]
    groups: int = 1
    side: "torch.cuda.Stream | None" = None

    def to_heads(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Each group's share of `[tokens, heads, dim]` tensors, all tokens of the axis; the next group is in flight meanwhile."""
        if self.channel.size == 1:
            yield list(tensors)
            return
        yield from ahead(partial(self._send, tensors, group) for group in range(self.groups))

    def _send(self, tensors: Sequence[Tensor], group: int) -> Callable[[], list[Tensor]]:
        size, tokens = self.channel.size, len(tensors[0])
        shares = [x.unflatten(1, (size, self.groups, -1))[:, :, group].transpose(0, 1) for x in tensors]  # [U, tokens, heads, dim]
        widths = [share.shape[2] * share.shape[3] for share in shares]
        with self.aside(*tensors):
            packed = tensors[0].new_empty(size, tokens, sum(widths))
            for part, share in zip(packed.split(widths, -1), shares, strict=True):
                part.unflatten(-1, share.shape[2:]).copy_(share)
            wait = self.channel.all_to_all(packed.flatten(0, 1), [tokens] * size, self.lengths)
            packed_event = self.side.record_event() if self.side else None

        def arrived() -> list[Tensor]:
            received = wait()
            if packed_event is not None:
                torch.cuda.current_stream().wait_event(packed_event)
                received.record_stream(torch.cuda.current_stream())
            return [part.unflatten(-1, share.shape[2:]) for part, share in zip(received.split(widths, -1), shares, strict=True)]

        return arrived

    @contextlib.contextmanager
    def aside(self, *inputs: Tensor) -> Iterator[None]:
        """On the exchange's stream, after what the current one has been given so far; `inputs` are kept until it has read them."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        for x in inputs:
            x.record_stream(self.side)
        with torch.cuda.stream(self.side):
            yield


@dataclass(slots=True, eq=False)
class WayBack:
    """The other direction of an exchange: groups go back one after another, each straight into its place among the rank's own tokens."""

    exchange: HeadExchange
    _wholes: list[Tensor] = field(default_factory=list)
    _num_sent: int = 0

    def send(self, *tensors: Tensor) -> None:
        """Send the next group's `[all tokens, group's heads, dim]`, several tensors as one message."""
        exchange = self.exchange
        if exchange.channel.size == 1:
            self._wholes = list(tensors)
            return
        size, own = exchange.channel.size, exchange.lengths[exchange.channel.rank]
        if not self._wholes:
            self._wholes = [x.new_empty(own, size, exchange.groups, *x.shape[1:]) for x in tensors]
        with exchange.aside(*tensors):
            packed = torch.cat([x.flatten(1) for x in tensors], 1) if len(tensors) > 1 else tensors[0].flatten(1).contiguous()
            received = exchange.channel.all_to_all(packed, exchange.lengths, [own] * size)()
            parts = received.view(size, own, -1).transpose(0, 1).split([x.shape[1] * x.shape[2] for x in tensors], -1)
            for whole, part, x in zip(self._wholes, parts, tensors, strict=True):
                whole[:, :, self._num_sent].copy_(part.unflatten(-1, x.shape[1:]))
        self._num_sent += 1

    def result(self) -> list[Tensor]:
        """The tensors that were sent, `[tokens, heads, dim]` each: this rank's tokens, all heads."""
        if self.exchange.channel.size == 1:
            return self._wholes
        if self.exchange.side is not None:
            torch.cuda.current_stream().wait_stream(self.exchange.side)
        return [whole.flatten(1, 3) for whole in self._wholes]


def ahead(launches: Iterable[Callable[[], Callable[[], T]]]) -> Iterator[T]:
    """The results of transfers in order, each launched before the one before it is consumed."""
    pending: Callable[[], T] | None = None
    for launch in launches:
        following = launch()
        if pending is not None:
            yield pending()
        pending = following
    if pending is not None:
        yield pending()
