"""What a stage has of its own: random numbers, and whether it is trained or evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mp import MixedPrecisionPlan, make_strategy
from support.pipeline import ROWS, WIDTH, Staged
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo


class Dropped(Staged):
    """Draws as many numbers in its second stage as in its first; notes what was dropped on this rank."""

    def build(self) -> None:
        super().build()
        for block in self.blocks[::2]:
            block.up = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 16))
        self.masks: list[Tensor] = []
        for block in self.blocks[::2]:
            block.up[0].register_forward_hook(lambda *args: self.masks.append(args[2] == 0))


class Drawing(Dataset[Any]):
    """Its members are drawn as they are asked for."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH), torch.randn(1)


@dataclass(frozen=True)
class OfOneSeed:
    """What each rank dropped, which batches it was given, and where its generator stands at the end."""

    def run(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        module, plan = Dropped(), MixedPrecisionPlan("32-true")
        torch.manual_seed(0)
        strategy = make_strategy("pipeline", plan, stages=2, microbatches=4)
        trainer(strategy=strategy, plugins=[plan], devices=2).fit(module, DataLoader(Drawing(), batch_size=ROWS))
        return module.masks[1:], module.seen, torch.rand(1)  # the first is of the call that shows torch the shapes


def test_stages_of_one_seed_drop_others_and_leave_what_data_draws_alone(ranks: Ranks) -> None:
    (first, seen, drawn), (second, also_seen, also_drawn) = ranks.run(OfOneSeed())
    assert len(first) == len(second) == 12
    assert not any(torch.equal(one, other) for one in first for other in second)
    assert len({tuple(mask.flatten().tolist()) for mask in (*first, *second)}) == 24  # nor any mask again
    assert all(torch.equal(one, other) for one, other in zip(seen, also_seen, strict=True))
    assert torch.equal(drawn, also_drawn)
