"""Peak memory of a mode: what CUDA's allocator counted, or how far the process's resident memory rose on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

MIB = 2**20
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory from construction on, in MiB.

    On a CPU it is the rise of the peak resident set over the resident set at construction, as the kernel keeps it,
    so nothing is missed between samples. It means something only in a process that has not trained before:
    allocators keep what they once had.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return
        _reset_peak()
        self._before = _resident()

    def read(self) -> float | None:
        """Peak MiB so far; ``None`` on a system that does not tell (Windows)."""
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated() / MIB
        peak = _peak()
        return None if peak is None or self._before is None else max(0, peak - self._before) / MIB


def _reset_peak() -> None:
    """Ask Linux to forget the peak so far; elsewhere it stays, which only a fresh process makes harmless."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def _resident() -> int | None:
    return _status("VmRSS") or _peak()


def _peak() -> int | None:
    """The process's peak resident set in bytes."""
    peak = _status("VmHWM")
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int | None:
    """A memory field of ``/proc/self/status`` in bytes."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{field}:")]
    return int(found[0][1]) * 1024 if found else None
