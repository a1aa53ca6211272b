"""Real processes on loopback: each runs one function as torchrun would start it, with gloo and a free port."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(rank: int, world: int, port: int, results: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, pickle.dumps(function(*args))))  # bytes: shared tensors would die with the child
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_ranks(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 120) -> list[Any]:
    """``function(*args)`` in ``world`` fresh processes; what each returned, by rank.

    ``function`` must be importable from the test's module, and its result picklable. A failing rank's traceback is
    raised here; children that hang are killed after ``timeout`` seconds, and nobody else's.
    """
    context = mp.get_context("spawn")
    results, port = context.Queue(), free_port()
    children = [
        context.Process(target=_child, args=(rank, world, port, results, function, args), daemon=True)
        for rank in range(world)
    ]
    for child in children:
        child.start()
    try:
        return _collect(results, world, time.monotonic() + timeout)
    finally:
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _collect(results: Any, world: int, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < world:
        try:
            rank, fine, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"ranks {sorted(set(range(world)) - set(values))} did not finish in time") from None
        if not fine:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        values[rank] = pickle.loads(value)
    return [values[rank] for rank in range(world)]
