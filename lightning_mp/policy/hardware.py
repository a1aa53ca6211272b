"""Capabilities of devices, and the precision that suits each: rules and data sheets, without torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_mp.errors import Faults

SUPPORTED_DEVICES = ("cpu", "cuda", "mps")

#: Below this many parameters half precision gains little (reference guide "mixed-precision for LLMs", decision matrix).
SMALL_MODEL = 100_000_000
#: fp32 weights, gradients and Adam's two moments
BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as the rules know it. ``memory`` is in bytes; ``None`` means no limit.

    ``rocm``: an AMD GPU, whose type is ``"cuda"`` in torch. Its capability is its architecture (9.4 for gfx942).
    """

    type: str
    name: str
    capability: tuple[int, int] | None = None
    bf16: Literal["native", "emulated", "none"] = "native"
    memory: int | None = None
    rocm: bool = False

    @property
    def fp16(self) -> bool:
        """True if it has fp16 arithmetic: on CUDA since capability 5.3 (CUDA C++ Programming Guide)."""
        return self.capability is None or self.capability >= (5, 3)

    @property
    def fp8(self) -> bool:
        """True if it multiplies in FP8: CUDA since capability 8.9 (torchao/float8/README.md), and CPUs, slowly."""
        return self.type == "cpu" or (self.capability is not None and self.capability >= (8, 9) and not self.rocm)

    @property
    def tf32(self) -> bool:
        """True if fp32 products can run in TF32 (CUDA, Ampere or newer)."""
        return self.type == "cuda" and self.capability is not None and self.capability >= (8, 0) and not self.rocm


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of ``precision="auto"``, and its reason."""

    precision: str
    tf32: str | None
    reason: str


def refusal(device: Device, precision: str, *, emulate: bool = False) -> tuple[str, str, str] | None:
    """Return (problem, allowed, fix) if ``device`` cannot run ``precision``, else ``None``.

    With ``emulate`` FP8 needs no FP8 units.
    """
    given = f"precision={precision!r} on {device.name} ({device.type})"
    if device.type not in SUPPORTED_DEVICES:
        return given, f"devices of type {', '.join(SUPPORTED_DEVICES)}", "set Trainer(accelerator='cpu') or 'gpu'"
    if precision.startswith(("bf16", "fp8", "16")) and not device.fp16:
        return given, "32-true on a device without half-precision arithmetic", "use '32-true'"
    if precision.startswith(("bf16", "fp8")) and device.bf16 == "none":
        return given, "32-true, 16-mixed, 16-true on a device without bf16", "use '16-mixed'"
    if precision.startswith("fp8") and device.rocm:
        return given, "FP8 on NVIDIA's GPUs or a CPU: AMD's FP8 is another format (e4m3fnuz)", "use 'bf16-mixed'"
    if precision.startswith("fp8") and not emulate and not device.fp8:
        fix = "use 'bf16-mixed', or FP8(emulate=True) to see the numbers at the cost of speed"
        return given, "a CUDA device of compute capability 8.9 or newer, or a CPU", fix
    return None


def choose(device: Device, parameters: int) -> Choice:
    """Return the choice of ``precision="auto"`` for a model with that number of parameters."""
    tf32 = "high" if device.tf32 else None
    needed = parameters * BYTES_PER_PARAMETER
    fits = device.memory is None or needed <= device.memory // 2
    size = f"{parameters / 1e6:.1f}M parameters"
    if parameters < SMALL_MODEL and fits:
        return Choice("32-true", tf32, f"{size} is below 100M and fits {device.name}: half precision gains little")
    if (device.type == "cpu" and device.bf16 != "native") or not device.fp16:
        return Choice("32-true", None, f"half precision is slower on {device.name}, which has no arithmetic for it")
    if device.bf16 == "native":
        return Choice("bf16-mixed", tf32, f"{device.name} computes bf16 natively: fp32's range, no loss scale needed")
    return Choice("16-mixed", tf32, f"{device.name} has no native bf16: fp16 with loss scaling")


def peak(device: Device, dtype: str) -> float | None:
    """Return the dense peak of matrix products in ``dtype`` (fp32, tf32, bf16, fp16 or fp8), in FLOP/s.

    ``None`` without a data sheet: a CPU, an unknown GPU, a slice of a GPU (MIG), a laptop's GPU, or a dtype that the
    device has no units for.
    """
    words = set(re.split(r"[^a-z0-9]+", device.name.lower()))
    if device.type != "cuda" or words & {"mig", "laptop", "max"}:
        return None
    for name, columns, *_ in _SHEETS:
        if words.issuperset(name.lower().split()):
            teraflops = columns[_DTYPES.index(dtype)]
            return None if teraflops is None else teraflops * 1e12
    return None


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU of the table of data sheets. ``word`` is its name on the command line, such as ``h100-80``.

    ``memory`` is in bytes, ``bandwidth`` of the memory in bytes/s. ``nvlink`` (0 without any) and ``pcie`` are in
    bytes/s in one direction. ``source`` is the document.
    """

    word: str
    device: Device
    memory: int
    bandwidth: float
    nvlink: float
    pcie: float
    source: str

    def peak(self, precision: str) -> float | None:
        """Return the peak of products under a mode, in FLOP/s; ``32-true`` counts TF32 if the GPU has it."""
        dtype = {"32": "fp32", "16": "fp16", "bf16": "bf16", "fp8": "fp8"}[precision.partition("-")[0]]
        return peak(self.device, "tf32" if dtype == "fp32" and self.device.tf32 else dtype)


