"""Standalone files: the same operands, mask and verdict as ours, without us."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.block_map import BlockMap
from pytest_longca.case import Case, Direction, Layout, Values
from pytest_longca.checks import Verification
from pytest_longca.errors import InvalidArgument
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.kernel import AutogradCall, Kernel
from pytest_longca.kernels.cudnn import Cudnn
from pytest_longca.kernels.cudnn_flex import CudnnFlex
from pytest_longca.kernels.fa2 import Fa2
from pytest_longca.kernels.fa3 import Fa3
from pytest_longca.kernels.fa4 import Fa4
from pytest_longca.kernels.flashmask import FlashMask
from pytest_longca.kernels.flex import Flex
from pytest_longca.kernels.naive import Naive
from pytest_longca.kernels.sdpa import Sdpa
from pytest_longca.kernels.vsa_triton import VsaTriton
from pytest_longca.machine import CPU
from pytest_longca.mask import Mask, from_mask_mod
from pytest_longca.masks.block import UniformBlock, VariableBlock
from pytest_longca.masks.document import CausalDocument
from pytest_longca.masks.regular import Causal, FullSlidingWindow
from pytest_longca.masks.window import GlobalSlidingWindow
from pytest_longca.outcome import Wrong
from pytest_longca.repro import is_without_call, repro_source, write_repro
from pytest_longca.repro_mask import linear, mask_text
from pytest_longca.strategies import cases
from pytest_longca.subject import Finding
from tests.unit.standalone import loaded, same_as_adapter

FAILED = Verification(Wrong("truth: out: row 0"), [Finding("truth", "out", "row 0\nof head 0")])
CALL = """
def attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, {mask}, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2), None
"""


class TopLeft(Kernel):
    """Causal as torch aligns it: wrong where there are more keys than queries."""

    name = "top_left"
    mask = "is_causal=True"

    def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
        raise NotImplementedError

    def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
        return CALL.format(mask=self.mask)


class Silent(TopLeft):
    """One that gives no call."""

    name = "silent"

    def snippet(self, case: Case, facts: Mapping[str, str]) -> None:
        return None


class Masked(TopLeft):
    """The same call with the mask that is meant."""

    name = "masked"
    mask = "attn_mask=VISIBLE"


def source(kernel: Kernel, case: Case, verification: Verification = FAILED) -> str:
    return repro_source(kernel, case, verification, CPU, {"torch": torch.__version__})


def judged(case: Case, call: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the file says of a call, run in this process."""

    class Given(TopLeft):
        name = "given"

        def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
            return call

    try:
        loaded(source(Given(), case)).main()
    except SystemExit as stopped:
        return str(stopped)
    return capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_kernel_exits_with_1_and_names_the_tensors_and_a_right_one_with_0(tmp_path: Path) -> None:
    case = Case(mask=Causal(12, 15), batch=2, heads_q=4, heads_kv=2, head_dim=16)
    paths = [write_repro(str(tmp_path / "new"), kernel, case, FAILED, CPU, {"torch": "2"}) for kernel in (TopLeft(), Masked())]
    assert re.fullmatch(r"top_left_[0-9a-f]{8}\.py", paths[0].name)
    wrong, right = (subprocess.run([sys.executable, "-I", path], capture_output=True, text=True) for path in paths)
    assert wrong.returncode == 1 and wrong.stderr.strip() == "wrong: out, dq, dk, dv"
    assert re.search(r"out: WRONG, \d+ of 96 rows are beyond their limits\n  worst: batch \d, head \d, row \d+: error", wrong.stdout)
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.splitlines()[-1] == "right: every tensor is within its limits"


def test_the_file_needs_torch_alone_and_says_what_is_wrong_and_where_it_was_seen() -> None:
    text = source(TopLeft(), Case(mask=Causal(3, 4), head_dim=8))
    assert "pytest" not in text and set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"itertools", "sys", "torch"}
    header = text.split("\n\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    assert header[0] == "# top_left: wrong: truth: out: row 0"
    assert "# case: causal(seqlen_q=3,seqlen_kv=4)/b1/h1:1/d8/fp32/fwd_bwd/s0" in header
    assert f"# seen with: torch {torch.__version__}, on CPU" in header


def test_a_failure_that_one_call_may_not_show_is_said_to_be_such() -> None:
    verification = Verification(Wrong("state: out"), [Finding("state", "out", "changes after another case")])
    assert "Found by state" in source(Masked(), Case(mask=Causal(3, 3), head_dim=8), verification)


def test_a_kernel_without_a_call_of_its_own_asks_for_it_and_exits_with_2(tmp_path: Path) -> None:
    path = write_repro(str(tmp_path), Silent(), Case(mask=Causal(3, 3), head_dim=8), FAILED, CPU, {})
    assert is_without_call(path) and "# The call is not in this file:" in path.read_text()
    asked = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True)
    says = "silent was not called, so nothing was judged: write its call into attention() in this file\n"
    assert (asked.returncode, asked.stdout, asked.stderr) == (2, "", says)
    path.write_text(
        re.sub(r"^    print\(.silent.*\n.*sys.exit\(2\)$", "    return (q + k + v) * torch.nan, None", path.read_text(), flags=re.MULTILINE)
    )
    filled = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True)
    assert (filled.returncode, filled.stderr) == (1, "wrong: out, dq, dk, dv\n")
    assert not is_without_call(write_repro(str(tmp_path), TopLeft(), Case(mask=Causal(3, 3), head_dim=8), FAILED, CPU, {}))


