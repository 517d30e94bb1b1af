"""The known failures: each one that is about a kernel of this run must still fail as it says."""

import pytest

from pytest_longca.conformance import run_known_failure
from pytest_longca.known_failures import Entry
from pytest_longca.session import Session


def test_known_failure(
    request: pytest.FixtureRequest, longca: Session, longca_kernel_name: str, longca_known_failure: Entry | None
) -> None:
    run_known_failure(request.node, longca, longca_kernel_name, longca_known_failure)
