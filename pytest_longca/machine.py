"""The machine that a kernel is asked about: what `supports` may know without touching a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """A device kind, its compute capability and its memory.

    `device` is "cpu" or "cuda"; `capability` is None on the CPU; `interpret` says that Triton runs interpreted.
    """

    device: str
    capability: tuple[int, int] | None = None
    name: str = ""
    memory_bytes: int | None = None
    interpret: bool = False


CPU = Machine("cpu", name="CPU", interpret=True)
H200 = Machine("cuda", (9, 0), "NVIDIA H200", 143_771 * 2**20)
