"""How fast a kernel is on a case that it has just been verified on; the samples become a pytest-benchmark result."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_longca.replay import replayed_device_time
from pytest_longca.session import Session
from pytest_longca.speed import run_timing


@pytest.mark.benchmark(timer=replayed_device_time)
def test_timing(
    request: pytest.FixtureRequest,
    longca: Session,
    benchmark: BenchmarkFixture,
    longca_kernel_name: str,
    longca_case_id: str,
    longca_process: int,
) -> None:
    longca.enter_process(longca_process)
    run_timing(request.node, longca, benchmark, longca_kernel_name, longca_case_id)
