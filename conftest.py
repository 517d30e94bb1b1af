"""Configuration of the project's own tests."""

import os
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidiactl").exists()

if not HAS_GPU:
    # Triton decides at its import whether kernels run interpreted, and torch._dynamo imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
