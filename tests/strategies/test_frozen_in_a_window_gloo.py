"""A layer is frozen and unfrozen within a window of accumulation: two ranks end as one device does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from support.comparing import same
from support.features import FEATURES, HIDDEN, Host, Net
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

WINDOW = 4
#: whether each half of a batch, and so each rank, uses the layer
USED = {"by both": (True, True), "by one rank": (False, True)}
#: at which batches of a window it is frozen, and unfrozen
TIMES = {"frozen": ((2,), ()), "unfrozen": ((), (2,)), "frozen and unfrozen": ((1,), (3,))}
WITHIN = 1e-6
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"find_unused_parameters": True},
    "fsdp2": {"wrap": "Sequential"},
    "hsdp": {"wrap": "Sequential", "device_mesh": (2, 1)},
}


class Frozen(Net):
    """Each half of a batch goes through the layer, or not."""

    def __init__(self, used: str, times: str) -> None:
        super().__init__(make_optimizer=lambda parameters: SGD(parameters, lr=1e-2, weight_decay=0.1))
        self.layer = nn.Linear(FEATURES, HIDDEN)
        self.used, (self.frozen, self.unfrozen) = USED[used], TIMES[times]
        self.layer.requires_grad_(bool(self.frozen))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for when, trained in ((self.frozen, False), (self.unfrozen, True)):
            if batch_idx % WINDOW in when:
                self.layer.requires_grad_(trained)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.layer.requires_grad_(bool(self.frozen))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for part in range(2) if self.trainer.world_size == 1 else [self.global_rank]:
            x, y = (tensor.chunk(2)[part] for tensor in batch)
            hidden = self.backbone(x) + (self.layer(x) if self.used[part] else 0)
            losses.append((self.head(self.middle(hidden)) - y).pow(2).mean())
        return torch.stack(losses).mean()


@dataclass(frozen=True)
class Run:
    strategy: str
    used: str
    times: str
    folder: str

    def run(self) -> Any:
        module = Frozen(self.used, self.times)
        return Host(self.strategy, Path(self.folder)).fit(
            module, strategy_options=OPTIONS, accumulate_grad_batches=WINDOW
        )


@pytest.fixture(scope="module")
def one_device() -> Iterator[Ranks]:
    with Ranks(1) as one:
        yield one


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("strategy", OPTIONS)
def test_what_a_window_has_of_its_gradient_is_kept(
    strategy: str, used: str, times: str, ranks: Ranks, one_device: Ranks, tmp_path: Path
) -> None:
    (alone,) = one_device.run(Run("single", used, times, str(tmp_path)))
    for each in ranks.run(Run(strategy, used, times, str(tmp_path))):
        assert same(alone, each, WITHIN)
