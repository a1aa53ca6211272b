"""What tensors held at once: freed in between counts, made before does not."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_mp.numerics.peak_memory import PeakMemory

MIB = 2**20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_most_that_was_held_at_once_exactly(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kept = torch.ones(32 * MIB // 4, device=device)

    with PeakMemory(device) as peak:
        for size in (16, 64, 8):
            block = torch.empty(size * MIB, dtype=torch.uint8, device=device)
            del block
        both = [torch.empty(20 * MIB, dtype=torch.uint8, device=device) for _ in range(2)]
        both.clear()
    assert peak.bytes == 64 * MIB
    assert kept.numel() == 8 * MIB


def test_an_error_goes_through_and_leaves_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with pytest.raises(ValueError, match="no"), PeakMemory():
        raise ValueError("no")
    assert "KINETO_LOG_LEVEL" not in os.environ
    with PeakMemory() as peak:
        torch.empty(MIB, dtype=torch.uint8).sum()
    assert peak.bytes >= MIB
