"""Which device kernels ran: what a profiler's names must show of each adapter, so that a silent fallback is seen."""

import pytest

from pytest_longca.case import Case
from pytest_longca.catalogue import KERNELS, load
from pytest_longca.device_kernels import LONGEST_NAME, device_kernels, short_name, silent_fallback
from pytest_longca.kernel import Kernel
from pytest_longca.machine import CPU
from pytest_longca.masks.regular import Full

GEMM, SOFTMAX = "sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x16", "void at::native::cunn_SoftMaxForward<4, float>"
EXPECTED = [
    ("fa2", "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4, false, false, cutlass::bfloat16_t>>"),
    ("fa2", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>"),
    ("fa2", "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>"),
    ("fa3", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>"),
    ("sdpa_flash", "void pytorch_flash::flash_fwd_kernel<...>"),
    ("sdpa_efficient", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)"),
    ("sdpa_cudnn", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"),
    ("cudnn", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"),
    ("flex", "triton_tem_fused_flex_attention_0"),
    ("cudnn", "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)"),
    ("flex", "triton_tem_fused_flex_attention_backward_mul_1"),
    ("fa4", "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o41112104113"),
    ("fa4", "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o11101213"),
    ("cudnn_flex", "kernel_cutlass_kernel_cudnnflex_attentionkernelssm90fwdforwardFlexAttentionForwardSm90_object_at__tensor0000"),
    ("cudnn_flex", "kernel_cutlass_kernel_cudnnflex_attentionkernelssm90bwdbackwardFlexAttentionBackwardSm90_object_at__tensor0"),
]


def kernel_named(name: str) -> Kernel:
    kernel: Kernel = load(KERNELS[name])()
    return kernel


@pytest.mark.parametrize(("name", "seen"), EXPECTED)
def test_own_device_kernel_is_recognised_among_others(name: str, seen: str) -> None:
    assert silent_fallback(kernel_named(name), [SOFTMAX, seen]) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [("fa4", "cudnn_flex"), ("cudnn_flex", "fa4"), ("cudnn_flex", "flex"), ("flex", "cudnn_flex"), ("fa4", "fa2"), ("fa2", "fa4")],
)
def test_the_kernels_of_another_adapter_are_a_silent_fallback(name: str, other: str) -> None:
    names = [seen for kernel, seen in EXPECTED if kernel == other]
    assert silent_fallback(kernel_named(name), names) is not None


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "cudnn", "cudnn_flex", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex"])
def test_matrix_products_and_a_softmax_are_a_silent_fallback(name: str) -> None:
    reason = silent_fallback(kernel_named(name), [GEMM, SOFTMAX])
    assert reason is not None and "a silent fallback" in reason and SOFTMAX in reason


def test_nothing_is_said_where_no_device_was_seen() -> None:
    assert silent_fallback(kernel_named("fa2"), []) is None
    assert device_kernels(kernel_named("naive"), Case(mask=Full(4, 4)), CPU) == []


def test_long_names_are_cut() -> None:
    assert short_name(SOFTMAX) == SOFTMAX
    assert len(short_name("x" * 5000)) == LONGEST_NAME
