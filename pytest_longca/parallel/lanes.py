"""Lanes: two streams on which block kernels take turns, and one for everything else.

A kernel ends in a wave that leaves processors idle; the next one, on the other lane, fills them. Packing, merging and the waits for
transfers are on the spine, a stream of high priority, or they would wait until every block of the kernels that were launched before them
has started.

Memory: whatever a lane reads is kept until the spine has waited for the lane, and a lane starts behind all that the spine was given. So no
stream gets memory that another one still uses, without the allocator being told.
"""

import contextlib
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
    _met: set[object] = field(default_factory=set)
    _num_launched: int = 0

    @classmethod
    def on(cls, device: torch.device, count: int = 2) -> "Lanes":
        """The lanes of a device; with one, kernels run on the spine, one after another."""
        if device.type != "cuda":
            return cls()
        spine, *lanes = _streams(device)
        return cls(spine, tuple(lanes) if count > 1 else ())

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """On the spine, behind what the caller's stream has been given; the caller's stream goes on behind the spine."""
        if self.spine is None:
            yield
            return
        caller = torch.cuda.current_stream(self.spine.device)
        self.spine.wait_stream(caller)
        with torch.cuda.stream(self.spine):
            yield
        caller.wait_stream(self.spine)

    def launch(self, key: object, call: Callable[[], T]) -> Finish[T]:
        """Run `call` on the next lane, behind what the spine has been given. Only inside `apart`.

        The first call of a `key` (segment, shapes) makes what the kernel derives from it and both lanes will read, so it is on the spine.
        """
        if not self.lanes or key not in self._met:
            self._met.add(key)
            result = call()
            return lambda: result
        assert self.spine is not None
        spine, lane = self.spine, self.lanes[self._num_launched % len(self.lanes)]
        self._num_launched += 1
        lane.wait_stream(spine)
        with torch.cuda.stream(lane):
            result = call()
        done = lane.record_event()

        def finish(operands: object = call) -> T:  # alive as long as this function
            spine.wait_event(done)
            return result

        return finish


@cache
def _streams(device: torch.device) -> "tuple[torch.cuda.Stream, ...]":
    """Spine and lanes, the same for everything on a device: memory stays with the stream that it was allocated on."""
    return tuple(torch.cuda.Stream(device, priority=priority) for priority in (-1, 0, 0))


def ahead(launched: Iterable[Finish[T]]) -> Iterator[T]:
    """The results of an iterable that launches as it goes, in order: each is waited for when the next has been launched."""
    before: Finish[T] | None = None
    for finish in launched:
        if before is not None:
            yield before()
        before = finish
    if before is not None:
        yield before()
