"""How much slower than a quiet machine this one is at what masks' forms are made of: a limit in milliseconds is for the quiet one."""

import time
from collections.abc import Callable
from typing import Any

import torch

QUIET_MS = 15.0
"""What `yardstick` takes of one core where limits hold as they stand. At that speed the slowest form takes some 75 of its 100 ms."""

TOKENS = 512 * 1024
CHUNK = 1 << 15


def yardstick() -> int:
    """Work of a fixed size that shares no code with ours: numbers of 512K tokens stacked, compared, spread, picked, and counted."""
    tokens = torch.arange(TOKENS, dtype=torch.int32)
    stacked = torch.stack((tokens, tokens + 1, tokens.clamp(max=9), tokens), -1)
    count, first = torch.zeros(2, TOKENS, dtype=torch.int32)
    for start in range(0, TOKENS, CHUNK):
        chunk = stacked[start : start + CHUNK].permute(1, 0).contiguous()
        low = torch.maximum(chunk[0], chunk[2])
        length = torch.minimum(chunk[1], chunk[3] + 2).sub_(low)
        entry = (length > 0).nonzero()[:, 0]
        key = low.index_select(0, entry).long()
        key -= length.cumsum(0) - length
        key = key.remainder_(TOKENS).repeat_interleave(length, output_size=CHUNK)
        count.scatter_add_(0, key, chunk.new_ones(1).expand_as(key))
        first.scatter_reduce_(0, key, chunk[0], "amin")
    return int(count.sum(dtype=torch.int64))


def cpu_ms(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


def slowdown(fixed_ms: float) -> float:
    """How many times slower this machine is than the quiet one: never below 1, as no machine has to be faster than that."""
    return max(1.0, fixed_ms / QUIET_MS)


def over_quiet_ms(function: Callable[[], Any], limit_ms: float, fewest: int = 8, most: int = 20) -> tuple[float, float]:
    """CPU time of a function's fastest try, and the limit for it here: that for the quiet machine times how much slower this one is.

    Processor time leaves out what else runs, but not what that does to the caches, nor how much of a core a shared host really gives:
    the same code took three times as long in one hour as in another. So the yardstick is timed in turns with the function, whose
    own slowness it does not share. Of both the fastest of several tries counts, as other processes only ever add; the yardstick's
    first tries must not decide, or a moment in which it was held up would widen the limit.
    """
    own, fixed = cpu_ms(function), float("inf")
    for tries in range(1, most + 1):
        if own <= limit_ms:
            return own, limit_ms
        if tries > fewest and own <= limit_ms * slowdown(fixed):
            break
        own, fixed = min(own, cpu_ms(function)), min(fixed, cpu_ms(yardstick))
    return own, limit_ms * slowdown(fixed)
