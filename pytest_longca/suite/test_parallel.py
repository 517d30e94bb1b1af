"""Every kernel that serves a block, on every mask, shared among ranks by every mechanism that was asked for."""

import pytest

from pytest_longca.parallel.conformance import run_shared
from pytest_longca.parallel.setup import Sharing
from pytest_longca.session import Session


def test_shared(
    request: pytest.FixtureRequest, longca: Session, longca_kernel_name: str, longca_mask_name: str, longca_sharing: Sharing
) -> None:
    run_shared(request.node, longca, longca_kernel_name, longca_mask_name, longca_sharing)
