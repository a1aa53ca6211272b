"""The memory a run uses, from its device or, on a CPU, the operating system; never synchronises with a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

GIB = 2**30
_STATM = Path("/proc/self/statm")


class Memory(NamedTuple):
    """GiB in use, reserved by the caching allocator, and the peak in use so far; ``None`` where it is not counted."""

    allocated: float | None
    reserved: float | None
    peak: float | None


def memory(device: torch.device) -> Memory:
    """The memory of this process on ``device``; on a CPU its resident memory, which includes code."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return Memory(allocated / GIB, reserved / GIB, torch.cuda.max_memory_allocated(device) / GIB)
    if device.type == "mps":
        return Memory(torch.mps.current_allocated_memory() / GIB, torch.mps.driver_allocated_memory() / GIB, None)
    return Memory(_resident(), None, _peak_resident()) if device.type == "cpu" else Memory(None, None, None)


def _resident() -> float | None:
    """Resident memory now; only Linux tells without another package."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    import resource

    return pages * resource.getpagesize() / GIB


def _peak_resident() -> float | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of either
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
