"""What every dense kernel declares: each refusal with its reason, told without a GPU and without importing a backend."""

import dataclasses
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_longca.block_map import ExplicitMap
from pytest_longca.case import Case, Direction, Layout
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.kernel import Kernel
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import CausalBlockwise, CausalDocument, FullDocument
from pytest_longca.masks.prefix import PrefixLmCausal
from pytest_longca.masks.regular import Causal, CausalSlidingWindow, Full, FullSlidingWindow

A100 = Machine("cuda", (8, 0), "NVIDIA A100", 80 * 2**30)
B200 = Machine("cuda", (10, 0), "NVIDIA B200", 180 * 2**30)
FWD = Direction.FWD
EXPANDED, SHARED = ((layout, *[Layout.CONTIGUOUS] * 3) for layout in (Layout.EXPANDED, Layout.SHARED))
PACKAGED = ("fa2", "fa3", "fa4", "cudnn", "cudnn_flex")


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = load(KERNELS[name])()
    return kernel


def half(mask: Mask, **sizes: object) -> Case:
    return Case(mask=mask, **({"dtype": "bf16", "heads_q": 8, "heads_kv": 2, "head_dim": 128} | sizes))  # type: ignore[arg-type]  # a table's values


def blocks(size: int) -> UniformBlock:
    return UniformBlock(2 * size, 2 * size, size, ExplicitMap.of([[[1, 0], [1, 1]]]))


@pytest.fixture(autouse=True)
def no_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3's build flags are read where it is installed: here a build without a backward is."""
    flags = {"FLASHATTENTION_DISABLE_BACKWARD": True, "FLASHATTENTION_DISABLE_HDIM256": True, "FLASHATTENTION_DISABLE_HDIM192": True}
    config = types.ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]  # what the package generates
    config.__spec__ = types.SimpleNamespace(name="flash_attn_config")  # type: ignore[assignment]  # find_spec looks at it
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)


ACCEPTED = [
    ("naive", half(CausalBlockwise((100, 28))), H200),
    ("sdpa", half(CausalBlockwise((100, 28))), H200),
    ("sdpa", half(Full(100, 100), dtype="fp64"), CPU),
    ("sdpa_flash", half(Causal(100, 100)), H200),
    ("sdpa_efficient", half(CausalBlockwise((100, 28))), H200),
    ("sdpa_cudnn", half(Causal(100, 100), head_dim_v=64), H200),
    ("sdpa_cudnn", half(Causal(100, 100), layouts=EXPANDED), H200),
    ("sdpa_cudnn", half(Causal(100, 100), head_dim_v=64, layouts=SHARED), H200),
    ("flex", half(blocks(64)), H200),
    ("flex", half(Causal(100, 90), direction=FWD), CPU),
    ("flex", half(Causal(32, 90)), H200),
    ("flex", half(Causal(128, 90)), H200),
    ("flex", half(Causal(100, 90), heads_q=1, heads_kv=1), H200),
    ("flex", half(UniformBlock(64, 64, 32, ExplicitMap.of([[[1, 0], [1, 1]]] * 8))), H200),
    ("flex", half(Causal(100, 90), heads_q=12, heads_kv=4), H200),
    ("fa2", half(CausalDocument((100, 0, 28), (90, 5, 28)), head_dim=64), A100),
    ("fa2", half(FullSlidingWindow(100, 90, 17)), H200),
    ("fa3", half(FullDocument((100, 28)), direction=FWD), H200),
    ("fa4", half(CausalSlidingWindow(100, 90, 17)), B200),
    ("fa4", half(CausalBlockwise((100, 28))), H200),
    ("fa4", half(blocks(128)), H200),
    ("fa4", half(Causal(100, 90), head_dim=256, direction=FWD), H200),
    ("fa4", half(Causal(100, 90), head_dim=192, head_dim_v=128, heads_kv=8), H200),
    ("fa4", half(Causal(100, 90), head_dim=192, head_dim_v=128, direction=FWD), H200),
    ("cudnn", half(CausalSlidingWindow(100, 90, 17)), A100),
    ("cudnn", half(Causal(100, 90)), H200),
    ("cudnn", half(CausalDocument((100, 28), (90, 28))), H200),
    ("cudnn", half(FullDocument((100, 0, 28))), H200),
    ("cudnn", half(FullDocument((100, 0, 28), (90, 5, 28))), H200),
    ("cudnn", half(Causal(90, 100), head_dim=192, head_dim_v=128), H200),
    ("cudnn_flex", half(CausalBlockwise((100, 28)), head_dim=72, head_dim_v=24), H200),
    ("cudnn_flex", half(Causal(90, 100), head_dim=192, head_dim_v=128), H200),
]

