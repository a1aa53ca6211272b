"""Predicted memory of a rank is what the allocator of one of two processes gives out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.memory import Again, Cell, measured, predicted
from lightning_mp import trainer_kwargs
from lightning_mp.compat.lightning import Trainer
from lightning_mp.tracing.run import ALONE
from support.ranks import Ranks

#: rows enough that activations are most of it: gloo's threads let go of what they sent at no fixed moment
LLAMA = Cell("llama", "bf16-mixed", "none", "AdamW", rows=8)
RECOMPUTED = Cell("llama", "16-mixed", "full", "AdamW", rows=8)
#: of the peak
WITHIN = 0.1


@dataclass(frozen=True)
class Peak:
    """The allocator's peak on this rank."""

    cell: Cell
    strategy: str

    def run(self) -> int:
        return measured(self.cell, self.strategy, 2)


@dataclass(frozen=True)
class Held:
    """Bytes of weights and optimizer state on this rank after two steps."""

    cell: Cell
    strategy: str

    def run(self) -> tuple[int, int]:
        arguments = trainer_kwargs(
            self.cell.plan(), strategy=self.strategy, devices=2, accelerator="cpu", logger=False, **ALONE
        )
        module, trainer = self.cell.module(), Trainer(**arguments)
        trainer.fit(module, Again(self.cell.batch()))
        (optimizer,) = trainer.optimizers
        return _bytes(module.parameters()), _state(optimizer)


def _bytes(tensors: object) -> int:
    found = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)  # type: ignore[attr-defined]
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def _state(optimizer: Optimizer) -> int:
    return _bytes(value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("cell", "strategy"),
    [
        pytest.param(LLAMA, "ddp", id="ddp"),
        pytest.param(LLAMA, "fsdp2", id="fsdp2"),
        pytest.param(RECOMPUTED, "fsdp2", id="fsdp2, recomputed", marks=SLOW),
        pytest.param(LLAMA, "fsdp1", id="fsdp1", marks=SLOW),
    ],
)
def test_the_peak_of_a_rank(ranks: Ranks, cell: Cell, strategy: str) -> None:
    found = predicted(cell, strategy, 2)
    assert found.method == "traced"
    assert found.peak_bytes == pytest.approx(ranks.run(Peak(cell, strategy))[0], rel=WITHIN)


def test_what_a_rank_holds(ranks: Ranks) -> None:
    weights, state = ranks.run(Held(LLAMA, "fsdp2"))[0]
    found = predicted(LLAMA, "fsdp2", 2).held
    assert found["parameters"] == pytest.approx(weights, rel=0.02)
    assert found["optimizer_state"] == pytest.approx(state, rel=0.02)


@SLOW
@pytest.mark.parametrize("strategy", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_the_peak_of_a_rank_under_zero(ranks: Ranks, strategy: str) -> None:
    pytest.importorskip("deepspeed")
    found = predicted(LLAMA, strategy, 2)
    assert "formula" in found.method
    assert "DeepSpeed" in found.notes[0]
    assert found.peak_bytes == pytest.approx(ranks.run(Peak(LLAMA, strategy))[0], rel=WITHIN)
