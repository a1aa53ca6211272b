"""The most memory that tensors held at once: what CUDA's allocator counted, or the CPU's, as the profiler saw it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

_EVENT = "[memory]"
# Kineto says on stderr that it starts and stops, unless its level of logging is above all it has; it reads this once.
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Call ``run`` and return the most bytes that tensors made in it held at once on ``device``, a torch device type.

    On CUDA it is the rise of ``torch.cuda.max_memory_allocated``. Elsewhere ``torch.profiler`` records every
    allocation, which makes ``run`` slower; resident memory is no measure of it, since allocators keep what was freed.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    with TemporaryDirectory(prefix="lightning_mp_") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    sizes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == _EVENT)
    held = peak = 0
    for _, size in sizes:
        held += size
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet() -> Generator[None]:
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