REFUSED = [
    ("sdpa_flash", half(CausalBlockwise((100, 28))), H200, "FLASH_ATTENTION takes no mask tensor"),
    ("sdpa_flash", half(Causal(100, 90)), H200, "FLASH_ATTENTION takes no mask tensor"),
    ("sdpa_flash", half(Causal(100, 100), dtype="fp32"), H200, "FLASH_ATTENTION takes bf16, fp16, not fp32"),
    ("sdpa_flash", half(Causal(100, 100)), CPU, "runs on cuda only"),
    ("sdpa_efficient", half(Causal(100, 100), dtype="fp64"), H200, "EFFICIENT_ATTENTION takes fp32, bf16, fp16, not fp64"),
    ("sdpa_efficient", half(Causal(100, 100), head_dim=60), H200, "EFFICIENT_ATTENTION takes head dims in steps of 8"),
    ("sdpa_cudnn", half(Causal(100, 100), head_dim=256), H200, "CUDNN_ATTENTION takes head_dim up to 128"),
    ("sdpa_cudnn", half(Causal(100, 100), head_dim_v=64, layouts=EXPANDED), H200, "has no graph for q of shared memory"),
    ("sdpa_cudnn", half(Causal(100, 100), head_dim_v=64, layouts=SHARED, batch=2), H200, "has no graph for q of shared memory"),
    ("sdpa", half(Full(0, 100)), H200, "takes no sequence of length 0"),
    ("naive", half(CausalBlockwise((2**17,)), heads_q=64), H200, "holds all scores at once, about 24576.0 GiB for this case"),
    ("sdpa", half(CausalBlockwise((2**17,)), heads_q=64), H200, "holds all scores at once"),
    ("flex", half(Causal(33, 90)), H200, "at most 128 rows: not 33 queries of 4 heads"),
    ("flex", half(Causal(100, 90)), CPU, "has no backward on the CPU"),
    ("flex", half(Causal(100, 90), dtype="fp64"), H200, "takes fp32, bf16, fp16, not fp64, when compiled"),
    ("flex", half(Causal(100, 90), head_dim=8), H200, "takes head dims from 16 when compiled"),
    ("fa2", half(CausalBlockwise((100, 28))), H200, "and causal_blockwise has no such form"),
    ("fa2", half(Causal(100, 100), dtype="fp32"), H200, "takes bf16, fp16, not fp32"),
    ("fa2", half(Causal(100, 100), head_dim=100), H200, "head_dim 100 is not among 8 to 256 in steps of 8"),
    ("fa2", half(Causal(100, 100), head_dim=264), H200, "head_dim 264 is not among 8 to 256 in steps of 8"),
    ("fa2", half(Causal(100, 100), head_dim_v=64), H200, "needs head_dim_v = head_dim"),
    ("fa2", half(Causal(100, 100)), CPU, "runs on cuda only"),
    ("fa2", half(Causal(100, 100)), Machine("cuda", (7, 5)), "needs compute capability 8.0, this is 7.5"),
    ("fa2", half(FullSlidingWindow(100, 20, 40)), H200, "takes a right window of 40 over 20 keys as unlimited"),
    ("fa2", half(FullDocument((1, 0), (4, 4))), H200, "takes no empty document among one-query documents with grouped heads"),
    ("fa3", half(Causal(100, 100)), H200, "this build of FlashAttention-3 is forward only (its flash_attn_config says so)"),
    ("fa3", half(Causal(100, 100), direction=FWD), B200, "runs on Hopper (compute capability 9.x) only"),
    ("fa3", half(Causal(100, 100), direction=FWD), A100, "needs compute capability 9.0, this is 8.0"),
    ("fa3", half(Causal(100, 100), direction=FWD, head_dim=136), H200, "this build has head dims up to 128"),
    ("fa4", half(Causal(100, 100), head_dim=200), H200, "has a backward for head dims up to 192 only"),
    ("fa4", half(Causal(100, 100), head_dim=192, head_dim_v=128), H200, "needs head_dim_v = head_dim in the backward of grouped heads"),
    ("fa4", half(Causal(100, 100), heads_kv=8, head_dim=24, head_dim_v=96), H200, "reaches outside of its memory with unequal head dims"),
    ("fa4", half(Causal(100, 100), head_dim=96, head_dim_v=192, direction=FWD), H200, "or (192, 128), not (96, 192)"),
    ("fa4", half(Causal(100, 100), heads_kv=8, head_dim_v=64), B200, "or (192, 128), not (128, 64)"),
    ("fa4", half(PrefixLmCausal(100, 100, 7), head_dim=136), H200, "takes tile lists for head dims up to 128"),
    ("fa4", half(blocks(64)), H200, "takes uniform blocks of a multiple of 128 tokens only"),
    ("fa4", half(Causal(100, 100)), A100, "needs compute capability 9.0, this is 8.0"),
    ("cudnn", half(Causal(100, 100), head_dim=136), A100, "has no backward above head_dim 128 before Hopper"),
    ("cudnn", half(Causal(100, 100), head_dim=192), H200, "has a backward of head_dim 192 with head_dim_v 128 only"),
    ("cudnn", half(CausalBlockwise((100, 28))), H200, "and causal_blockwise has no such form"),
    ("cudnn", half(FullDocument((100, 1, 28), (90, 0, 28))), H200, "takes no queries whose document has no keys"),
    ("cudnn", half(CausalDocument((100, 1, 28), (90, 0, 28))), H200, "takes no queries whose document has no keys"),
    ("cudnn_flex", half(blocks(128)), H200, "and uniform_block has no such form"),
    ("cudnn_flex", half(Causal(100, 100), head_dim=192), H200, "takes head dims up to 128, (192, 128) and (256, 256), not (192, 192)"),
    ("cudnn_flex", half(Causal(100, 100), head_dim=136), H200, "head_dim 136 is not among"),
]


