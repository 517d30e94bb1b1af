"""The checker checked: every known fault, planted into a correct kernel on this machine, must be caught."""

import pytest

from pytest_longca.selftest_session import run_fault
from pytest_longca.session import Session


def test_fault(request: pytest.FixtureRequest, longca: Session, longca_fault: str) -> None:
    run_fault(request.node, longca, longca_fault)
