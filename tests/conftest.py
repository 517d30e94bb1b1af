"""What tests of several folders ask for."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_core() -> Iterator[None]:
    """PyTorch computes on one thread: what is timed, and what it is compared to."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
