"""The `training` check: what holds in a model holds for a right kernel, and each use has a fault that only it shows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.checks import verify
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import AutogradCall, Call, Kernel
from pytest_longca.kernels.flashmask import FlashMask
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.machine import CPU
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal
from pytest_longca.outcome import Passed
from pytest_longca.training import COMPILED, INDUCTOR_EVERY

CASE = Case(mask=Causal(9, 9), batch=2, heads_q=4, heads_kv=2, head_dim=16)
TO_CODE = replace(CASE, seed=INDUCTOR_EVERY - 1)

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def changed(change: Callable[[Attend], Attend]) -> Kernel:
    """Naive with its differentiable function changed."""

    class Changed(Naive):
        name = "changed"

        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            return AutogradCall(change(super().bind(case, inputs).function), inputs)

    return Changed()


def halved_if_compiled(attend: Attend) -> Attend:
    """The path for compilers has another result, as flash-attn's has another code."""

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse = attend(q, k, v)
        return (out / 2 if torch.compiler.is_compiling() else out), lse

    return wrong


def wrong_the_second_time(attend: Attend) -> Attend:
    """A second forward on the same tensors, as checkpointing makes it, meets what the first one left."""
    first: list[Tensor] = []

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        is_again = any(q is before for before in first)
        first.append(q)
        return attend(q * 2 if is_again else q, k, v)

    return wrong


@pytest.mark.parametrize("case", [CASE, replace(CASE, mask=CausalDocument((3, 0, 6)), dtype="bf16", seed=2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [Naive(), Sdpa()], ids=lambda kernel: kernel.name)
def test_a_right_kernel_is_right_in_every_use(kernel: Kernel, case: Case) -> None:
    verification = verify(kernel, case, CPU, ["training"])
    assert verification.outcome == Passed() and verification.facts[COMPILED] == "aot_eager"


def test_one_case_of_some_is_compiled_to_code() -> None:
    verification = verify(Sdpa(), TO_CODE, CPU, ["training"])
    assert verification.outcome == Passed() and verification.facts[COMPILED] == "inductor"


def test_a_path_for_compilers_is_judged() -> None:
    findings = verify(changed(halved_if_compiled), CASE, CPU, ["training"]).findings
    assert findings and all(finding.message.startswith("under torch.compile (aot_eager): ") for finding in findings)


def test_a_recomputed_forward_is_judged() -> None:
    findings = verify(changed(wrong_the_second_time), CASE, CPU, ["training"]).findings
    assert findings and all(finding.message.startswith("under checkpointing: ") for finding in findings)


def test_a_missing_compiler_of_cpp_is_a_fact_with_its_reason() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        verification = verify(Naive(), TO_CODE, CPU, ["training"])
    assert verification.outcome == Passed()
    assert verification.facts[COMPILED].startswith("refused: crashed: naive raised InductorError: InvalidCxxCompiler")


def test_what_is_interpreted_or_has_no_differentiable_function_is_not_compiled() -> None:
    assert COMPILED not in verify(FlashMask(), replace(CASE, batch=1, heads_q=1, heads_kv=1), CPU, ["training"]).facts

    class Plain(Kernel):
        name = "plain"

        def bind(self, case: Case, inputs: Inputs) -> Call:
            call = Naive().bind(case, inputs)

            class Bound(Call):
                forward = staticmethod(call.forward)
                backward = staticmethod(call.backward)

            return Bound()

    assert verify(Plain(), CASE, CPU, ["training"]).facts["training"].startswith("not asked")
