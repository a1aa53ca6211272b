"""The memory of a run, of its device or, on a CPU, of the process; never synchronises with a device."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

GIB = 2**30


def memory(device: torch.device) -> tuple[float | None, float | None, float | None]:
    """GiB in use, reserved by the allocator, and the peak in use; ``None`` where it is not counted.

    On a CPU it is resident memory, which includes code.
    """
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return allocated / GIB, reserved / GIB, torch.cuda.max_memory_allocated(device) / GIB
    if device.type == "mps":
        return torch.mps.current_allocated_memory() / GIB, torch.mps.driver_allocated_memory() / GIB, None
    if device.type != "cpu" or sys.platform == "win32":
        return None, None, None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of either
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
    pages = Path("/proc/self/statm")  # only Linux tells what is resident now
    resident = int(pages.read_text(encoding="ascii").split()[1]) if pages.exists() else None
    return None if resident is None else resident * resource.getpagesize() / GIB, None, peak
