"""Predicted memory of a rank is what the allocator of one of two processes gives out, and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from benchmarks.memory import Cell, Trained
from benchmarks.sharded_memory import CELLS, HELD, STRATEGIES, OfRank, cells, predicted, strategy
from lightning_mp.planner import predict_memory
from support.ranks import Ranks

#: of the peak, and of what is held
WITHIN, EXACT = 0.1, 0.02
MIXED = next(cell for cell in CELLS if cell.precision == "bf16-mixed")
SLOW = pytest.mark.slow


def _measured(ranks: Ranks, name: str, cell: Cell) -> tuple[int, dict[str, int]]:
    return min(ranks.run(OfRank(cell, name)), key=lambda answer: answer[0])


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        pytest.param(
            name, cell, marks=() if (name, cell) == ("`fsdp2`", MIXED) else SLOW, id=f"{name} {cell.precision}"
        )
        for name in STRATEGIES
        for cell in cells(name)
    ],
)
def test_a_rank_takes_and_holds_what_was_predicted(ranks: Ranks, name: str, cell: Cell) -> None:
    peak, held = _measured(ranks, name, cell)
    found = predicted(cell, name)
    assert found.peak_bytes == sum(found.parts.values()) == pytest.approx(peak, rel=WITHIN)
    assert found.method == "traced"
    assert {part: found.held[part] for part in HELD} == pytest.approx(held, rel=EXACT)


class _Untraceable(Trained):
    """Makes a shape of numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * len(loss.new_ones(3).nonzero())


@SLOW
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_formula_holds_what_a_rank_holds(ranks: Ranks, name: str) -> None:
    _, held = _measured(ranks, name, MIXED)
    module, plan = MIXED.module(), MIXED.plan()
    module.__class__ = _Untraceable
    given: dict[str, Any] = {"devices": 2, "trainer_args": {"accelerator": "cpu"}}
    found = predict_memory(module, MIXED.batch(), plan, strategy=strategy(name, plan), **given)
    assert found.method == "formula"
    assert "aten.nonzero" in found.notes[0]
    if not name.endswith("_offload`"):  # what is on the CPU is not on the device: here both are the same memory
        assert {part: found.held[part] for part in HELD} == pytest.approx(held, rel=EXACT)