@pytest.mark.parametrize(
    ("name", "case", "machine"), ACCEPTED, ids=lambda value: getattr(value, "id", None) or getattr(value, "name", None)
)
def test_declared_case_is_accepted(name: str, case: Case, machine: Machine) -> None:
    assert kernel_named(name).supports(case, machine) is None


@pytest.mark.parametrize(("name", "case", "machine", "reason"), REFUSED)
def test_refusal_says_why(name: str, case: Case, machine: Machine, reason: str) -> None:
    refusal = kernel_named(name).supports(case, machine)
    assert refusal is not None, "accepted"
    assert reason in refusal.reason


def test_fa3_has_no_fp16_if_the_build_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flash_attn_config"], "CONFIG", {"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}})
    assert kernel_named("fa3").supports(half(Causal(100, 100)), H200) is None
    refusal = kernel_named("fa3").supports(half(Causal(100, 100), dtype="fp16"), H200)
    assert refusal is not None and refusal.reason == "this build of FlashAttention-3 has no fp16"


def test_fa3_has_a_backward_if_the_build_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flash_attn_config"], "CONFIG", {"build_flags": {"FLASHATTENTION_DISABLE_BACKWARD": False}})
    assert kernel_named("fa3").supports(half(Causal(100, 100)), H200) is None
    assert kernel_named("fa3").supports(half(Causal(100, 100), head_dim=256), H200) is None


