"""What a run changes in its process, first of all the random number generators: read, and put back."""

import os
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

RngState = dict[str, Any]


def rng_state(device: torch.device) -> RngState:
    """Where torch's (CPU, and ``device`` if it is CUDA), Python's and numpy's generators stand.

    Tensors and plain values only, so that ``torch.load(weights_only=True)`` reads it.
    """
    state: RngState = {**_torch_state(device), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # else nothing has drawn from it
        name, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Put the generators back to where :func:`rng_state` found them, CUDA's where there is one."""
    _set_torch_state(state, device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy(), *rest))


def _torch_state(device: torch.device) -> RngState:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"torch": torch.get_rng_state(), **cuda}


def _set_torch_state(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def environment_kept() -> Generator[None, None, None]:
    """On exit the environment is as it was."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def process_kept(device: torch.device) -> Generator[None, None, None]:
    """On exit generators, environment, working folder and torch's switches of determinism are as they were."""
    state, folder = rng_state(device), Path.cwd()
    cudnn: Any = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with environment_kept():
            yield
    finally:
        set_rng_state(state, device)
        os.chdir(folder)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        torch.use_deterministic_algorithms(strict, warn_only=warns)


class Stream:
    """Random numbers of torch's apart from those drawn around them, which go on where they last were.

    Args:
        number: stream 0 begins with what would be drawn around it, any other one elsewhere.
        device: the generator beside the CPU's that is kept apart, if it is CUDA.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._reached: RngState | None = None

    @contextmanager
    def drawn(self) -> Generator[None, None, None]:
        """Within it this stream is drawn from; afterwards the generators are where they were."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            if self._reached is not None:
                _set_torch_state(self._reached, self._device)
            elif self._number:
                torch.manual_seed(int(torch.randint(2**62, ())) + self._number)
            yield
            self._reached = _torch_state(self._device)
