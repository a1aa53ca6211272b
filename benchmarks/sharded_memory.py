"""What a rank of two holds, and its peak, beside the prediction: each strategy in two processes on gloo.

``python -m benchmarks.sharded_memory`` writes the table, the slow tests hold it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.memory import FIGURES, Cell, write
from lightning_mp import make_strategy, trainer_kwargs
from lightning_mp.comparison.run import quiet
from lightning_mp.compat.lightning import Callback, LightningModule, Strategy, Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import MemoryPrediction, predict_memory
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.tracing.run import ALONE, STEPS, Again

MARKS = ("<!-- written by benchmarks/sharded_memory.py -->", "<!-- as far as here, sharded -->")
HELD = ("parameters", "gradients", "optimizer_state")
#: gloo's threads let go of what they sent at no fixed moment: in the run itself this adds, from the run before it is
#: counted as a fall. The second least of so many runs is taken
_RUNS = 3
#: so many with tensor parallelism, which sends activations
_MORE_RUNS = 6
#: the strategy's name for ``make_strategy``, and what it is told
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "`ddp`": ("ddp", {}),
    "`fsdp2`": ("fsdp2", {}),
    "`fsdp2_offload`": ("fsdp2_offload", {}),
    "`fsdp2`, `tensor_parallel=2`": ("fsdp2", {"tensor_parallel": 2}),
    "`hsdp`": ("hsdp", {}),
    "`hsdp`, 2 x 1": ("hsdp", {"device_mesh": (2, 1)}),
    "`fsdp1`": ("fsdp1", {}),
    "`fsdp1_offload`": ("fsdp1_offload", {}),
}
#: rows enough that activations are most of it
CELLS = (
    Cell("llama", "32-true", "none", "SGD", rows=8, kv_heads=2),
    Cell("llama", "bf16-mixed", "none", "AdamW", rows=8, kv_heads=2),
    Cell("llama", "16-mixed", "full", "AdamW", rows=8, kv_heads=2),
    Cell("llama", "bf16-true", "selective", "AdamW", rows=8, kv_heads=2),
)


@dataclass(frozen=True)
class OfRank:
    """The allocator's peak on this rank, and what it holds after two steps, in bytes."""

    cell: Cell
    name: str

    def run(self) -> tuple[int, dict[str, int]]:
        """Run it; the second least peak of some."""
        peaks: list[int] = []
        holds = _Holds()
        for _ in range(_MORE_RUNS if "tensor_parallel" in self.name else _RUNS):
            gc.collect()
            with quiet(), PeakMemory() as peak:
                plan = self.cell.plan()
                arguments = {"accelerator": "cpu", "logger": False, **ALONE, "callbacks": [holds]}
                trainer = Trainer(**trainer_kwargs(plan, strategy=strategy(self.name, plan), devices=2, **arguments))
                trainer.fit(self.cell.module(), Again(self.cell.batch()))
                del trainer
            peaks.append(peak.bytes)
        return sorted(peaks)[1], holds.bytes


class _Holds(Callback):
    """Counts storages after the second step, each once."""

    bytes: dict[str, int]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step != STEPS:
            return
        parameters, seen = list(pl_module.parameters()), set[int]()
        (optimizer,) = trainer.optimizers
        gradients = [parameter.grad for parameter in parameters]
        states = (value for state in optimizer.state.values() for value in state.values())
        self.bytes = {
            "parameters": _bytes(parameters, seen),
            "gradients": _bytes(gradients, seen),
            "optimizer_state": _bytes(states, seen),
        }


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def strategy(name: str, plan: MixedPrecisionPlan) -> Strategy:
    """One of ``STRATEGIES`` for ``plan``."""
    word, options = STRATEGIES[name]
    return make_strategy(word, plan, **options)


def cells(name: str) -> list[Cell]:
    """Those that the strategy runs: FSDP1 refuses pins."""
    return [cell for cell in CELLS if not ("fsdp1" in name and cell.plan().policy.pins)]


def predicted(cell: Cell, name: str) -> MemoryPrediction:
    """The same as ``OfRank``, predicted."""
    plan = cell.plan()
    given: Mapping[str, Any] = {"strategy": strategy(name, plan), "devices": 2, "trainer_args": {"accelerator": "cpu"}}
    return predict_memory(cell.module(), cell.batch(), plan, **given)


def found() -> Iterator[tuple[tuple[str, ...], int, list[float]]]:
    """By strategy each cell's measured peak, and how far its prediction and that of what is held are off."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.ranks import Ranks

    with Ranks() as ranks:
        for name in STRATEGIES:
            for cell in cells(name):
                said, answers = predicted(cell, name), ranks.run(OfRank(cell, name))
                true, held = min(answers, key=lambda answer: answer[0])
                holds = sum(said.held[part] for part in HELD) / sum(held.values())
                yield (name,), true, [said.peak_bytes / true - 1, holds - 1]


if __name__ == "__main__":
    write(["strategy", *FIGURES, "worst of what is held"], found(), MARKS)
