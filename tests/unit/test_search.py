"""The search for a failing case: what is worth shrinking."""

import types
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from pytest_longca.case import Case
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.checks import Verification
from pytest_longca.errors import CheckFailed
from pytest_longca.kernel import Kernel
from pytest_longca.machine import CPU
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Outcome, Wrong
from pytest_longca.search import Search

CASE = Case(mask=Causal(9, 9))
SMALLER = replace(CASE, mask=Causal(4, 4))


@dataclass
class Fixed:
    """What the search asks of a session; every case has the same outcome."""

    outcome: Outcome
    num_verified: int = 0
    options = types.SimpleNamespace(checks=("default",))
    machine = CPU

    @property
    def catalogue(self) -> "Fixed":
        return self

    def kernel(self, name: str) -> Kernel:
        kernel: Kernel = load(KERNELS[name])()
        return kernel

    def verify(self, kernel: str, case: Case, checks: Iterable[str]) -> Verification:
        self.num_verified += 1
        return Verification(self.outcome)


@pytest.mark.parametrize("reproducible", [True, False])
def test_what_does_not_come_back_is_not_shrunk(reproducible: bool) -> None:
    session = Fixed(Wrong("truth: dq: 9 times its limit", reproducible=reproducible))
    search = Search(session, "naive")  # type: ignore[arg-type]  # what it asks of a session
    with pytest.raises(CheckFailed):
        search.example(CASE)
    if reproducible:
        with pytest.raises(CheckFailed):
            search.example(SMALLER)
    else:
        search.example(SMALLER)
    with pytest.raises(CheckFailed):  # the case itself stays what it was, however often it is asked for
        search.example(CASE)
    assert session.num_verified == 1 + reproducible
    assert search.failed and search.failed[0] == CASE
