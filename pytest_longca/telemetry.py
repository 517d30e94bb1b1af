"""The GPU's state around a measurement, read through NVML: clocks, power, temperature, and whether it was throttled."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Bits of nvmlClocksEventReasons that mean that the device could not run as it would. A software power cap is how these devices
# run at full load, so it is reported and not a reason to discard.
THROTTLES = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
SW_POWER_CAP = 0x04


@dataclass(frozen=True, slots=True)
class State:
    """One reading. All fields are 0 where NVML is not there.

    `is_late`: the device had begun a call before the host had launched all of it, so that it may have waited in it.
    """

    sm_mhz: int = 0
    memory_mhz: int = 0
    power_w: float = 0.0
    temperature_c: int = 0
    reasons: int = 0
    is_late: bool = False

    @property
    def is_throttled(self) -> bool:
        return any(self.reasons & bit for bit in THROTTLES)


class Telemetry:
    """NVML for one device of torch's; without the package nvidia-ml-py there are no readings, and the summary says so."""

    def __init__(self, index: int) -> None:
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = _handle(pynvml, index)
        except pynvml.NVMLError:  # a container without NVML's library
            return

    @property
    def driver(self) -> str | None:
        """The driver's version, or None where it is unknown."""
        if self._handle is None:
            return None
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def read(self) -> State:
        """The device's state now."""
        if self._handle is None:
            return State()
        nvml, handle = self._nvml, self._handle
        return State(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )

    def summary(self, states: Sequence[State]) -> dict[str, Any]:
        """The readings of one case as JSON values: medians, and the reasons that were seen."""
        if self._handle is None or not states:
            return {"telemetry": "none: install nvidia-ml-py"}
        seen = 0
        for state in states:
            seen |= state.reasons
        return {
            "sm_mhz": statistics.median(state.sm_mhz for state in states),
            "memory_mhz": statistics.median(state.memory_mhz for state in states),
            "power_w": statistics.median(state.power_w for state in states),
            "temperature_c": max(state.temperature_c for state in states),
            "throttled": [name for bit, name in THROTTLES.items() if seen & bit],
            "power_capped": bool(seen & SW_POWER_CAP),
        }


def _handle(nvml: Any, index: int) -> Any:
    """The device that torch calls `index`: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's, so by its UUID."""
    import torch

    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode())
    except nvml.NVMLError:  # a MIG slice, whose UUID is not a GPU's
        return nvml.nvmlDeviceGetHandleByIndex(index)