def find(word: str, faults: Faults) -> GPU | None:
    """Return the GPU of that word; for an unknown word add a fault with near names and return ``None``."""
    known = GPUS.get(str(word).lower())
    if known is None:
        faults.unknown("gpu", word, GPUS, "write one of these")
    return known


#: bytes/s in one direction of 16 lanes: generation 3, 4 and 5 (PCI-SIG)
_PCIE = {3: 16e9, 4: 32e9, 5: 64e9}
_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_Columns = tuple[float | None, float | None, float | None, float | None, float | None]
#: compute capability; GB/s of NVLink in one direction (data sheets print the sum of both); PCIe's generation
_Links = tuple[tuple[int, int], float, int]
#: The columns: words in the device name that CUDA reports; TFLOP/s in fp32, tf32, bf16, fp16 and fp8; the document.
#: For GPUs that the planner offers also the links, and by word the memory bandwidth in TB/s. A word ends in the memory
#: in GB. TFLOP/s are of products with fp32 sums and without sparsity; data sheets often print the double for sparse
#: products. The first line whose words are all in a name counts.
_SHEETS: tuple[tuple[str, _Columns, str, _Links | None, dict[str, float]], ...] = (
    ("B200", (75, 1125, 2250, 2250, 4500), "HGX B200 data sheet, a GPU", ((10, 0), 900, 5), {"b200-180": 7.7}),
    ("GB200", (80, 1250, 2500, 2500, 5000), "GB200 NVL72 data sheet, a GPU", ((10, 0), 900, 5), {"gb200-186": 8.0}),
    ("GH200", (67, 494, 990, 990, 1979), "GH200 data sheet", ((9, 0), 450, 5), {"gh200-96": 4.0}),
    ("H200 NVL", (60, 417.5, 835.5, 835.5, 1670.5), "H200 data sheet, NVL", None, {}),
    ("H200", (67, 494.5, 989.5, 989.5, 1979), "H200 data sheet, SXM", ((9, 0), 450, 5), {"h200-141": 4.8}),
    ("H100 NVL", (60, 417.5, 835.5, 835.5, 1670.5), "H100 data sheet, NVL", ((9, 0), 300, 5), {"h100-nvl-94": 3.9}),
    ("H100 PCIe", (51, 378, 756, 756, 1513), "H100 data sheet, PCIe", ((9, 0), 300, 5), {"h100-pcie-80": 2.0}),
    ("H100", (67, 494.5, 989.5, 989.5, 1979), "H100 data sheet, SXM", ((9, 0), 450, 5), {"h100-80": 3.35}),
    ("L40S", (91.6, 183, 362, 362, 733), "L40S data sheet", ((8, 9), 0, 4), {"l40s-48": 0.864}),
    ("L40", (90.5, 90.5, 181, 181, 362), "L40 data sheet", None, {}),
    ("L4", (30.3, 60, 121, 121, 242.5), "L4 data sheet", ((8, 9), 0, 4), {"l4-24": 0.3}),
    ("RTX 6000 Ada", (91.1, 182.1, 364.2, 364.2, 728.5), "RTX 6000 Ada data sheet", None, {}),
    ("RTX 4090", (82.6, 82.6, 165.2, 165.2, 330.3), "Ada white paper", ((8, 9), 0, 4), {"rtx4090-24": 1.008}),
    ("A100", (19.5, 156, 312, 312, None), "A100 data sheet", ((8, 0), 300, 4), {"a100-80": 2.039, "a100-40": 1.555}),
    ("A40", (37.4, 74.8, 149.7, 149.7, None), "A40 data sheet", ((8, 6), 56.25, 4), {"a40-48": 0.696}),
    ("A30", (10.3, 82, 165, 165, None), "A30 data sheet", ((8, 0), 100, 4), {"a30-24": 0.933}),
    ("A10G", (31.5, 35, 70, 70, None), "A10G data sheet", ((8, 6), 0, 4), {"a10g-24": 0.6}),
    ("A10", (31.2, 62.5, 125, 125, None), "A10 data sheet", None, {}),
    ("RTX A6000", (38.7, 77.4, 154.8, 154.8, None), "RTX A6000 data sheet", ((8, 6), 56.25, 4), {"a6000-48": 0.768}),
    ("RTX 3090", (35.6, 35.6, 71.2, 71.2, None), "GA102 white paper", ((8, 6), 56.25, 4), {"rtx3090-24": 0.936}),
    ("T4", (8.1, None, None, 65, None), "T4 data sheet", ((7, 5), 0, 3), {"t4-16": 0.32}),
    ("V100S", (16.4, None, None, 130, None), "V100 data sheet, V100S", None, {}),
    ("V100 PCIe", (14, None, None, 112, None), "V100 data sheet, PCIe", None, {}),
    ("V100", (15.7, None, None, 125, None), "V100 SXM2 data sheet", ((7, 0), 150, 3), {"v100-32": 0.9, "v100-16": 0.9}),
)


def _planned() -> Iterator[GPU]:
    for name, _, source, links, words in _SHEETS:
        if links is None:
            continue
        capability, nvlink, pcie = links
        for word, bandwidth in words.items():
            # A data sheet's GB, in units of 1e9: the driver reports a little more, the CUDA context takes a little.
            memory = int(word.rpartition("-")[2]) * 10**9
            device = Device("cuda", name, capability, "native" if capability >= (8, 0) else "emulated", memory)
            yield GPU(word, device, memory, bandwidth * 1e12, nvlink * 1e9, _PCIE[pcie], f"NVIDIA, {source}")


GPUS: dict[str, GPU] = {gpu.word: gpu for gpu in _planned()}
