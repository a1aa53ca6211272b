"""The peak of the memory of tensors, counted by CUDA's allocator or, on a CPU, by torch's profiler."""

from __future__ import annotations

import gc
import itertools
import os
from operator import methodcaller
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_mp.numerics.rng import environment_kept


class PeakMemory:
    """A context whose ``bytes`` is the peak of allocated memory within it, above the memory at its beginning.

    ``device`` is a torch device type. On a CPU ``torch.profiler`` keeps every allocation until the end, so the context
    is for a few steps, not for a run. Resident memory is no measure, because allocators keep freed memory.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.bytes = self._before = 0
        self._profile = None if device == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> PeakMemory:
        gc.collect()  # garbage that is freed within would lower the count
        if self._profile is None:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            with environment_kept():
                # Otherwise Kineto, which reads this once, reports on stderr that it starts and stops.
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")
                self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            self.bytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._profile.__exit__(*error)
        events = cast("Any", self._profile).profiler.kineto_results.events()
        memory = sorted((event for event in events if event.name() == "[memory]"), key=methodcaller("start_ns"))
        self.bytes = max(itertools.accumulate((event.nbytes() for event in memory), initial=0))  # negative: freed
