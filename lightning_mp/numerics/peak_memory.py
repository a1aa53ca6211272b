"""The most memory that tensors held at once: what CUDA's allocator counted, or the CPU's, as the profiler saw it."""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

# Kineto says on stderr that it starts and stops, unless its level of logging is above all it has; it reads this once.
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class PeakMemory:
    """The most memory given out at one moment while it is entered, over what was at its beginning, in ``bytes``.

    ``device`` is a torch device type. CUDA counts by itself; elsewhere ``torch.profiler`` keeps every allocation until
    the end, so it is for a few steps, not for a run. Resident memory is no measure: allocators keep what was freed.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.bytes = 0
        self._profile = None if device == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._before = 0
        self._level: str | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()  # what is freed within would be counted as a fall
        if self._profile is None:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._level = os.environ.get(_LOG_LEVEL)
        os.environ.setdefault(_LOG_LEVEL, "99")
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            self.bytes = torch.cuda.max_memory_allocated() - self._before
            return
        try:
            self._profile.__exit__(*error)
        finally:
            if self._level is None:
                os.environ.pop(_LOG_LEVEL, None)
        events = cast("Any", self._profile).profiler.kineto_results.events()
        memory = sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns())
        self.bytes = max(itertools.accumulate((one.nbytes() for one in memory), initial=0))  # < 0: taken back
