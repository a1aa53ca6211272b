"""Ranks that use different parameters train as under DDP; those that run different units are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningDataModule, LightningModule
from support.comparing import furthest, of_training, same
from support.models import FEATURES, InfiniteGradient, batches
from support.ranks import Ranks
from support.sharded import RATE, ddp, fsdp2, refused, trained

pytestmark = pytest.mark.gloo

#: used by no rank, and from the last batch on by one
NEVER, LATE = "experts.2.", "experts.3."
STEPS = 8


class Expert(nn.Sequential):
    """A net with a norm, to be pinned."""

    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(16, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 16))


class Block(nn.Module):
    """What is run first is defined last; of the experts each rank takes one."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(map(Expert, sizes))
        self.first = Expert(8)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        x = x + self.first(x)
        return x + self.experts[chosen](x)


class Routed(LightningModule):
    """Ranks differ in the experts they choose, and in the block that each drops in the steps ``drops``."""

    def __init__(
        self, sizes: tuple[int, ...] = (32, 32, 32, 32), bad: int | None = None, drops: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad, self.drops = bad, drops
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(2))
        self.embed, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.validated: list[float] = []
        self.losses: list[float] = []
        self.step = 0

    def loss(self, batch: Any, place: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for index, block in enumerate(self.blocks):
            if place in self.drops and index == self.global_rank:
                continue
            late = (index, place, self.global_rank) == (0, STEPS - 1, 0)
            h = block(h, 3 if late else (self.global_rank + place + index) % 2)
        return (self.head(h).float() - y * (1 + self.global_rank)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.losses.append(loss.item())
        return InfiniteGradient.apply(loss) if batch_idx == self.bad and self.global_rank == 1 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch, batch_idx).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.3, eps=1e-4)


@dataclass(frozen=True)
class Case:
    """One way to run it."""

    mode: str = "32-true"
    sizes: tuple[int, ...] = (32, 32, 32, 32)
    bad: int | None = None
    drops: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    #: the strategy's; ``None`` is DDP
    strategy: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        host = ddp(find_unused_parameters=True) if self.strategy is None else fsdp2(**self.strategy)
        module = Routed(self.sizes, self.bad, self.drops)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        data = LightningDataModule.from_datasets(batches().dataset, batches().dataset, batch_size=8)
        validated = {} if "val_check_interval" in self.options else {"limit_val_batches": 0}
        found = trained(self.mode, host, module, data=data, **validated, **self.options)
        after = found["weights"]
        return {
            **found,
            "moved": {name for name in before if not torch.equal(before[name].to(after[name]), after[name])},
        }


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}},
    "overflow": {"mode": "16-mixed", "bad": 5, "options": {"gradient_clip_val": 0.1}},
    "validated": {"options": {"val_check_interval": 3, "num_sanity_val_steps": 1}},
    "dropped": {"drops": (3, 5)},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one unit": {"wrap": None},
    "blocks": {"wrap": "Block"},
    "replicas": {"wrap": "Block", "device_mesh": (2, 1)},
}
CASES = [("plain", name) for name in STRATEGIES] + [("accumulated", "replicas")]
CASES += [(name, "one unit" if name == "dropped" else "blocks") for name in OPTIONS if name != "plain"]


@pytest.mark.parametrize(("options", "strategy"), CASES)
def test_ranks_that_use_different_experts_train_as_under_ddp(ranks: Ranks, options: str, strategy: str) -> None:
    given, how = OPTIONS[options], STRATEGIES[strategy]
    expected, found = ranks.run(Case(**given)), ranks.run(Case(**given, strategy=how))
    mode = given.get("mode", "32-true")
    for one, other in zip(expected, found, strict=True):
        assert one["counts"] == other["counts"]
        assert one["moved"] == other["moved"]
        assert not any(NEVER in name for name in other["moved"])
        assert furthest(one["weights"], other["weights"]) <= of_training(mode, RATE, STEPS)
        assert same(one["validated"], other["validated"], 1e-5)
        assert same(one["norms"], other["norms"], 1e-5 if mode == "32-true" else 1e-3)


@dataclass(frozen=True)
class Apart:
    """What is said where ranks run different units."""

    wrap: str
    drops: tuple[int, ...] = ()

    def run(self) -> str:
        return refused(lambda: trained("32-true", fsdp2(wrap=self.wrap), Routed(drops=self.drops)))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Apart("Block", (0,)), "when another is at 'blocks.1'"),
        (Apart("Block", (3,)), "The unit of 'blocks."),
    ],
    ids=["in the first step", "in a later step"],
)
def test_ranks_that_run_different_units_are_refused(ranks: Ranks, case: Apart, said: str) -> None:
    for message in ranks.run(case):
        assert said in message
        assert "mp_ddp" in message
