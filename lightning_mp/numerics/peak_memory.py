"""The most memory that tensors held at once: what CUDA's allocator counted, or the CPU's, as the profiler saw it."""

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
    """The most memory given out at one moment while it is entered, over what was at its beginning, in ``bytes``.

    ``device`` is a torch device type. CUDA counts by itself; elsewhere ``torch.profiler`` keeps every allocation until
    the end, so it is for a few steps, not for a run. Resident memory is no measure: allocators keep what was freed.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.bytes = self._before = 0
        self._profile = None if device == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> PeakMemory:
        gc.collect()  # what is freed within would be counted as a fall
        if self._profile is None:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            with environment_kept():
                # else Kineto, which reads this once, says on stderr that it starts and stops
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
        self.bytes = max(itertools.accumulate((event.nbytes() for event in memory), initial=0))  # < 0: taken back