def test_a_kernel_with_a_bind_of_its_own_inherits_no_call() -> None:
    class Other(Masked):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            raise NotImplementedError

    assert "silent was not called" in source(Silent(), Case(mask=Causal(3, 3), head_dim=8))
    assert "masked was not called" in source(Other(), Case(mask=Causal(3, 3), head_dim=8))


@pytest.mark.parametrize("scale", [0.37, -0.37])
@pytest.mark.parametrize(("values", "logit"), [(Values.LOW, -120), (Values.HIGH, 100), (Values.SENTINEL, -60000)])
def test_scores_lie_near_the_logit_whatever_the_sign_of_the_scale(values: Values, logit: float, scale: float) -> None:
    inputs = make_inputs(Case(mask=Causal(8, 8), dtype="fp64", values=values, scale=scale))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", inputs.q, inputs.k)
    assert ((scores - logit).abs() <= 0.2 * abs(logit)).all()


@pytest.mark.parametrize("scale", [0.37, -0.37])
@pytest.mark.parametrize("values", Values)
@pytest.mark.parametrize("layout", Layout)
def test_operands_are_ours_bit_by_bit_and_stride_by_stride(values: Values, layout: Layout, scale: float) -> None:
    layouts = (layout, Layout.BHSD, layout, Layout.PADDED)
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 2, "head_dim": 8, "head_dim_v": 16}
    case = Case(mask=Causal(3, 5), **sizes, dtype="bf16", values=values, layouts=layouts, seed=7, scale=scale)
    ours, theirs = make_inputs(case), loaded(source(Masked(), case)).operands()
    for mine, other in zip((ours.q, ours.k, ours.v, ours.do), theirs, strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype
        assert (mine.stride(), mine.storage_offset()) == (other.stride(), other.storage_offset())


def spelled(mask: Mask) -> torch.Tensor:
    names: dict[str, Any] = {"torch": torch, "DEVICE": "cpu", "SEQLEN_Q": mask.seqlen_q, "SEQLEN_KV": mask.seqlen_kv}
    exec(mask_text(mask), names)
    visible: torch.Tensor = names["VISIBLE"]
    return visible


@given(case=cases(max_seqlen=200))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_mask_is_spelled_out_as_it_is(case: Case) -> None:
    assert torch.equal(spelled(case.mask), case.mask.dense())


@pytest.mark.parametrize("heads", [1, 3])
def test_a_mask_with_many_pieces_is_spelled_out_too(heads: int) -> None:
    strided = from_mask_mod("strided", lambda b, h, q, kv: (q - kv + h) % 3 == 0, heads=heads)
    assert torch.equal(spelled(strided(90, 70)), strided(90, 70).dense())


def test_a_long_regular_mask_takes_few_lines() -> None:
    assert mask_text(Causal(2**15, 2**15)).count("\n") < 30
    assert mask_text(FullSlidingWindow(8192, 8192, 100)).count("\n") < 30
    assert mask_text(CausalDocument((4096,) * 16)).count("\n") < 45


def test_a_mask_of_too_many_pieces_says_so() -> None:
    strided = from_mask_mod("strided", lambda b, h, q, kv: (q - kv) % 2 == 0)
    with pytest.raises(InvalidArgument, match="mask strided has more than 50000 runs of visible keys"):
        mask_text(strided(600, 600))


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True).map(sorted), max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_linear_runs_give_back_every_run(edges: list[list[int]]) -> None:
    rows = [list(zip(row[::2], row[1::2], strict=False)) for row in edges]
    again: list[list[tuple[int, int]]] = [[] for _ in rows]
    for first, last, start, stop, start_step, stop_step in linear(rows):
        for step, query in enumerate(range(first, last)):
            again[query].append((start + step * start_step, stop + step * stop_step))
    assert [sorted(row) for row in again] == rows


@given(case=cases(kernel=Sdpa()))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_correct_call_is_called_wrong(case: Case) -> None:
    loaded(source(Sdpa(), case)).main()


NO_KEYS = CausalDocument((5, 7), (5, 2))


