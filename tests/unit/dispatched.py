"""How many operations PyTorch dispatches: on a GPU each costs the host some ten microseconds, whatever its size."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Counts the operations under it, views included, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return f"{self.count.total()} operations: " + ", ".join(f"{number} {name}" for name, number in self.count.most_common())
