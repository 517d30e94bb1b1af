"""Lanes: two streams on which block kernels take turns, two below them for what no transfer is waited for, and one for everything else.

A kernel ends in a wave that leaves processors idle; the next one, on the other lane, fills them. What has all it needs from the start, a
rank's own blocks, is on the lowest lanes: it runs wherever the others wait for transfers, and last, so that their results travel beside it.
Packing, merging and the waits for transfers are on the spine, a stream of high priority, or they would wait until every block of the
kernels that were launched before them has started.

Memory: whatever a lane reads is kept until the spine has waited for the lane, and a lane starts behind all that the spine was given. So no
stream gets memory that another one still uses, without the allocator being told.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Finish = Callable[[], T]
"""The end of something launched: waits for its result."""


@dataclass(eq=False)
class Lanes:
    """Where block kernels run. Without streams (on the CPU) each runs where it is launched."""

    spine: "torch.cuda.Stream | None" = None
    lanes: "tuple[torch.cuda.Stream, ...]" = ()
    lowest: "tuple[torch.cuda.Stream, ...]" = ()
    _met: set[object] = field(default_factory=set)
    _num_launched: Counter[bool] = field(default_factory=Counter)

    @classmethod
    def on(cls, device: torch.device, count: int = 2) -> "Lanes":
        """The lanes of a device; with one, kernels run on the spine, one after another."""
        if device.type != "cuda":
            return cls()
        spine, *others = _streams(device)
        return cls(spine, tuple(others[:2]), tuple(others[2:])) if count > 1 else cls(spine)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """On the spine, behind what the caller's stream has been given; the caller's stream goes on behind the spine."""
        if self.spine is None:
            yield
            return
        self._num_launched.clear()  # each call allocates on the same streams
        caller = torch.cuda.current_stream(self.spine.device)
        self.spine.wait_stream(caller)
        with torch.cuda.stream(self.spine):
            yield
        caller.wait_stream(self.spine)

    def launch(self, key: object, call: Callable[[], T], *, is_lowest: bool = False) -> Finish[T]:
        """Run `call` on the next lane, or the next of the lowest, behind what the spine has been given. Only inside `apart`.

        The first call of a `key` (segment, shapes) makes what the kernel derives from it and both lanes will read, so it is on the spine.
        """
        if not self.lanes or key not in self._met:
            self._met.add(key)
            result = call()
            return lambda: result
        spine, lane = self.spine, self._next_lane(is_lowest)
        assert spine is not None
        lane.wait_stream(spine)
        with torch.cuda.stream(lane):
            result = call()
        done = lane.record_event()

        def finish(operands: object = call) -> T:  # alive as long as this function
            spine.wait_event(done)
            return result

        return finish

    def _next_lane(self, is_lowest: bool) -> "torch.cuda.Stream":
        lanes = self.lowest if is_lowest else self.lanes
        lane = lanes[self._num_launched[is_lowest] % len(lanes)]
        self._num_launched[is_lowest] += 1
        return lane


@cache
def _streams(device: torch.device) -> "tuple[torch.cuda.Stream, ...]":
    """Spine, lanes and the lowest two, the same for everything on a device: memory stays with the stream that it was allocated on."""
    return tuple(torch.cuda.Stream(device, priority=priority) for priority in (-2, -1, -1, 0, 0))


def ahead(launched: Iterable[Finish[T]]) -> Iterator[T]:
    """The results of an iterable that launches as it goes, in order: each is waited for when the next two have been launched.

    After one, the last small kernels of one group, which wait beside the next group's large one, would hold up the launch of the third.
    """
    waiting: deque[Finish[T]] = deque()
    for finish in launched:
        waiting.append(finish)
        if len(waiting) > 2:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
