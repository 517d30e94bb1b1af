"""One case, by its id: what a failure's replay line runs."""

import pytest

from pytest_longca.conformance import run_case
from pytest_longca.ids import parse_case
from pytest_longca.session import Session


def test_case(request: pytest.FixtureRequest, longca: Session, longca_kernel_name: str, longca_replayed: str) -> None:
    run_case(request.node, longca, longca_kernel_name, parse_case(longca_replayed, longca.catalogue.masks()))
