"""What torch says of a device."""

from __future__ import annotations

import pytest
import torch

from lightning_mp.numerics.device import describe
from lightning_mp.policy import hardware


def test_a_cpu() -> None:
    found = describe(torch.device("cpu"))
    native = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated"
    assert found == hardware.Device("cpu", "CPU", None, native, None)
    assert not found.tf32
    for mode in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        assert hardware.refusal(found, mode) is None


def test_a_device_nobody_knows_is_refused() -> None:
    found = describe(torch.device("meta"))
    assert found.type == "meta"
    assert hardware.refusal(found, "32-true") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu() -> None:
    found = describe(torch.device("cuda", 0))
    assert found.type == "cuda"
    assert found.name == torch.cuda.get_device_name(0)
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
    assert (found.bf16 == "native") == (found.capability >= (8, 0))
