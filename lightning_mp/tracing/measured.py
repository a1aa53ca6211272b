"""What torch's allocator gave out: the measure that a prediction is held against, and that resident memory is not."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_mp.compat.torch import allocations


class AllocatorPeak:
    """The most memory given out at one moment while it is entered, over what was at its beginning, in ``bytes``.

    On a CPU every allocation is kept in a profile until the end, so it is for a few steps, not for a run. CUDA counts
    by itself.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.bytes = 0
        self._profile = None if device == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._before = 0

    def __enter__(self) -> AllocatorPeak:
        if self._profile is not None:
            self._profile.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            self.bytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._profile.__exit__(kind, error, trace)
        total = 0
        for size in allocations(self._profile):
            total += size
            self.bytes = max(self.bytes, total)
