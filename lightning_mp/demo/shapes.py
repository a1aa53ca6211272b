"""How large the demo's model is on this machine, and what the machine is."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """The device every mode runs on. ``capability`` is CUDA's, ``None`` on a CPU; ``memory`` is in bytes."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    memory: int | None = None
    threads: int | None = None
    slow_half: bool = False

    def __str__(self) -> str:
        return self.name if self.threads is None else f"{self.name}, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2 and its batches. ``vocab`` is the tokenizer's size, ``rows`` the embedding's (never smaller)."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    rows: int
    batch: int
    steps: int
    val_batches: int
    lr: float

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step trains on."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Parameters of the model; the head shares the embedding's."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.rows + self.context) * self.width + self.layers * block + 2 * self.width


CPU_SHAPE = Shape(
    layers=4, width=192, heads=6, context=128, vocab=2048, rows=2048, batch=8, steps=150, val_batches=12, lr=1e-3
)
SLOW_CPU_SHAPE = Shape(
    layers=3, width=128, heads=4, context=64, vocab=1024, rows=1024, batch=4, steps=80, val_batches=12, lr=2e-3
)


def find_device() -> Device:
    """The first CUDA device where torch sees one, otherwise the CPU."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device("cuda", properties.name, (properties.major, properties.minor), properties.total_memory)
    return Device("cpu", _cpu_name(), threads=torch.get_num_threads(), slow_half=_half_is_slow())


def shape_for(device: Device) -> Shape:
    """GPT-2 small on CUDA, with a batch that fits its memory; a few million parameters or less on a CPU."""
    if device.kind == "cpu":
        return SLOW_CPU_SHAPE if device.slow_half else CPU_SHAPE
    memory = device.memory or 0
    batch = 16 if memory > 40 * GIB else 8 if memory > 20 * GIB else 4
    # The embedding keeps GPT-2's rows (padded to a multiple of 64), so that size and cost are GPT-2 small's, though a
    # tokenizer trained on a few megabytes of text fills fewer of them.
    return Shape(
        layers=12,
        width=768,
        heads=12,
        context=1024,
        vocab=8192,
        rows=50304,
        batch=batch,
        steps=300,
        val_batches=8,
        lr=6e-4,
    )


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "CPU"


def _half_is_slow() -> bool:
    """Whether this CPU emulates fp16 products, 10 to 30 times slower than fp32's.

    oneDNN has them where the processor does (AVX512-FP16, AMX).
    """
    import torch

    from lightning_mp.compat import torch as compat

    return not compat.cpu_has(torch.float16)
