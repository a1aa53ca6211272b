"""What a process holds, as its operating system has it."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_mp.monitor.health.memory import memory

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident now")
def test_on_a_cpu_it_is_the_resident_memory_and_its_peak() -> None:
    before = memory(CPU)
    held = torch.ones(2**27)  # half a GiB
    now = memory(CPU)
    assert before.allocated is not None
    assert now.allocated == pytest.approx(before.allocated + held.nbytes / 2**30, abs=0.1)
    del held
    after = memory(CPU)
    assert after.allocated == pytest.approx(before.allocated, abs=0.1)
    assert after.peak is not None
    assert after.peak >= now.allocated - 0.01
    assert after.reserved is None


def test_of_a_device_nobody_counts_for_nothing_is_told() -> None:
    assert memory(torch.device("meta")) == (None, None, None)
