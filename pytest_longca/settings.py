"""The settings of a process that belong to all its kernels: read before a kernel's code runs, put back after it, and what changed told."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Get = Callable[[], Any]
Set = Callable[[Any], object]

_CUDA, _MATMUL, _CUDNN = torch.backends.cuda, torch.backends.cuda.matmul, torch.backends.cudnn


def _attribute(holder: Any, name: str) -> tuple[Get, Set]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


# CPU is what there is without a default: unset, it costs nothing.
def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


# torch only sets it. It is the thread's and holds for Python's numbers too.
def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0.0


SETTINGS: dict[str, tuple[Get, Set]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on the CPU": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on CUDA": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic debug mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "flushing of denormals": (_flushes_denormals, torch.set_flush_denormal),
    "backends.fp32_precision": _attribute(torch.backends, "fp32_precision"),
    "cudnn.fp32_precision": _attribute(_CUDNN, "fp32_precision"),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # After those above, which write to this one too.
    "cuda.matmul.fp32_precision": _attribute(_MATMUL, "fp32_precision"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": _attribute(_MATMUL, "allow_fp16_reduced_precision_reduction"),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": _attribute(_MATMUL, "allow_bf16_reduced_precision_reduction"),
    "cudnn.allow_tf32": _attribute(_CUDNN, "allow_tf32"),
    "cudnn.deterministic": _attribute(_CUDNN, "deterministic"),
    "cudnn.benchmark": _attribute(_CUDNN, "benchmark"),
    "flash SDP": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient SDP": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math SDP": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cuDNN SDP": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "working directory": (os.getcwd, os.chdir),
}
"""How each is read and written."""
CHOICES = frozenset(name for name in SETTINGS if "precision" in name or name.startswith("cudnn.") or name.endswith(" SDP"))
CHOICES |= {"flushing of denormals"}  # which one that was linked with -ffast-math turns on, unasked, as it is loaded
"""What a library may choose for its own good when it is imported: put back like all others, and no fault unless a later call changes it."""
UNREADABLE = "unreadable"
"""What stands for a setting that cannot be read: one that this torch does not have or has mixed up, a directory that is gone."""


@dataclass(slots=True)
class Changes:
    """What the code inside `kept` changed: each setting in words, and whether a global random generator moved. Filled at the end."""

    settings: dict[str, str] = field(default_factory=dict)
    generators: list[str] = field(default_factory=list)


@contextlib.contextmanager
def kept() -> Iterator[Changes]:
    """What happens inside leaves the settings and the generators as they were; yields what had to be put back."""
    changes = Changes()
    settings, generators = _read(), _generators()
    try:
        yield changes
    finally:
        for name, now in _read().items():
            if now != settings[name]:
                changes.settings[name] = f"{name} {now} (it was {settings[name]})"
                _put_back(name, settings[name])
        with contextlib.suppress(RuntimeError):  # of a device that is lost: what the kernel raised is what counts
            for device, state in _generators().items():
                if device in generators and not torch.equal(state, generators[device]):
                    changes.generators.append(device)
                    _put_generator_back(device, generators[device])


_UNABLE = (RuntimeError, AttributeError, OSError)


def _read() -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # torch's, about its own older switches
        try:
            return {name: get() for name, (get, _) in SETTINGS.items()}
        except _UNABLE:
            return {name: _readable(get) for name, (get, _) in SETTINGS.items()}


def _readable(get: Get) -> Any:
    try:
        return get()
    except _UNABLE:
        return UNREADABLE


def _put_back(name: str, value: Any) -> None:
    if value != UNREADABLE:
        with contextlib.suppress(*_UNABLE):
            SETTINGS[name][1](value)


def _generators() -> dict[str, Tensor]:
    """The states of the generators that kernels without one of their own draw from. CUDA's is not there before CUDA is."""
    states = {"CPU": torch.get_rng_state()}
    return states | {"CUDA": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else states


def _put_generator_back(device: str, state: Tensor) -> None:
    (torch.cuda.set_rng_state if device == "CUDA" else torch.set_rng_state)(state)
