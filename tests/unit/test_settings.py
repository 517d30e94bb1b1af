"""The settings that a process shares: each that changes is told in words and put back."""

import os
from collections.abc import Callable

import pytest
import torch

from pytest_longca import subject
from pytest_longca.settings import SETTINGS, UNREADABLE, kept


def values() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (get, _) in SETTINGS.items():
        try:
            found[name] = get()
        except (RuntimeError, AttributeError):
            found[name] = UNREADABLE
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default dtype torch.float64 (it was torch.float32)"),
        (lambda: torch.set_default_device("meta"), "default device meta (it was cpu)"),
        (lambda: torch.set_grad_enabled(False), "grad mode False (it was True)"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on the CPU True (it was False)"),
        (lambda: torch.set_autocast_enabled("cuda", True), "autocast on CUDA True (it was False)"),
        (lambda: torch.autograd.set_detect_anomaly(True), "anomaly detection True (it was False)"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads "),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic debug mode 1 (it was 0)"),
        (lambda: torch.set_flush_denormal(True), "flushing of denormals True (it was False)"),
        (lambda: torch.set_float32_matmul_precision("medium"), "float32 matmul precision medium (it was highest)"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "float32 matmul precision high (it was highest)"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "cuda.matmul.fp32_precision tf32 (it was none)"),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "backends.fp32_precision tf32 (it was none)"),
        (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "cudnn.allow_tf32 False (it was True)"),
        (
            lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
            "cuda.matmul.allow_bf16_reduced_precision_reduction False (it was True)",
        ),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash SDP False (it was True)"),
        (lambda: os.chdir(os.sep), "working directory / (it was "),
    ],
)
def test_a_changed_setting_is_told_and_put_back(change: Callable[[], object], told: str) -> None:
    before = values()
    with kept() as changes:
        change()
    assert any(text.startswith(told) for text in changes.settings.values()), changes.settings
    assert values() == before and not changes.generators


def test_a_generator_that_moved_is_told_and_put_back() -> None:
    before = torch.get_rng_state()
    with kept() as changes:
        torch.manual_seed(0)
    assert changes.generators == ["CPU"] and not changes.settings
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_told_where_nothing_stays_changed() -> None:
    with kept() as changes, torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        torch.manual_seed(0)
    assert not changes.settings and not changes.generators


@pytest.mark.parametrize("setting", ["cudnn.benchmark", "flushing of denormals"])
def test_what_a_library_chooses_at_its_import_is_put_back_and_no_fault(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CHANGED", {})
    get, change = SETTINGS[setting]
    before = get()
    for times in (1, 2):
        with subject.kernel_errors("imports"):
            change(not before)
        assert get() is before
        assert bool(subject.CHANGED["imports"]) is (times == 2)
    with subject.kernel_errors("dtype"):
        torch.set_default_dtype(torch.float64)
    assert "default dtype" in subject.CHANGED["dtype"]
