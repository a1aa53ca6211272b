"""The GPUs one plans for, by word: memory, links, and the :class:`Device` that the rules and the peaks know."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mp.errors import Faults
from lightning_mp.policy.hardware import Device, Peak, peak

#: bytes/s in one direction of 16 lanes: generation 3, 4 and 5 (PCI-SIG)
_PCIE = {3: 16e9, 4: 32e9, 5: 64e9}


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU of a table of data sheets.

    ``memory`` in bytes; ``bandwidth`` of that memory, ``nvlink`` (0 where it has none) and ``pcie`` in bytes/s, links
    in one direction; ``source`` is the document of memory and links. :func:`~lightning_mp.policy.hardware.peak` has
    the peaks and theirs.
    """

    word: str
    device: Device
    memory: int
    bandwidth: float
    nvlink: float
    pcie: float
    source: str

    def peak(self, precision: str) -> Peak | None:
        """Peak of the products under a mode, in FLOP/s; fp32 ones run in TF32 where the GPU has it."""
        dtype = {"32": "fp32", "16": "fp16", "bf16": "bf16", "fp8": "fp8"}[precision.partition("-")[0]]
        return peak(self.device, "tf32" if dtype == "fp32" and self.device.tf32 else dtype)


def find(word: str, faults: Faults) -> GPU | None:
    """The GPU called ``word``; an unknown one is noted in ``faults`` with the nearest names."""
    found = GPUS.get(str(word).lower())
    if found is None:
        faults.unknown("gpu", word, GPUS, "write one of these")
    return found


def _gpu(row: tuple[str, str, tuple[int, int], float, float, int, str]) -> GPU:
    word, name, capability, bandwidth, nvlink, pcie, source = row
    # A data sheet's GB, in units of 1e9: the driver reports a little more, the CUDA context takes a little of it.
    memory = int(word.rpartition("-")[2]) * 10**9
    bf16 = "native" if capability >= (8, 0) else "emulated"
    device = Device("cuda", name, capability, bf16, memory)
    return GPU(word, device, memory, bandwidth * 1e12, nvlink * 1e9, _PCIE[pcie], f"NVIDIA, {source}")


#: word, which ends in the memory in GB; words of its name, as ``hardware`` knows it; compute capability; TB/s of
#: memory; GB/s of NVLink in one direction (data sheets print the sum of both); PCIe's generation; document
_TABLE: tuple[tuple[str, str, tuple[int, int], float, float, int, str], ...] = (
    ("b200-180", "B200", (10, 0), 7.7, 900, 5, "HGX B200 data sheet"),
    ("gb200-186", "GB200", (10, 0), 8.0, 900, 5, "GB200 NVL72 data sheet"),
    ("h200-141", "H200", (9, 0), 4.8, 450, 5, "H200 data sheet, SXM"),
    ("gh200-96", "GH200", (9, 0), 4.0, 450, 5, "GH200 data sheet, HBM3"),
    ("h100-80", "H100", (9, 0), 3.35, 450, 5, "H100 data sheet, SXM"),
    ("h100-pcie-80", "H100 PCIe", (9, 0), 2.0, 300, 5, "H100 data sheet, PCIe"),
    ("h100-nvl-94", "H100 NVL", (9, 0), 3.9, 300, 5, "H100 data sheet, NVL"),
    ("l40s-48", "L40S", (8, 9), 0.864, 0, 4, "L40S data sheet"),
    ("l4-24", "L4", (8, 9), 0.3, 0, 4, "L4 data sheet"),
    ("rtx4090-24", "RTX 4090", (8, 9), 1.008, 0, 4, "Ada architecture white paper"),
    ("a100-80", "A100", (8, 0), 2.039, 300, 4, "A100 data sheet, SXM"),
    ("a100-40", "A100", (8, 0), 1.555, 300, 4, "A100 data sheet, SXM"),
    ("a40-48", "A40", (8, 6), 0.696, 56.25, 4, "A40 data sheet"),
    ("a30-24", "A30", (8, 0), 0.933, 100, 4, "A30 data sheet"),
    ("a10g-24", "A10G", (8, 6), 0.6, 0, 4, "A10G data sheet"),
    ("a6000-48", "RTX A6000", (8, 6), 0.768, 56.25, 4, "RTX A6000 data sheet"),
    ("rtx3090-24", "RTX 3090", (8, 6), 0.936, 56.25, 4, "GA102 white paper"),
    ("t4-16", "T4", (7, 5), 0.32, 0, 3, "T4 data sheet"),
    ("v100-32", "V100", (7, 0), 0.9, 150, 3, "V100 data sheet, SXM2"),
    ("v100-16", "V100", (7, 0), 0.9, 150, 3, "V100 data sheet, SXM2"),
)
GPUS: dict[str, GPU] = {row[0]: _gpu(row) for row in _TABLE}
