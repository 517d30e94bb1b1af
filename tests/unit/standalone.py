"""What tests do with the text of a standalone file: load it, and hold its call to the adapter's."""

from types import ModuleType

import torch

from pytest_longca.case import Case
from pytest_longca.inputs import make_inputs
from pytest_longca.kernel import Kernel


def loaded(text: str) -> ModuleType:
    """The file as a module."""
    module = ModuleType("standalone")
    exec(compile(text, "standalone.py", "exec"), module.__dict__)
    return module


def same_as_adapter(kernel: Kernel, case: Case, standalone: ModuleType) -> None:
    """The file's call gives what the adapter gives, bit by bit, and the file finds it right."""
    inputs = make_inputs(case)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    call = kernel.bind(case, inputs)
    (out, lse), (own_out, own_lse) = standalone.attention(*leaves), call.forward()
    assert own_lse is not None
    assert torch.equal(out, own_out)
    assert torch.equal(lse, own_lse)
    if case.direction.needs_backward:
        for found, own in zip(torch.autograd.grad(out, leaves, inputs.do), call.backward(inputs.do), strict=True):
            assert torch.equal(found, own)
    standalone.main()
