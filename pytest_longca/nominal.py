"""Nominal peaks: what a GPU cannot exceed, from its maker's data sheet. A figure above it is a fault of the clock or of the kernel."""

NOMINAL_TFLOP_PER_S: dict[str, dict[str, float]] = {
    # dense matrix units of the largest variant; fp32 inputs may run as TF32
    "H200": {"bf16": 989.4, "fp16": 989.4, "fp32": 494.7, "fp64": 67.0},
    "H100": {"bf16": 989.4, "fp16": 989.4, "fp32": 494.7, "fp64": 67.0},
    "A100": {"bf16": 312.0, "fp16": 312.0, "fp32": 156.0, "fp64": 19.5},
}


def above_nominal(flop: int, time_ms: float, dtype: str, device: str) -> str | None:
    """Why a time cannot be true on the device, or None; nothing is said of devices that are not in the table.

    >>> above_nominal(2 * 10**12, 1.0, "bf16", "NVIDIA H200")
    '2e+03 TFLOP/s in bf16 is above the 989 that an H200 can do: the kernel skips work, or the clock is wrong'
    """
    for name, peaks in NOMINAL_TFLOP_PER_S.items():
        rate = flop / time_ms / 1e9
        if name in device and rate > peaks[dtype]:
            verb = f"{rate:.3g} TFLOP/s in {dtype} is above the {peaks[dtype]:.3g} that an {name} can do"
            return f"{verb}: the kernel skips work, or the clock is wrong"
    return None
