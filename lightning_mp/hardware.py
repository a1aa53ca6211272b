"""What devices can do, and which precision suits them: rules as data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUPPORTED_DEVICES = ("cpu", "cuda", "mps")

#: Below this many parameters half precision gains little (reference guide "mixed-precision for LLMs", decision matrix).
SMALL_MODEL = 100_000_000
#: fp32 weights, gradients and Adam's two moments
BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True)
class Device:
    """What the rules need to know of a device; ``memory`` in bytes, ``None`` where it is not bounded."""

    type: str
    name: str
    capability: tuple[int, int] | None = None
    bf16: Literal["native", "emulated", "none"] = "native"
    memory: int | None = None

    @property
    def fp16(self) -> bool:
        """Whether it has fp16 arithmetic: on CUDA since capability 5.3 (CUDA C++ Programming Guide)."""
        return self.capability is None or self.capability >= (5, 3)

    @property
    def tf32(self) -> bool:
        """Whether fp32 products can run in TF32 (CUDA, Ampere or newer)."""
        return self.type == "cuda" and self.capability is not None and self.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``auto`` chose, and why."""

    precision: str
    tf32: str | None
    reason: str


def refusal(device: Device, precision: str) -> tuple[str, str, str] | None:
    """Why ``device`` cannot run ``precision`` as (given, allowed, fix), or ``None`` if it can."""
    given = f"precision={precision!r} on {device.name} ({device.type})"
    if device.type not in SUPPORTED_DEVICES:
        return given, f"devices of type {', '.join(SUPPORTED_DEVICES)}", "set Trainer(accelerator='cpu') or 'gpu'"
    if precision.startswith("bf16") and device.bf16 == "none":
        if not device.fp16:
            return given, "32-true on a device without half-precision arithmetic", "use '32-true'"
        return given, "32-true, 16-mixed, 16-true on a device without bf16", "use '16-mixed'"
    if precision.startswith("16") and not device.fp16:
        return given, "32-true on a device without half-precision arithmetic", "use '32-true'"
    return None


def choose(device: Device, parameters: int) -> Choice:
    """What ``precision="auto"`` means for a model of so many parameters on ``device``."""
    tf32 = "high" if device.tf32 else None
    needed = parameters * BYTES_PER_PARAMETER
    fits = device.memory is None or needed <= device.memory // 2
    size = f"{parameters / 1e6:.1f}M parameters"
    if parameters < SMALL_MODEL and fits:
        return Choice("32-true", tf32, f"{size} is below 100M and fits {device.name}: half precision gains little")
    if (device.type == "cpu" and device.bf16 != "native") or not device.fp16:
        return Choice("32-true", None, f"{device.name} has no half-precision arithmetic: half would be slower")
    if device.bf16 == "native":
        return Choice("bf16-mixed", tf32, f"{device.name} computes bf16 natively: fp32's range, no loss scale needed")
    return Choice("16-mixed", tf32, f"{device.name} has no native bf16: fp16 with loss scaling")
