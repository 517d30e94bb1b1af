"""The hooks by which a conftest.py or a plugin adds kernels, masks and mechanisms. Workers ask the first two again: no arguments."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_longca.kernel import Kernel
    from pytest_longca.mask import Mask
    from pytest_longca.parallel.mechanisms import Mechanism


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


@pytest.hookspec
def pytest_longca_mechanisms() -> "Iterable[Mechanism]":  # type: ignore[empty-body]  # a specification
    """Return mechanisms of context parallelism of your own: rows of a table, a mesh of ranks and the kind of its inner communicator.

    In a conftest.py, Ulysses between pairs of ranks and a ring of pairs::

        from pytest_longca.parallel.mechanisms import Mechanism, Mesh

        def pytest_longca_mechanisms():
            return [Mechanism("ring_of_pairs", "pairs share heads", lambda world, heads, ranks_per_node: Mesh(inner=world // 2, heads=2))]
    """
