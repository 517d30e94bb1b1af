"""A worker's answers: what becomes of an error, and when a process is of no more use."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from pytest_longca import jobs
from pytest_longca.catalogue import Catalogue
from pytest_longca.jobs import JOBS, Workshop
from pytest_longca.machine import CPU
from pytest_longca.outcome import outcome_from_json
from pytest_longca.reference import forget_references


def broken(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("an illegal memory access\nwas encountered")


@pytest.fixture
def perform(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Answer a request that raises, or one that does not, on a device that is usable afterwards or not."""
    monkeypatch.setitem(JOBS, "raise", broken)
    monkeypatch.setitem(JOBS, "answer", lambda shop, request: {"x": 1})

    def perform(op: str, is_usable: bool) -> dict[str, Any]:
        monkeypatch.setattr(jobs, "is_usable", lambda machine: is_usable)
        shop = Workshop(Catalogue())
        shop._machine = CPU
        return shop.perform({"op": op})

    return perform


def test_a_device_that_does_not_answer_any_more_ends_the_process_after_the_answer(perform: Callable[..., dict[str, Any]]) -> None:
    assert perform("answer", is_usable=True) == {"x": 1, "time_s": {}}
    assert perform("answer", is_usable=False) == {"x": 1, "time_s": {}, "spent": True}


def test_an_error_that_comes_with_a_lost_device_is_the_cases_crash(perform: Callable[..., dict[str, Any]]) -> None:
    answer = perform("raise", is_usable=False)
    reason = str(outcome_from_json(answer["outcome"]))
    assert reason == "crashed: the device does not answer after it: RuntimeError: an illegal memory access"
    assert answer["spent"] is True


def test_an_answer_says_how_long_its_kernels_and_references_took_and_no_earlier_ones() -> None:
    shop = Workshop(Catalogue())
    request = {"op": "verify", "kernel": "naive", "case": "full(seqlen_q=8,seqlen_kv=8)/b1/h1:1/d8/fp32/fwd/s0", "checks": ["truth"]}
    forget_references()
    first, again = (shop.perform(dict(request))["time_s"] for _ in range(2))
    assert first["kernels"] > 0 and first["reference"] > 0
    assert again["kernels"] > 0 and "reference" not in again


def test_garbage_is_collected_before_a_timing_and_only_a_long_collection_sets_its_survivors_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gone, before = weakref.ref(node), gc.get_freeze_count()
    del node
    monkeypatch.setattr(jobs, "LONG_COLLECTION_S", 1e9)
    jobs._collect_garbage()
    assert gone() is None and gc.get_freeze_count() == before
    monkeypatch.setattr(jobs, "LONG_COLLECTION_S", 0.0)
    jobs._collect_garbage()
    assert gc.get_freeze_count() > before
    gc.unfreeze()


def test_any_other_error_is_raised(perform: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        perform("raise", is_usable=True)
