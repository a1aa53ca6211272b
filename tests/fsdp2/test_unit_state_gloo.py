"""What FSDP2 keeps in its units between calls: which gathered weights are trained, and whether gradients are summed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mp import NonFiniteError
from lightning_mp.compat.lightning import LightningModule
from support.comparing import furthest, of_training
from support.models import FEATURES, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import HOSTS, Ranked, fsdp2, trained, whole, world

pytestmark = pytest.mark.gloo

RATE = 0.1


# ------------------------------------------------------------------ a GAN, as users write it


def _toggled(module: Any, x: Tensor, batch_idx: int) -> None:
    """``zero_grad`` comes after ``step``: what another loss left behind is stepped on."""
    for optimizer, loss in zip(module.optimizers(), (module.generated, module.judged), strict=True):
        module.toggle_optimizer(optimizer)
        module.manual_backward(loss(x))
        optimizer.step()
        optimizer.zero_grad()
        module.untoggle_optimizer(optimizer)


def _both_forwards_first(module: Any, x: Tensor, batch_idx: int) -> None:
    """Toggled between forward and backward."""
    losses = module.generated(x), module.judged(x)
    for optimizer, loss in zip(module.optimizers(), losses, strict=True):
        module.toggle_optimizer(optimizer)
        module.manual_backward(loss)
        module.untoggle_optimizer(optimizer)
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def _accumulated(module: Any, x: Tensor, batch_idx: int) -> None:
    for optimizer, loss in zip(module.optimizers(), (module.generated, module.judged), strict=True):
        module.toggle_optimizer(optimizer)
        module.manual_backward(loss(x) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        module.untoggle_optimizer(optimizer)


WAYS: dict[str, Callable[[Any, Tensor, int], None]] = {
    way.__name__[1:]: way
    for way in (
        _toggled,
        _both_forwards_first,
        _accumulated,
    )
}


class Net(nn.Sequential):
    """A class that can be a unit: a plain Sequential is none."""


class Adversaries(LightningModule):
    """Two small nets; every rank has its own rows of a batch, so that the mean over ranks is that of the batch."""

    def __init__(self, way: str, ranks: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way, self.ranks = WAYS[way], ranks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.maker = Net(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 4))
            self.judge = Net(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def generated(self, x: Tensor) -> Tensor:
        return (self.judge(self.maker(x)).float() - 1).pow(2).mean()

    def judged(self, x: Tensor) -> Tensor:
        false = self.judge(self.maker(x).detach()).float()
        return false.pow(2).mean() + (self.judge(x[:, :4]).float() - 1).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.way(self, batch[0][self.global_rank :: self.ranks], batch_idx)

    def configure_optimizers(self) -> Any:
        return [SGD(net.parameters(), lr=RATE) for net in (self.maker, self.judge)]


STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "one unit": partial(fsdp2, wrap=None),
    "hsdp": partial(fsdp2, wrap=None, device_mesh=(2, 1)),
    "a unit a net": partial(fsdp2, wrap="Net"),
}


@dataclass(frozen=True)
class Played:
    way: str
    mode: str
    strategy: str

    def run(self) -> dict[str, Tensor]:
        return trained(self.mode, STRATEGIES[self.strategy](), Adversaries(self.way, world()))["weights"]


CASES = [(way, "32-true", strategy) for way in WAYS for strategy in ("one unit", "a unit a net")]
CASES += [("toggled", "16-mixed", "one unit"), ("toggled", "32-true", "hsdp")]


@pytest.mark.parametrize(("way", "mode", "strategy"), CASES)
def test_a_gan_steps_each_net_on_its_own_loss_alone(ranks: Ranks, way: str, mode: str, strategy: str) -> None:
    alone = Adversaries(way, 1)
    fit(alone, **{"plugins": [plan_for(mode)]} if mode != "32-true" else {})
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    for found in ranks.run(Played(way, mode, strategy)):
        assert furthest(found, expected) <= of_training(mode, RATE)


# ------------------------------------------------------------------ a run that failed, and the next one


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyError("planned")


class Failing(Ranked):
    """Fails in the last batch of the window in which its third batch is, in the way it is told, until it is healed."""

    how = "healthy"

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        failing = self.training and len(self.losses) == 2
        hidden = self.net[0](x * self.factor())
        if failing and self.how in ("forward", "interrupt"):
            raise KeyError("planned") if self.how == "forward" else KeyboardInterrupt
        if failing and self.how == "backward":
            hidden = _Raises.apply(hidden)
        loss = (self.net[3](self.net[1](hidden).relu()).float() - y).pow(2).mean()
        return loss * float("nan") if failing and self.how == "nonfinite" else loss


@dataclass(frozen=True)
class Refitted:
    how: str
    host: str
    options: tuple[tuple[str, Any], ...] = ()

    def run(self) -> dict[str, Any]:
        module, hosts = Failing(optimizer="sgd"), {**HOSTS, "hsdp": partial(fsdp2, device_mesh=(2, 1))}
        module.how = self.how
        with suppress(NonFiniteError, KeyError, SystemExit):
            trained("32-true", hosts[self.host](), module, nonfinite="raise", **dict(self.options))
        assert len(module.losses) < 8
        module.how, before = "healthy", whole(module)
        return {"before": before, **trained("32-true", hosts[self.host](), module, **dict(self.options))}


WINDOW = (("accumulate_grad_batches", 4),)
FAILURES = [("nonfinite", (), "fsdp2"), ("forward", (), "fsdp2"), ("backward", WINDOW, "fsdp2")]
FAILURES += [("interrupt", WINDOW, "fsdp2"), ("nonfinite", WINDOW, "hsdp")]


@pytest.mark.parametrize(("how", "options", "host"), FAILURES)
def test_a_module_whose_run_failed_trains_in_the_next_one(ranks: Ranks, how: str, options: Any, host: str) -> None:
    for expected, found in zip(
        ranks.run(Refitted(how, "ddp", options)), ranks.run(Refitted(how, host, options)), strict=True
    ):
        assert found["counts"] == expected["counts"]
        assert not same_weights(found["before"], found["weights"])
        assert furthest(found["before"], expected["before"]) <= of_training("32-true", RATE)
        assert furthest(found["weights"], expected["weights"]) <= of_training("32-true", RATE, 16)
