"""How often a cell's examples have our Triton kernels compiled on a GPU, counted without one: launches are recorded, not run."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.machine_code import in_another_process

EXAMPLES = 210
MOST = {"flashmask": 60, "vsa_triton": 60}
"""Compilations of a cell: a second or two each. Without few head dims and few codes for strides it was 1300 and more."""


@pytest.mark.parametrize(
    ("kernel", "mask"), [("flashmask", "causal_document"), ("vsa_triton", "uniform_block"), ("vsa_triton", "variable_block")]
)
def test_a_cells_examples_need_few_compilations(kernel: str, mask: str, tmp_path: Path) -> None:
    (made,) = in_another_process(__file__, tmp_path, "cell", kernel, mask)
    assert len(made["codes"]) >= 3, made
    assert sum(made["codes"].values()) <= MOST[kernel], made
    assert made["lengths"] > 60 and made["layouts"] > 100, made


def test_only_strides_of_no_multiple_of_16_need_another_code(tmp_path: Path) -> None:
    made = in_another_process(__file__, tmp_path, "alike")
    assert [one["new"] for one in made] == [True, False, False, True, False, False], made


class Recorder:
    """Takes the place of a launch on an H200: for each kernel what it would be compiled for."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, set[Any]] = defaultdict(set)

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if not hasattr(kernel, "own_binder"):
            kernel.own_binder = kernel.create_binder()[-1]
        _, specialization, options = kernel.own_binder(*args, **constants, debug=False)
        self.seen[kernel.fn.__name__].add((str(specialization), str(options)))

    @property
    def number(self) -> int:
        return sum(map(len, self.seen.values()))


def recorder() -> Recorder:
    """Launches are recorded from now on, and launched as on an H200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from pytest_longca.kernels import flashmask, vsa_triton

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def choose_launch(head_dim: int, dtype: Any, device: Any) -> flashmask.Launch:
        tiles = flashmask.HOPPER[max(64, 1 << (head_dim - 1).bit_length())]
        return flashmask.Launch(*tiles, tma=True, processors=132)

    def make_plan(block_map: Any, sizes_q: Any, sizes_kv: Any, heads_kv: int, heads_q: int, configs: Any, backward: bool = True) -> Any:
        return planned(block_map, sizes_q, sizes_kv, heads_kv, heads_q, vsa_triton.choose_configs(sizes_q, sizes_kv), backward)

    recorder, planned = Recorder(), vsa_triton.make_plan
    triton.runtime.driver.set_active(Driver())
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (flashmask, "choose_launch", choose_launch),
        (vsa_triton, "make_plan", make_plan),
        (JITFunction, "run", lambda kernel, *args, **options: recorder(kernel, *args, **options)),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)
    return recorder


def launch(kernel: Any, case: Any) -> None:
    from pytest_longca.inputs import make_inputs

    inputs = make_inputs(case)
    call = kernel.bind(case, inputs)
    call.forward()
    call.backward(inputs.do)


def cell(name: str, mask: str) -> list[dict[str, Any]]:
    from hypothesis import HealthCheck, Phase, given, settings

    from pytest_longca.catalogue import KERNELS, load
    from pytest_longca.machine import H200
    from pytest_longca.strategies import cases

    kernel, seen, lengths, layouts = load(KERNELS[name])(), recorder(), set(), set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases([mask], kernel, H200, dtypes=("bf16", "fp16")))
    def run(case: Any) -> None:
        lengths.add((case.seqlen_q, case.seqlen_kv))
        layouts.add(case.layouts)
        launch(kernel, case)

    run()
    return [{"codes": {name: len(keys) for name, keys in seen.seen.items()}, "lengths": len(lengths), "layouts": len(layouts)}]


def alike() -> list[dict[str, Any]]:
    """Cases one after the other, and whether each needed a code that no one before it had."""
    from pytest_longca.case import Case, Layout
    from pytest_longca.kernels.flashmask import FlashMask
    from pytest_longca.masks.regular import Causal

    plain, padded = Layout.CONTIGUOUS, Layout.PADDED
    steps = (
        (64, 2, (plain,) * 4),
        (77, 1, (Layout.BHSD, Layout.FUSED, Layout.OFFSET, plain)),
        (1, 16, (Layout.FUSED,) * 4),
        (64, 2, (padded,) * 4),
        (9, 1, (padded, plain, plain, padded)),
        (33, 16, (plain, plain, padded, Layout.BHSD)),
    )
    seen, made = recorder(), []
    for seqlen, heads, layouts in steps:
        before = seen.number
        case = Case(mask=Causal(seqlen, seqlen), batch=2, heads_q=heads, heads_kv=heads, head_dim=64, dtype="bf16", layouts=layouts)
        launch(FlashMask(), case)
        made.append({"case": case.id, "new": seen.number > before})
    return made


if __name__ == "__main__":
    print(json.dumps(cell(*sys.argv[2:]) if sys.argv[1] == "cell" else alike()))
