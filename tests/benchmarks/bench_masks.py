"""How long the forms of a mask take from 8K to 512K tokens on one core: `python tests/benchmarks/bench_masks.py [mask ...]`.

Prints CPU milliseconds (fastest of five) of the row intervals, and of the exact area and the column form made of them; each column
must grow like the length.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pytest_longca.catalogue import MASK_GROUPS, MASKS, load
from pytest_longca.intervals import area_of, columns_of

SEQLENS = tuple(1024 * k for k in (8, 32, 128, 512))


def fastest_ms(function: Callable[[], Any], tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        start = time.process_time()
        function()
        times.append((time.process_time() - start) * 1e3)
    return min(times)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print(f"{'mask':24}{'tokens':>8}{'rows':>9}{'area':>9}{'columns':>9}{'all':>9}  ms")
    for name in names or MASK_GROUPS["static"]:
        for seqlen in SEQLENS:
            mask = load(MASKS[name]).default(seqlen)
            rows = mask.row_intervals()
            forms = (mask.row_intervals, lambda rows=rows: area_of(rows), lambda rows=rows, n=seqlen: columns_of(rows, n))
            parts = [fastest_ms(form) for form in forms]
            print(f"{name:24}{seqlen:8}" + "".join(f"{ms:9.2f}" for ms in (*parts, sum(parts))))


if __name__ == "__main__":
    main(sys.argv[1:])
