"""Which kernels the GPU really ran: profiler names, and whether they are the ones that an adapter promises."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.kernel import Kernel
    from pytest_longca.machine import Machine

LONGEST_NAME = 160
"""C++ kernels are named by all their template arguments: what is cut off says nothing that a reader of a record needs."""


def device_kernels(kernel: "Kernel", case: "Case", machine: "Machine") -> list[str]:
    """What a case of a kernel launches on the GPU, forward and, where it has one, backward. Empty without a GPU."""
    from pytest_longca.inputs import make_inputs

    if machine.device != "cuda":
        return []
    inputs = make_inputs(case, machine.device)
    call = kernel.bind(case, inputs)

    def run() -> None:
        call.forward()
        if case.direction.needs_backward:
            call.backward(inputs.do)

    return launched(run)


def launched(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that one call launches on the GPU, each once, in the order of their first launch.

    Runs `call` twice: a first time so that compilation and planning stay outside. Not for timed regions.
    """
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined,unused-ignore]  # torch's stubs leave it out
    from torch.autograd.profiler import profile

    call()
    torch.cuda.synchronize()
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
        call()
        torch.cuda.synchronize()
    assert profiler.kineto_results is not None, "the profiler has stopped"
    events = (event for event in profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA)
    names = (event.name() for event in events if not event.is_user_annotation())
    return list(dict.fromkeys(short_name(name) for name in names if not name.startswith(("Memcpy", "Memset"))))


def short_name(name: str) -> str:
    """A kernel's name, cut to what is read."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def silent_fallback(kernel: "Kernel", names: list[str]) -> str | None:
    """Why the kernels that ran are not the ones that the adapter promises, or None. Nothing is said where nothing was seen or promised."""
    pattern = kernel.device_kernel_pattern
    if not pattern or not names or any(re.search(pattern, name) for name in names):
        return None
    return f"{kernel.name} promises a device kernel that matches {pattern!r}, and what ran was {', '.join(names)}: a silent fallback"
