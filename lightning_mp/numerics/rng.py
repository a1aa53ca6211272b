"""Settings of the process that a run changes, the random number generators first: read and restored."""

import os
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RngState = dict[str, Any]


def rng_state(device: torch.device) -> RngState:
    """Return the state of torch's (CPU, and ``device`` if it is CUDA), Python's and numpy's generators.

    It consists of tensors and plain values, so that ``torch.load(weights_only=True)`` reads it.
    """
    state: RngState = {**_torch_state(device), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # numpy is not imported, so nothing has drawn from it
        name, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Restore the generators to a state of :func:`rng_state`; CUDA's only if ``device`` is CUDA."""
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
    """Within, the environment may be changed; on exit it is restored."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def process_kept(device: torch.device) -> Generator[None, None, None]:
    """On exit restore generators, environment, working folder and torch's switches of determinism."""
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


# ------------------------------------------------------------------ random numbers that are the same on every rank


def of_first_rank(seed: int, device: torch.device) -> int:
    """Return rank 0's ``seed``, less its 64th bit; a collective on ``device``."""
    shared = torch.tensor(seed % 2**63, dtype=torch.int64, device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def seed_of_step(seed: int, step: int) -> int:
    """Return a seed for one step of a run: another one for each step, and for each ``seed`` of the run."""
    return random.Random(f"{seed} {step}").getrandbits(63)


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None, None, None]:
    """Within, the generators of the CPU and of ``device`` begin at ``seed``; afterwards they are as before."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class Stream:
    """A separate stream of torch's random numbers, which continues where it ended last time.

    Args:
        number: stream 0 begins at the present state of the generators, any other stream elsewhere.
        device: if it is CUDA, its generator belongs to the stream too.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._reached: RngState | None = None

    @contextmanager
    def drawn(self) -> Generator[None, None, None]:
        """Within, torch draws from this stream; on exit the generators are restored."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            if self._reached is not None:
                _set_torch_state(self._reached, self._device)
            elif self._number:
                torch.manual_seed(int(torch.randint(2**62, ())) + self._number)
            yield
            self._reached = _torch_state(self._device)
