"""Ulysses' exchange: from some tokens of all heads to all tokens of some heads, and back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pytest_longca.parallel.comm import Channel

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class HeadExchange:
    """The exchange over one mesh axis of U ranks, in `groups` pipelined parts, each one packed message.

    `lengths` are the tokens of each of the U ranks. A rank's head h of H lies at (rank of the axis, group, head of the group).
    """

    channel: Channel
    lengths: Sequence[int]
    groups: int = 1

    def to_heads(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Each group's share of `[tokens, heads, dim]` tensors, all tokens of the axis; the next group is in flight meanwhile."""
        if self.channel.size == 1:
            yield list(tensors)
            return
        yield from ahead(partial(self._send_heads, tensors, group) for group in range(self.groups))

    def to_tokens(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Start the way back of one group's `[all tokens, group's heads, dim]`; the wait gives `[tokens, U, group's heads, dim]` each."""
        if self.channel.size == 1:
            return lambda: [x[:, None] for x in tensors]
        own = self.lengths[self.channel.rank]
        packed = torch.cat([x.flatten(1) for x in tensors], 1) if len(tensors) > 1 else tensors[0].flatten(1).contiguous()
        wait = self.channel.all_to_all(packed, self.lengths, [own] * self.channel.size)

        def arrived() -> list[Tensor]:
            parts = wait().view(self.channel.size, own, -1).transpose(0, 1).split([x[0].numel() for x in tensors], -1)
            return [part.unflatten(-1, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]

        return arrived

    def assemble(self, groups: Iterable[Tensor]) -> Tensor:
        """The groups' `[tokens, U, group's heads, dim]` as one `[tokens, heads, dim]`."""
        parts = list(groups)
        return parts[0][:, 0] if self.channel.size == 1 else torch.stack(parts, 2).flatten(1, 3)

    def _send_heads(self, tensors: Sequence[Tensor], group: int) -> Callable[[], list[Tensor]]:
        size, tokens = self.channel.size, len(tensors[0])
        shares = [x.unflatten(1, (size, self.groups, -1))[:, :, group].transpose(0, 1) for x in tensors]  # [U, tokens, heads, dim]
        widths = [share.shape[2] * share.shape[3] for share in shares]
        packed = tensors[0].new_empty(size, tokens, sum(widths))
        for part, share in zip(packed.split(widths, -1), shares, strict=True):
            part.unflatten(-1, share.shape[2:]).copy_(share)
        wait = self.channel.all_to_all(packed.flatten(0, 1), [tokens] * size, self.lengths)
        return lambda: [part.unflatten(-1, share.shape[2:]) for part, share in zip(wait().split(widths, -1), shares, strict=True)]


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
