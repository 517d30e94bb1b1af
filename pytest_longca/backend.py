"""What adapters of third-party kernels share: refusals told by the type of an exception, else by its text, and a call that maps them."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_longca.errors import DidNotRun, LongcaError
from pytest_longca.kernel import AutogradCall
from pytest_longca.outcome import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_longca.inputs import Inputs

REFUSALS = ("builtins:NotImplementedError", "builtins:ValueError")
"""What most libraries raise for arguments that they do not take. TypeError is not among them: it would hide a wrong call of ours."""


@contextlib.contextmanager
def refusals(kernel: str, types: tuple[str, ...] = REFUSALS, words: str | None = None) -> Iterator[None]:
    """Turn the exceptions named by `types` ("module:name") into DidNotRun(Unsupported(...)); all others pass.

    And a plain RuntimeError with these `words`, for a backend that gives its refusal no type of its own.
    """
    try:
        yield
    except LongcaError:
        raise
    except Exception as error:
        is_said = words is not None and type(error) is RuntimeError and words in str(error)
        if not (is_said or isinstance(error, _loaded(types))):
            raise
        raise DidNotRun(Unsupported(f"{kernel} refused it: {type(error).__name__}: {error}")) from error


def _loaded(types: tuple[str, ...]) -> tuple[type[BaseException], ...]:
    """The exception types of modules that are loaded: what was never imported cannot have been raised."""
    pairs = (name.split(":") for name in types)
    return tuple(getattr(sys.modules[module], attribute) for module, attribute in pairs if module in sys.modules)


class BackendCall(AutogradCall):
    """An AutogradCall of a third-party library: its refusals are outcomes, and do has a layout that it takes."""

    __slots__ = ("_name", "_types", "_words")

    def __init__(
        self,
        name: str,
        function: "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]",
        inputs: "Inputs",
        needs_backward: bool,
        facts: Mapping[str, str],
        types: tuple[str, ...] = REFUSALS,
        words: str | None = None,
    ) -> None:
        super().__init__(function, inputs, needs_backward, **facts)
        self._name, self._types, self._words = name, types, words

    def forward(self) -> "tuple[Tensor, Tensor | None]":
        with refusals(self._name, self._types, self._words):
            return super().forward()

    def backward(self, do: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        from pytest_longca.packing import aligned

        with refusals(self._name, self._types, self._words):
            return super().backward(aligned(do))