@pytest.mark.parametrize(
    "mask", [NO_KEYS, UniformBlock(16, 24, 8, BlockMap("random", 0.4, heads=4, group=2, seed=3))], ids=lambda m: m.name
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_file_of_naive_holds_naive_itself(mask: Mask, dtype: str) -> None:
    case = Case(mask=mask, batch=2, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=8, dtype=dtype)
    text = source(Naive(), case)
    assert "pytest" not in text
    same_as_adapter(Naive(), case, loaded(text))


INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels are for a GPU")
OWN = [
    (FlashMask(), Case(mask=NO_KEYS, batch=2, heads_q=4, heads_kv=2, head_dim=16)),
    (FlashMask(), Case(mask=GlobalSlidingWindow(70, 70, window=9, num_global=5), head_dim=16, direction=Direction.FWD)),
    (VsaTriton(), Case(mask=UniformBlock(64, 96, 32, BlockMap(heads=4, group=2)), heads_q=4, heads_kv=2, head_dim=16)),
    (VsaTriton(), Case(mask=VariableBlock((5, 30), (33, 3, 9), BlockMap("random", 0.6)), batch=2, head_dim=16)),
]


@INTERPRETED
@pytest.mark.parametrize(("kernel", "case"), OWN, ids=[f"{kernel.name}-{case.mask.name}" for kernel, case in OWN])
def test_the_file_of_a_kernel_of_ours_imports_it_and_says_so(kernel: Kernel, case: Case) -> None:
    text = source(kernel, case)
    header = text.split("\n\n\n")[0]
    assert "# Needs torch and pytest-longca and triton." in header
    assert "# The kernel is pytest-longca's own and is imported from it" in header
    same_as_adapter(kernel, case, loaded(text))


@INTERPRETED
def test_the_file_of_a_kernel_of_ours_runs_by_itself_where_there_is_no_gpu(tmp_path: Path) -> None:
    path = write_repro(str(tmp_path), VsaTriton(), Case(mask=UniformBlock(32, 32, 32, BlockMap()), head_dim=16), FAILED, CPU, {})
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1] == "right: every tensor is within its limits"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_can_be_called_as_its_file_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mask=Causal(20, 33), batch=2, heads_q=4, heads_kv=2, head_dim=16, direction=Direction.FWD)
    standalone = loaded(source(Flex(), case))
    monkeypatch.setitem(sys.modules, "standalone", standalone)  # where the compiler looks for it
    standalone.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("right")


def test_one_key_hidden_from_one_query_is_beyond_the_limits_of_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(mask=Causal(100, 100), heads_q=2, heads_kv=1, head_dim=32, dtype="bf16")
    hidden = "attn_mask=VISIBLE & ~((torch.arange(100)[:, None] == 50) & (torch.arange(100) == 47))"
    assert judged(case, CALL.format(mask=hidden), capsys).startswith("wrong: out")
    assert judged(case, CALL.format(mask="attn_mask=VISIBLE"), capsys).startswith("right")


def test_a_result_of_the_wrong_shape_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(mask=Causal(5, 5), head_dim=8, direction=Direction.FWD)
    assert judged(case, "def attention(q, k, v):\n    return q[:, 1:], None", capsys) == "wrong: out"


@pytest.mark.parametrize("kernel", [Fa2(), Fa3(), Fa4(), Cudnn(), CudnnFlex(), Flex(), Sdpa()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mask", [Causal(5, 9), FullSlidingWindow(9, 5, 2), CausalDocument((2, 7))], ids=lambda mask: mask.name)
def test_the_files_of_gpu_kernels_are_python(kernel: Kernel, mask: Mask) -> None:
    case = Case(mask=mask, batch=2, heads_q=2, heads_kv=1, head_dim=64, dtype="bf16")
    text = source(kernel, case)
    compile(text, "standalone.py", "exec")
    assert "was not called" not in text and "def attention(q, k, v):" in text


def test_documents_and_bands_reach_the_files() -> None:
    case = Case(mask=CausalDocument((2, 7)), batch=2, heads_q=2, heads_kv=1, head_dim=64, dtype="bf16")
    text = source(Fa3(), case)
    assert "CU_SEQLENS_Q = torch.tensor([0, 2, 9, 11, 18], dtype=torch.int32, device=DEVICE)" in text
    assert "max_seqlen_q=7, max_seqlen_k=7, softmax_scale=SCALE, causal=True, window_size=(-1, 0), return_attn_probs=True" in text
    window = source(Fa4(), replace(case, mask=FullSlidingWindow(9, 9, 2)))
    assert "causal=False, window_size=(2, 2), return_lse=True" in window
    assert "import cudnn.sdpa.fwd.torch_op" in source(Cudnn(), case)


def test_a_snippet_that_raises_is_said_and_hides_no_failure(tmp_path: Path) -> None:
    class Broken(TopLeft):
        def bind(self, case: Case, inputs: Inputs) -> AutogradCall:
            raise NotImplementedError

        def snippet(self, case: Case, facts: Mapping[str, str]) -> str:
            return facts["tile"]

    with pytest.raises(InvalidArgument, match="the snippet of top_left raised KeyError: 'tile'"):
        write_repro(str(tmp_path), Broken(), Case(mask=Causal(3, 3), head_dim=8), FAILED, CPU, {})


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"--longca-repro: .* cannot be written .*: name a folder that can"):
        write_repro(str(tmp_path / "file"), Masked(), Case(mask=Causal(3, 3), head_dim=8), FAILED, CPU, {})
