"""Peak memory: what was freed in between counts, what was there before does not."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_mp.demo.memory import PeakMemory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak on request")
def test_a_peak_counts_though_the_memory_is_given_back() -> None:
    kept = torch.ones(32 * 2**18)
    memory = PeakMemory("cpu")
    # 64 MiB: far above what an allocator keeps, so that it is new to the process and goes back when freed.
    block = torch.ones(64 * 2**18)
    del block
    first = memory.read()
    assert first is not None
    assert 60 < first < 80
    again = PeakMemory("cpu").read()
    assert again is not None
    assert again < 10
    assert kept.sum() == kept.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_is_what_the_allocator_gave_out() -> None:
    memory = PeakMemory("cuda")
    block = torch.ones(64 * 2**18, device="cuda")
    del block
    peak = memory.read()
    assert peak is not None
    assert peak >= 64
