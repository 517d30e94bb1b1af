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
from pytest_longca.search import Search, drawn_cases
from pytest_longca.strategies import mask_class

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


def test_masks_of_a_run_do_not_all_draw_the_same() -> None:
    session = types.SimpleNamespace(
        options=types.SimpleNamespace(seed=0),
        catalogue=types.SimpleNamespace(mask=mask_class, kernel=lambda name: load(KERNELS[name])()),
        machine=CPU,
        taken=lambda option, kernel: ("fp32", "bf16", "fp16"),
        num_examples=lambda kernel: 20,
    )
    of_full, of_causal = (
        [(case.dtype, case.head_dim, case.values, case.seqlen_q) for case in drawn_cases(session, "naive", mask)]  # type: ignore[arg-type]  # as above
        for mask in ("full", "causal")
    )
    assert len(set(of_full) & set(of_causal)) < 5