@pytest.fixture
def flash_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Installs a flash-attn whose library has kernels for the given sizes."""
    from pytest_longca.kernels import fa2

    def install(*sizes: int) -> None:
        library = tmp_path / "flash_attn_2_cuda.so"
        library.write_bytes(b"\x7fELF" + b"".join(b"\0_Z" + fa2.INSTANCE % size + b"Lb0E" for size in sizes))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(origin=str(library)))
        fa2.compiled_sizes.cache_clear()

    yield install
    fa2.compiled_sizes.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "head_dim", "missing"),
    [
        ((64, 128), 64, None),
        ((64, 128), 40, None),
        ((64, 128), 128, None),
        ((64, 128), 104, None),
        ((64, 128), 72, 96),
        ((64, 128), 96, 96),
        ((64, 128), 32, 32),
        ((64, 128), 136, 192),
        ((64, 128), 256, 256),
        ((32, 64, 96, 128, 192, 256), 152, None),
        ((32, 64, 96, 128, 160, 192, 224, 256), 152, None),
        ((), 72, None),
    ],
)
def test_fa2_reads_off_the_library_which_head_dims_have_a_kernel(
    flash_library: Callable[..., None], sizes: tuple[int, ...], head_dim: int, missing: int | None
) -> None:
    from pytest_longca.kernels.fa2 import missing_size

    flash_library(*sizes)
    assert missing_size(head_dim) == missing


def test_fa2_refuses_a_head_dim_whose_kernel_the_build_lacks(flash_library: Callable[..., None]) -> None:
    flash_library(64, 128)
    refusal = kernel_named("fa2").supports(half(Causal(100, 100), head_dim=72), H200)
    assert refusal is not None
    assert refusal.reason == "head_dim 72 runs in the kernel for 96, which this build of flash-attn lacks: it has those for 64, 128"


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn", "cudnn_flex"])
def test_missing_package_is_reported_with_how_to_install_it(name: str) -> None:
    missing = kernel_named(name).missing()
    assert missing is not None
    assert "is not installed" in missing.reason and "pip install" in missing.how


@pytest.mark.parametrize("name", KERNELS)
def test_a_package_that_is_an_extra_is_installed_as_the_extra(name: str) -> None:
    extras = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.split(r"[<>=\[]", package)[0]: extra for extra, listed in extras.items() for package in listed}
    for need in kernel_named(name).requires:
        if extra := packages.get(need.distribution):
            assert need.how == f"pip install 'pytest-longca[{extra}]'"


@pytest.mark.parametrize("name", ["flashmask", "vsa_triton"])
def test_our_own_kernels_need_the_triton_that_the_extra_installs(name: str) -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    (need,) = kernel_named(name).requires
    assert project["optional-dependencies"]["triton"] == [f"{need.distribution}>={need.at_least}"]


def test_asking_every_kernel_imports_no_backend() -> None:
    code = """
import sys
from pytest_longca.case import Case
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.machine import H200
from pytest_longca.masks.document import CausalDocument
case = Case(mask=CausalDocument((100, 28)), dtype="bf16", heads_q=8, heads_kv=2, head_dim=128)
for name in ("naive", "sdpa", "flex", "fa2", "fa3", "fa4", "cudnn", "cudnn_flex"):
    kernel = load(KERNELS[name])()
    kernel.missing(), kernel.supports(case, H200)
backends = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "cudnn", "cutlass", "triton")
print([name for name in sys.modules if name.split(".")[0] in backends])
import torch
print(torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr


@pytest.mark.parametrize("name", PACKAGED)
def test_no_gpu_kernel_accepts_a_cpu(name: str) -> None:
    refusal = kernel_named(name).supports(half(Causal(100, 100), direction=FWD), CPU)
    assert refusal is not None and "runs on cuda only" in refusal.reason


def test_memory_limit_follows_the_machine() -> None:
    case = half(Causal(8192, 8192))
    small = dataclasses.replace(H200, memory_bytes=16 * 2**30)
    assert kernel_named("naive").supports(case, H200) is None
    refusal = kernel_named("naive").supports(case, small)
    assert refusal is not None and "limited to 8.0 GiB here: use shorter sequences" in refusal.reason
