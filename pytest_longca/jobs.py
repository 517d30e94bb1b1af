"""What a worker does: one function for each request, JSON in and JSON out."""

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import DidNotRun
from pytest_longca.machine import CPU, Machine
from pytest_longca.outcome import Wrong


class Workshop:
    """One process's kernels, masks and machine, and the requests it answers."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.name = uuid.uuid4().hex[:12]  # tells processes apart in records; a pid may come again
        self._machine: Machine | None = None

    @property
    def machine(self) -> Machine:
        """The machine of this process; asks CUDA at the first use."""
        if self._machine is None:
            self._machine = find_machine()
        return self._machine

    def perform(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; `op` names the function of JOBS."""
        return JOBS[request["op"]](self, request)


def find_machine() -> Machine:
    """The GPU that torch sees first, or the CPU. Initialises CUDA: for workers, not for the pytest process."""
    import torch

    if not torch.cuda.is_available():
        return CPU
    properties = torch.cuda.get_device_properties(0)
    return Machine("cuda", (properties.major, properties.minor), properties.name, properties.total_memory)


def _machine(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    return dataclasses.asdict(shop.machine)


def _verify(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    from pytest_longca.checks import verify
    from pytest_longca.ids import parse_case

    case = parse_case(request["case"], shop.catalogue.masks())
    return verify(shop.catalogue.kernel(request["kernel"]), case, shop.machine, request["checks"]).to_json()


def _time(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    """Time a case that was verified, and verify it once more on fresh inputs."""
    from pytest_longca.checks import verify
    from pytest_longca.device_kernels import device_kernels, silent_fallback
    from pytest_longca.ids import parse_case
    from pytest_longca.timing import CLOCKS, Effort, time_case

    case = parse_case(request["case"], shop.catalogue.masks())
    kernel = shop.catalogue.kernel(request["kernel"])
    try:
        effort = Effort(min_samples=request["min_samples"], budget_s=request["sampling_s"])
        timing = time_case(kernel, case, shop.machine, effort)
        names = device_kernels(kernel, case, shop.machine)
    except DidNotRun as stopped:
        return {"outcome": stopped.outcome.to_json()}
    fallback = silent_fallback(kernel, names)
    again = verify(kernel, dataclasses.replace(case, seed=case.seed + 1), shop.machine, ("truth",))
    return {
        "outcome": (Wrong(fallback) if fallback else again.outcome).to_json(),
        "timing": dataclasses.asdict(timing),
        "process": shop.name,
        "device_kernels": names,
        "protocol": CLOCKS[shop.machine.device].protocol,
    }


def _peaks(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    from pytest_longca.timing import device_peaks

    return dict(device_peaks()) if shop.machine.device == "cuda" else {}


JOBS: dict[str, Callable[[Workshop, dict[str, Any]], dict[str, Any]]] = {
    "machine": _machine,
    "verify": _verify,
    "time": _time,
    "peaks": _peaks,
}
