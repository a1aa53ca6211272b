"""What a process holds, as its operating system has it."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_mp.monitor.health.memory import memory

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident now")
def test_on_a_cpu_it_is_the_resident_memory_and_its_peak() -> None:
    before, _, _ = memory(CPU)
    held = torch.ones(2**27)  # half a GiB
    assert before is not None
    now, reserved, _ = memory(CPU)
    assert now == pytest.approx(before + held.nbytes / 2**30, abs=0.1)
    assert reserved is None
    del held
    after, _, peak = memory(CPU)
    assert after == pytest.approx(before, abs=0.1)
    assert peak is not None
    assert now is not None
    assert peak >= now - 0.01


def test_of_a_device_nobody_counts_for_nothing_is_told() -> None:
    assert memory(torch.device("meta")) == (None, None, None)
