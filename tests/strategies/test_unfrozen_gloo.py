"""Parameters that are frozen or unfrozen in the midst of a run: every strategy trains what is trained then."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_mp.compat.lightning import LightningModule
from support.comparing import furthest, of_training
from support.models import FEATURES, batches
from support.ranks import Ranks
from support.sharded import RATE, ddp, fsdp2, on, trained

pytestmark = pytest.mark.gloo

EPOCHS = 4
make = partial(AdamW, lr=RATE, eps=1e-4)


class Finetuned(LightningModule):
    """A backbone of two layers, and a head; each rank has its own data. The second half is of the last layer alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 1)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.Linear(32, 64))

    def loss(self, batch: Any, rank: int) -> Tensor:
        x, y = batch
        return (self.head(self.backbone(x)).float() - y * (1 + rank)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.global_rank)

    def configure_optimizers(self) -> Any:
        return make([parameter for parameter in self.parameters() if parameter.requires_grad])


class Finetuning(BaseFinetuning):
    """The last layer is unfrozen after an epoch, the first after two; then the last one is frozen again.

    The group that came last is slowed down, as ``BackboneFinetuning`` changes its rate.
    """

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            part = pl_module.backbone[2] if epoch == 1 else pl_module.backbone[:2]
            self.unfreeze_and_add_param_group(part, optimizer, lr=RATE)
            optimizer.param_groups[-1]["lr"] = RATE / epoch
        elif epoch == 3:
            self.freeze(pl_module.backbone[2])


def plain() -> dict[str, Tensor]:
    """The weights after a plain loop, which averages the gradients of two ranks."""
    module, callback = Finetuned(), Finetuning()
    callback.freeze_before_training(module)
    optimizer: Any = module.configure_optimizers()
    for epoch in range(EPOCHS):
        callback.finetune_function(module, epoch, optimizer)
        for batch in batches():
            optimizer.zero_grad()
            sum(module.loss(batch, rank) / 2 for rank in range(2)).backward()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@dataclass(frozen=True)
class Case:
    host: str
    mode: str = "32-true"
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        whole = {"fsdp2_whole": lambda: fsdp2(wrap=None)}
        hosts = {"ddp": ddp, "mp_ddp": lambda: on("mp_ddp"), "fsdp2": fsdp2, **whole}
        given = {"max_epochs": EPOCHS, "callbacks": [Finetuning()], **self.options}
        return trained(self.mode, hosts[self.host](), Finetuned(), **given)["weights"]


@pytest.mark.parametrize("host", ["ddp", "mp_ddp", "fsdp2", "fsdp2_whole"])
def test_what_is_unfrozen_is_trained_as_in_a_plain_loop(ranks: Ranks, host: str) -> None:
    expected = plain()
    for found in ranks.run(Case(host)):
        assert furthest(found, expected) <= of_training("32-true", RATE, 8 * EPOCHS)


@pytest.mark.parametrize("host", ["fsdp2"])
def test_half_weights_are_summed_in_fp32_also_once_unfrozen(ranks: Ranks, host: str) -> None:
    expected = ranks.run(Case("mp_ddp", "bf16-true"))
    for found, other in zip(ranks.run(Case(host, "bf16-true")), expected, strict=True):
        assert furthest(found, other) <= of_training("bf16-true", RATE, 8 * EPOCHS)
    assert furthest(*expected) == 0.0
