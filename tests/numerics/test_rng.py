"""The process's generators are read and put back, as plain values that a file can hold."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from lightning_mp.numerics.rng import rng_state, set_rng_state

CPU = torch.device("cpu")


def _draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.random(), np.random.normal()]


@pytest.mark.parametrize("drawn", range(4))
def test_the_same_numbers_come_again(drawn: int) -> None:
    """Wherever the generators stand: a normal number is drawn in pairs, of which one is kept."""
    for _ in range(drawn):
        random.gauss(0, 1)
        np.random.normal()
    state = rng_state(CPU)
    first = [_draw() for _ in range(3)]
    set_rng_state(state, CPU)
    assert [_draw() for _ in range(3)] == first


def test_it_survives_a_file_that_holds_plain_values_only() -> None:
    state, file = rng_state(CPU), io.BytesIO()
    first = _draw()
    torch.save(state, file)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), CPU)
    assert _draw() == first


def test_a_state_from_cuda_is_put_back_on_the_cpu_as_far_as_it_goes() -> None:
    state = {**rng_state(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}
    first = _draw()
    set_rng_state(state, CPU)
    assert _draw() == first
