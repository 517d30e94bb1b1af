"""The hooks by which a conftest.py or a plugin adds kernels and masks. They run again in every worker, so they take no arguments."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_longca.kernel import Kernel
    from pytest_longca.mask import Mask


@pytest.hookspec
def pytest_longca_kernels() -> "Iterable[Kernel]":  # type: ignore[empty-body]  # a specification
    """Return kernels of your own, as instances of `pytest_longca.kernel.Kernel`.

    In a conftest.py::

        from mine import attention  # (q, k, v, is_causal) -> out, BSHD
        from pytest_longca.kernel import AutogradCall, Kernel

        class Mine(Kernel):
            name = "mine"

            def bind(self, case, inputs):
                causal = case.mask.name == "causal"
                return AutogradCall(lambda q, k, v: (attention(q, k, v, causal), None), inputs)

        def pytest_longca_kernels():
            return [Mine()]
    """


@pytest.hookspec
def pytest_longca_masks() -> "Iterable[type[Mask]]":  # type: ignore[empty-body]  # a specification
    """Return masks of your own, as subclasses of `pytest_longca.mask.Mask`.

    A FlexAttention mask_mod becomes one with `pytest_longca.mask.from_mask_mod("name", mask_mod)`.
    """
