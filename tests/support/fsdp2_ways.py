"""Ways in which users write a LightningModule and run it, each under DDP and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.models import batches
from support.optimizers import EvaluatesTwice
from support.oracles import plan_for
from support.running import trainer
from support.sharded import HOSTS, PINS, Ranked, ddp, full, whole


class Direct(Ranked):
    """The module holds a parameter itself, uses it in the step, and calls ``self(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 5))
        self.offset = nn.Parameter(torch.zeros(()).view(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.gain.mean()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x * self.factor()) + self.offset
        again = self(x[:2]).mean()
        return (out.float() - y).pow(2).mean() + self.gain.pow(2).sum() + again.pow(2)


class Twice(Ranked):
    """Its optimizer evaluates the closure again."""

    def configure_optimizers(self) -> Any:
        return EvaluatesTwice(self.parameters(), lr=1e-2)


class Shapes(Ranked):
    """Takes the shape, dtype or device of another unit's weight, and no value, in training and validation."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        weight = next(self.net.parameters())
        start = weight.new_zeros(len(x), weight.shape[1]).float() + weight.new_ones(1)
        x = torch.where(x > 0, torch.cat([x, torch.zeros_like(weight)])[: len(x)] + x, start).to(weight)
        return super().loss((x.type_as(weight), y)) + torch.full_like(weight[0], 0.5).dot(x[0].float())


class Parts(Ranked):
    """Never calls the net itself: only what it holds, reads weights, and only some get gradients."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x * self.factor())).relu()
        penalty = self.net[3].weight.float().pow(2).sum()
        return (hidden.float().sum(1, keepdim=True) - y).pow(2).mean() + penalty


class Attends(Ranked):
    """Torch's own attention layer, whose parent reads its children's weights, and which has a fast path in eval."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net((x * self.factor()).view(2, 4, 16))
        return (out.float().view(-1, 1) - y).pow(2).mean()


# ------------------------------------------------------------------ several runs


@dataclass(frozen=True)
class Again:
    """The same module run more than once, evaluated before or after it is trained; "once" it is trained once."""

    how: str
    host: str = "fsdp2"
    even: bool = False
    pins: tuple[tuple[str, str], ...] = tuple(PINS.items())

    def run(self) -> dict[str, Any]:
        return {"ddp": self._run(ddp), "sharded": self._run(HOSTS[self.host])}

    def _run(self, host: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        module, data = Ranked((1,), even=self.even), batches()
        runner = trainer(plugins=[plan_for("16-mixed", pins=dict(self.pins))], **host())
        if self.how == "validate":
            runner.validate(module, data, verbose=False)
        elif self.how == "predict":
            runner.predict(module, data)
        elif self.how == "failed":
            module.training_step, step = _fails, module.training_step
            with suppress(KeyError):
                runner.fit(module, data)
            module.training_step = step
        elif self.how != "once":
            runner.fit(module, data, data)
        if self.how == "same trainer":
            runner.fit_loop.max_epochs = 2
        elif self.how in ("failed", "new plan", "new trainer"):
            mode = "bf16-mixed" if self.how == "new plan" else "16-mixed"
            runner = trainer(plugins=[plan_for(mode, pins=dict(self.pins))], **host())
        runner.fit(module, data, data)
        runner.validate(module, data, verbose=False)
        runner.test(module, data, verbose=False)
        predicted = torch.cat([full(part) for part in runner.predict(module, data)])
        found = {"losses": module.losses, "validated": module.validated, "predicted": predicted}
        return {"weights": whole(module), **found}


def _fails(batch: Any, batch_idx: int) -> Any:
    raise KeyError("planned")
