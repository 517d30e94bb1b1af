"""What a worker does: one function for each request, JSON in and JSON out."""

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import DidNotRun, LongcaError
from pytest_longca.machine import CPU, Machine
from pytest_longca.outcome import Crashed, Wrong
from pytest_longca.spent import TIME, taken

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.kernel import Kernel
    from pytest_longca.timing import Effort, Timing


LONG_COLLECTION_S = 0.02
GPU_HOST_THREADS = 2
"""For what a process with a GPU computes on the host: small things, while many processes may share the cores."""


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
            if self._machine.device == "cuda":
                import torch

                torch.set_num_threads(GPU_HOST_THREADS)
        return self._machine

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """What only the process that uses the device knows: the driver and CUDA. Empty on a CPU."""
        if self.machine.device != "cuda":
            return {}
        import torch

        from pytest_longca.telemetry import Telemetry

        found = {"cuda": torch.version.cuda, "driver": Telemetry(torch.cuda.current_device()).driver}
        return {name: version for name, version in found.items() if version}

    def perform(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; `op` names the function of JOBS.

        `spent` says that the device is of no use to this process any more: an illegal access shows up at whatever touches the device
        next, so an error that comes with it is the case's outcome and no fault of what raised it.
        """
        taken()
        try:
            answer = JOBS[request["op"]](self, request)
        except Exception as error:
            if self._machine is None or is_usable(self._machine):
                raise
            answer = _lost(error)
        answer = {**answer, TIME: taken()}
        return answer if self._machine is None or is_usable(self._machine) else {**answer, "spent": True}


def _lost(error: Exception) -> dict[str, Any]:
    """The answer of a case after which the device does not answer."""
    from pytest_longca.checks import Verification

    first_line = str(error).strip().split("\n", 1)[0]
    return Verification(Crashed(f"the device does not answer after it: {type(error).__name__}: {first_line}")).to_json()


def is_usable(machine: Machine) -> bool:
    """Whether the device still answers: after an illegal access, every later call in the same process fails."""
    import torch

    try:
        if machine.device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


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


def _warm(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    """Run a case as it will be run, for what that compiles. What goes wrong is told when it counts."""
    from pytest_longca.ids import parse_case
    from pytest_longca.warming import run_here

    case = parse_case(request["case"], shop.catalogue.masks())
    with contextlib.suppress(LongcaError):
        return run_here(shop.catalogue.kernel(request["kernel"]), case, shop.machine, request["checks"])
    return {}


def _time(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    """Time a case that was verified, and verify it once more on fresh inputs."""
    from pytest_longca.checks import verify
    from pytest_longca.device_kernels import device_kernels, silent_fallback
    from pytest_longca.ids import parse_case
    from pytest_longca.nominal import above_nominal
    from pytest_longca.subject import kernel_errors
    from pytest_longca.timing import CLOCKS, Effort

    _collect_garbage()
    case = parse_case(request["case"], shop.catalogue.masks())
    kernel = shop.catalogue.kernel(request["kernel"])
    anchor = shop.catalogue.kernel(request["anchor"]) if request.get("anchor") else None
    effort = Effort(min_samples=request["min_samples"], budget_s=request["sampling_s"])
    try:
        timing, no_anchor = _timing(kernel, case, shop.machine, effort, anchor, request.get("memory_limit"))
        with kernel_errors(kernel.name):
            names = device_kernels(kernel, case, shop.machine)
    except DidNotRun as stopped:
        return {"outcome": stopped.outcome.to_json()}
    median_ms = statistics.median(timing.samples_ms)
    fault = silent_fallback(kernel, names) or above_nominal(case.flop(), median_ms, case.dtype, shop.machine.name)
    again = verify(kernel, dataclasses.replace(case, seed=case.seed + 1), shop.machine, ("truth",))
    return {
        "outcome": (Wrong(fault) if fault else again.outcome).to_json(),
        "timing": dataclasses.asdict(timing),
        "no_anchor": no_anchor,
        "process": shop.name,
        "device_kernels": names,
        "protocol": CLOCKS[shop.machine.device].protocol,
        "versions": shop.versions,
        "threads": None if shop.machine.device == "cuda" else num_threads(),
    }


def _collect_garbage() -> None:
    """Free what earlier cases left in cycles. Where that took long, what survived it (modules, mostly) is not looked at again."""
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > LONG_COLLECTION_S:
        gc.freeze()


def _timing(
    kernel: "Kernel", case: "Case", machine: Machine, effort: "Effort", anchor: "Kernel | None", limit: int | None
) -> "tuple[Timing, str | None]":
    """The timing, and why it has no anchor although there is one: what goes wrong beside an anchor is not the kernel's fault."""
    from pytest_longca.timing import time_case

    if anchor is None:
        return time_case(kernel, case, machine, effort, limit_bytes=limit), None
    try:
        return time_case(kernel, case, machine, effort, anchor, limit), None
    except DidNotRun as stopped:
        return time_case(kernel, case, machine, effort, limit_bytes=limit), f"beside {anchor.name}: {stopped}"


def num_threads() -> int:
    """How many threads torch's operations use here."""
    import torch

    return torch.get_num_threads()


def _peaks(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    """The device's ceilings; the memory that measuring them took is given back."""
    from pytest_longca.timing import device_peaks

    if shop.machine.device != "cuda":
        return {"peaks": {}}
    import torch

    peaks = device_peaks()
    torch.cuda.empty_cache()
    return {"peaks": peaks}


def _hunt(shop: Workshop, request: dict[str, Any]) -> dict[str, Any]:
    """Whether a planted fault is caught on this process's machine."""
    from pytest_longca.faults import FAULTS
    from pytest_longca.selftest import hunt

    catch = hunt(FAULTS[request["fault"]], shop.machine)
    return {"check": catch.check, "text": str(catch)}


JOBS: dict[str, Callable[[Workshop, dict[str, Any]], dict[str, Any]]] = {
    "machine": _machine,
    "verify": _verify,
    "warm": _warm,
    "time": _time,
    "peaks": _peaks,
    "hunt": _hunt,
}
