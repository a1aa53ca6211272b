"""The most memory that a device's allocator had given out at once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator had given out at most while ``run`` ran, beyond what was held before.

    Resident memory would say what the process once needed, and what its allocator keeps.
    """
    gc.collect()  # what is freed within would be counted as a fall
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events: list[Any] = cast("Any", profiler.profiler).kineto_results.events()
    given = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate((size for _, size in sorted(given)), initial=0))


def reset_peak(device: torch.device) -> None:
    """Count a CUDA device's peak from here; the CPU's is taken by :func:`peak_on_cpu`."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_on_cuda(device: torch.device) -> int | None:
    """Bytes since :func:`reset_peak`; ``None`` on another device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
