"""A way to run pytest with the plugin in a directory of its own."""

# Before pytester takes its snapshot of sys.modules: torch cannot be imported twice in one process; and the server that workers are
# forked from then serves every inner run of this process, as it serves every kernel of a session: else each would start one that
# imports torch, and that lives until this process ends. A run in a process of its own still starts its own.
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import multiprocessing.resource_tracker  # noqa: F401
from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.flex_attention  # noqa: F401

KERNELS = '''
"""Kernels that misbehave, each a correct one with one change."""

import ctypes
import time
from dataclasses import replace

import torch

from pytest_longca.errors import DidNotRun
from pytest_longca.kernel import AutogradCall, Kernel
from pytest_longca.kernels.naive import Naive
from pytest_longca.outcome import Unsupported


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.05


class WrongDk(Naive):
    name = "wrong_dk"

    def bind(self, case, inputs):
        call = super().bind(case, inputs)
        function = call.function
        call.function = lambda q, k, v: function(q, ScaleGradient.apply(k), v)
        return call


class Crashing(Naive):
    name = "crashing"

    def bind(self, case, inputs):
        if case.seqlen_q > 15:
            ctypes.string_at(0)
        return super().bind(case, inputs)


class Hanging(Naive):
    name = "hanging"

    def bind(self, case, inputs):
        if case.seqlen_q > 15:
            time.sleep(1000)
        return super().bind(case, inputs)


class ReturnsNone(Naive):
    name = "returns_none"

    def bind(self, case, inputs):
        return AutogradCall(lambda q, k, v: None, inputs, case.direction.needs_backward)


class UsualScale(Naive):
    name = "usual_scale"

    def bind(self, case, inputs):
        return super().bind(replace(case, scale=case.head_dim**-0.5), inputs)


class KeptScale(Naive):
    name = "kept_scale"
    first = None

    def bind(self, case, inputs):
        KeptScale.first = KeptScale.first or case.scale
        return super().bind(replace(case, scale=KeptScale.first), inputs)


class Refusing(Naive):
    name, longest = "refusing", -1

    def bind(self, case, inputs):
        if case.seqlen_q > self.longest:
            raise DidNotRun(Unsupported("no kernel for so long a sequence"))
        return super().bind(case, inputs)


class Picky(Refusing):
    name, longest = "picky", 15


class PickyWrong(Picky, WrongDk):
    name = "picky_wrong"


def pytest_longca_kernels():
    return [WrongDk(), Crashing(), Hanging(), ReturnsNone(), UsualScale(), KeptScale(), Refusing(), Picky(), PickyWrong()]
'''

Run = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def is_no_xdist_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner session is not the xdist worker that its test may run in: timings there are switched off."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run pytest in a fresh directory, in this process, with few examples and no cache."""

    def run(*args: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", *args)

    return run


@pytest.fixture
def judge(run: Run) -> Run:
    """Run the suite without timings on one mask with few examples."""

    def judge(*args: str) -> pytest.RunResult:
        return run("--benchmark-skip", "--longca-masks=causal", "--longca-examples=5", "--longca-dtypes=fp32", *args)

    return judge
