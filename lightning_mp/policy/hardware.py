"""What devices can do, and which precision suits them: rules as data, no torch."""

from __future__ import annotations

import re
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
    def fp8(self) -> bool:
        """Whether it multiplies in FP8: on CUDA since capability 8.9 (torchao/float8/README.md), and a CPU, slowly."""
        return self.type == "cpu" or (self.capability is not None and self.capability >= (8, 9))

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


def refusal(device: Device, precision: str, *, emulate: bool = False) -> tuple[str, str, str] | None:
    """Why ``device`` cannot run ``precision`` as (given, allowed, fix), or ``None`` if it can.

    ``emulate``: FP8 products are computed in fp32.
    """
    given = f"precision={precision!r} on {device.name} ({device.type})"
    if device.type not in SUPPORTED_DEVICES:
        return given, f"devices of type {', '.join(SUPPORTED_DEVICES)}", "set Trainer(accelerator='cpu') or 'gpu'"
    if precision.startswith(("bf16", "fp8")) and device.bf16 == "none":
        if not device.fp16:
            return given, "32-true on a device without half-precision arithmetic", "use '32-true'"
        return given, "32-true, 16-mixed, 16-true on a device without bf16", "use '16-mixed'"
    if precision.startswith("16") and not device.fp16:
        return given, "32-true on a device without half-precision arithmetic", "use '32-true'"
    if precision.startswith("fp8") and not emulate and not device.fp8:
        fix = "use 'bf16-mixed', or FP8(emulate=True) to see the numbers at the cost of speed"
        return given, "a CUDA device of compute capability 8.9 or newer, or a CPU", fix
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


@dataclass(frozen=True, slots=True)
class Peak:
    """The most a device can do in one dtype, and who says so."""

    flops_per_s: float
    source: str


def peak(device: Device, dtype: str) -> Peak | None:
    """Dense peak of matrix products on ``device`` in ``dtype`` (fp32, tf32, bf16, fp16 or fp8), in FLOP/s.

    ``None`` where no data sheet was read: a CPU, an unknown GPU, a slice of one (MIG), a laptop's, a dtype it has no
    units for.
    """
    words = set(re.split(r"[^a-z0-9]+", device.name.lower()))
    if device.type != "cuda" or words & {"mig", "laptop", "max"}:
        return None
    for name, columns, source in _PEAKS:
        if words.issuperset(name.split()):
            teraflops = columns[_DTYPES.index(dtype)]
            return None if teraflops is None else Peak(teraflops * 1e12, f"NVIDIA, {source}")
    return None


_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_Columns = tuple[float | None, float | None, float | None, float | None, float | None]
#: Words of the name CUDA gives a device; TFLOP/s in fp32, tf32, bf16, fp16, fp8; whose document. Products with fp32
#: sums and without sparsity (data sheets often print the double, "with sparsity"). The first line that fits counts.
_PEAKS: tuple[tuple[str, _Columns, str], ...] = (
    ("b200", (75, 1125, 2250, 2250, 4500), "HGX B200 data sheet, a GPU"),
    ("gb200", (80, 1250, 2500, 2500, 5000), "GB200 NVL72 data sheet, a GPU"),
    ("gh200", (67, 494, 990, 990, 1979), "GH200 data sheet"),
    ("h200 nvl", (60, 417.5, 835.5, 835.5, 1670.5), "H200 data sheet, NVL"),
    ("h200", (67, 494.5, 989.5, 989.5, 1979), "H200 data sheet, SXM"),
    ("h100 nvl", (60, 417.5, 835.5, 835.5, 1670.5), "H100 data sheet, NVL"),
    ("h100 pcie", (51, 378, 756, 756, 1513), "H100 data sheet, PCIe"),
    ("h100", (67, 494.5, 989.5, 989.5, 1979), "H100 data sheet, SXM"),
    ("l40s", (91.6, 183, 362, 362, 733), "L40S data sheet"),
    ("l40", (90.5, 90.5, 181, 181, 362), "L40 data sheet"),
    ("l4", (30.3, 60, 121, 121, 242.5), "L4 data sheet"),
    ("rtx 6000 ada", (91.1, 182.1, 364.2, 364.2, 728.5), "RTX 6000 Ada data sheet"),
    ("rtx 4090", (82.6, 82.6, 165.2, 165.2, 330.3), "Ada architecture white paper"),
    ("a100", (19.5, 156, 312, 312, None), "A100 data sheet"),
    ("a40", (37.4, 74.8, 149.7, 149.7, None), "A40 data sheet"),
    ("a30", (10.3, 82, 165, 165, None), "A30 data sheet"),
    ("a10g", (31.5, 35, 70, 70, None), "A10G data sheet"),
    ("a10", (31.2, 62.5, 125, 125, None), "A10 data sheet"),
    ("rtx a6000", (38.7, 77.4, 154.8, 154.8, None), "RTX A6000 data sheet"),
    ("rtx 3090", (35.6, 35.6, 71.2, 71.2, None), "GA102 white paper"),
    ("t4", (8.1, None, None, 65, None), "T4 data sheet"),
    ("v100s", (16.4, None, None, 130, None), "V100 data sheet, V100S"),
    ("v100 pcie", (14, None, None, 112, None), "V100 data sheet, PCIe"),
    ("v100", (15.7, None, None, 125, None), "V100 data sheet, SXM2"),
)
