"""The share of updates that half-precision weights round away: the number that a count by hand gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.record import metric_names
from support.models import Regression
from support.oracles import plan_for, stock_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import WAIT, on

STEPS = 3


class Counts(Regression):
    """Counts by hand: whole weights before and after each step, of which the gradient is not 0."""

    def __init__(self, make: Any = None) -> None:
        super().__init__(make or partial(AdamW, lr=1e-4, eps=1e-4))
        self.shares: list[float | None] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        half = [p for p in self.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
        self.seen = [(p, whole(p).clone(), whole(p.grad) != 0) for p in half if p.grad is not None]

    def on_train_batch_end(self, *_: Any) -> None:
        lost = sum(int(((whole(p) == before) & moves).sum()) for p, before, moves in self.seen)
        moved = sum(int(moves.sum()) for _, _, moves in self.seen)
        self.shares.append(lost / moved if moved else None)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def shares(module: Counts, folder: Path, **options: Any) -> list[float | None]:
    """What TrainingHealth measured."""
    mine = TrainingHealth(folder / "run", report=False)
    fit(module, callbacks=[mine, *options.pop("callbacks", [])], max_steps=STEPS, **options)
    return [row[metric_names.LOST_UPDATES] for row in mine.rows]


@pytest.mark.parametrize("make", [partial(AdamW, lr=1e-4, eps=1e-4), partial(SGD, lr=1e-3)])
@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
@pytest.mark.parametrize("host", ["stock", "plan"])
def test_it_is_the_count_by_hand(host: str, mode: str, make: Any, tmp_path: Path) -> None:
    module = Counts(make)
    how = stock_for(mode) if host == "stock" else {"plugins": [plan_for(mode, LossScaling.static(64.0))]}
    assert shares(module, tmp_path, **how) == module.shares
    assert all(0 < share < 1 for share in module.shares)  # type: ignore[operator]


class Rounds(AdamW):
    bf16_stochastic_round = True


@dataclass(frozen=True)
class Unlogged:
    mode: str
    make: Any


UNLOGGED = {
    "fp32 masters": Unlogged("bf16-mixed", partial(AdamW, lr=1e-6)),
    "stochastic rounding": Unlogged("bf16-true", partial(Rounds, lr=1e-6)),
    "a rate of 0": Unlogged("bf16-true", partial(SGD, lr=0.0)),
}


@pytest.mark.parametrize("name", UNLOGGED)
def test_where_nothing_is_lost_nothing_is_logged(name: str, tmp_path: Path) -> None:
    case = UNLOGGED[name]
    assert shares(Counts(case.make), tmp_path, plugins=[MixedPrecisionPlan(case.mode)]) == [None] * STEPS


@dataclass(frozen=True)
class Across:
    """Two processes; what was measured, and counted on whole weights."""

    strategy: str
    folder: Path

    def run(self) -> tuple[Any, Any]:
        plan, module = MixedPrecisionPlan("bf16-true"), Counts()
        strategy = make_strategy(self.strategy, plan, process_group_backend="gloo", timeout=WAIT["timeout"])
        return shares(module, self.folder, plugins=[plan], **on(strategy)), module.shares


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_processes(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    (first, counted), (second, _) = ranks.run(Across(strategy, tmp_path))
    assert first == second == counted
    assert all(0 < share < 1 for share in first)
