"""Every kernel on every mask: exact probes, then a search for a failing case."""

import pytest

from pytest_longca.conformance import run_probes
from pytest_longca.search import run_examples
from pytest_longca.session import Session


def test_probes(request: pytest.FixtureRequest, longca: Session, longca_kernel_name: str, longca_mask_name: str) -> None:
    run_probes(request.node, longca, longca_kernel_name, longca_mask_name)


def test_examples(request: pytest.FixtureRequest, longca: Session, longca_kernel_name: str, longca_mask_name: str) -> None:
    run_examples(request.node, longca, longca_kernel_name, longca_mask_name)
