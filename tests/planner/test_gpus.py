"""The table of GPUs against Lightning's own, whose names of devices it reads as CUDA gives them."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_mp.policy.hardware import GPUS, Device, peak

#: both round
WITHIN = 0.02
_KINDS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SPARSE = dict.fromkeys(("tf32", "bf16", "fp16"), 2)  # printed with sparsity
#: devices by the name that CUDA gives them, and by dtype how many times ours Lightning's figure is
KNOWN: dict[str, tuple[tuple[int, int], dict[str, float]]] = {
    "NVIDIA H200 SXM1": ((9, 0), _SPARSE),
    "NVIDIA H100 80GB HBM3": ((9, 0), {}),
    # of a pair, as announced, at the SXM's clock
    "NVIDIA H100 NVL": ((9, 0), {"fp32": 2.23, "tf32": 2.37, "bf16": 2.37, "fp16": 2.37}),
    # of CUDA cores alone, as for the next ones that say bf16 and fp16
    "NVIDIA GeForce RTX 4090": ((8, 9), {"bf16": 0.5, "fp16": 0.5}),
    "NVIDIA L4": ((8, 9), {}),
    "NVIDIA A100-SXM4-80GB": ((8, 0), {}),
    "NVIDIA A10G": ((8, 6), {"tf32": 1.79, "bf16": 1.79, "fp16": 1.79}),  # the A10's
    "NVIDIA GeForce RTX 3090": ((8, 6), {"bf16": 0.5, "fp16": 0.5}),
    "Tesla T4": ((7, 5), {}),
    "Tesla V100-SXM2-32GB": ((7, 0), {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_peaks_are_lightnings_but_for_what_is_known_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    capability, apart = KNOWN[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    ours = Device("cuda", name.removesuffix("1"), capability)  # Lightning's H200 are numbered
    for dtype, kind in _KINDS.items():
        if capability < (8, 0) and dtype in ("tf32", "bf16"):
            continue
        monkeypatch.setattr(
            torch, "get_float32_matmul_precision", lambda one=dtype: "high" if one == "tf32" else "highest"
        )
        found, theirs = peak(ours, dtype), get_available_flops(torch.device("cuda"), kind)
        assert found is not None
        assert theirs is not None
        assert theirs / found.flops_per_s == pytest.approx(apart.get(dtype, 1), rel=WITHIN), dtype


def test_every_gpu_has_a_peak_in_what_it_computes() -> None:
    """Words of the table find the line of peaks that is meant, and a link is no faster than its memory."""
    for gpu in GPUS.values():
        for precision in ("32-true", "16-mixed", *(["bf16-mixed"] if gpu.device.tf32 else [])):
            assert gpu.peak(precision) is not None, (gpu.word, precision)
        assert (gpu.peak("fp8-mixed") is not None) == gpu.device.fp8
        assert gpu.pcie < gpu.bandwidth
        assert gpu.nvlink < gpu.bandwidth
