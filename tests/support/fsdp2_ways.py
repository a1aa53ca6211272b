"""Ways in which users write a LightningModule and run it, each under DDP and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.manual import Pair
from support.models import InfiniteGradient, batches
from support.oracles import plan_for
from support.running import fit, trainer
from support.sharded import BAD_RANK, HOSTS, OPTIMIZERS, PINS, Ranked, ddp, fsdp2, full, trained, whole


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


class Returns(Ranked):
    """``training_step`` returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "more": [loss.detach() * 2]}


class Frozen(Ranked):
    """LoRA-like: the first layer and one bias are frozen."""

    def __init__(self) -> None:
        super().__init__(optimizer="groups")
        self.net[0].requires_grad_(False)
        self.net[1].bias.requires_grad_(False)


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


# ------------------------------------------------------------------ by hand


def _turns(module: Any, batch: Any, batch_idx: int) -> None:
    """As in a GAN: step one, run forward again, step the other."""
    first, second = module.optimizers()
    data = (batch[0] * module.factor(), batch[1])
    for optimizer, index in ((first, 0), (second, 1)):
        optimizer.zero_grad()
        module.manual_backward(module.losses_of(data, batch_idx)[index])
        module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        module.look()
        optimizer.step()


def _together(module: Any, batch: Any, batch_idx: int) -> None:
    """Two backward passes, then both steps."""
    first, second = module.optimizers()
    one, other = module.losses_of((batch[0] * module.factor(), batch[1]), batch_idx)
    first.zero_grad()
    second.zero_grad()
    module.manual_backward(one)
    module.manual_backward(other)
    module.look()
    first.step()
    second.step()


class Players(Pair):
    """Two nets, each rank with its own data; chosen nets overflow on one rank."""

    def __init__(self, how: str, bad: dict[int, str], optimizer: str) -> None:
        super().__init__({"turns": _turns, "together": _together}[how], None, OPTIMIZERS[optimizer])
        self.bad = bad

    def factor(self) -> int:
        return 1 + self.global_rank

    def losses_of(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        x, y = batch
        bad = self.bad.get(batch_idx, "") if self.global_rank == BAD_RANK else ""
        outs = {"net": self.net(x), "other": self.other(x)}
        one, other = (InfiniteGradient.apply(out) if name in bad else out for name, out in outs.items())
        return (one.float() - y).pow(2).mean(), (other.float() - y).abs().mean()

    def look(self) -> None:
        self.true.append({name: full(p.grad) for name, p in self.named_parameters() if p.grad is not None})


@dataclass(frozen=True)
class ByHand:
    """Manual optimization under both."""

    how: str
    mode: str
    overflows: dict[int, str]
    wrap: str | None
    optimizer: str

    def run(self) -> dict[str, Any]:
        found = {}
        for name, host in (("ddp", ddp(find_unused_parameters=True)), ("sharded", fsdp2(wrap=self.wrap))):
            module = Players(self.how, self.overflows, self.optimizer)
            found[name] = {**trained(self.mode, host, module, pins=PINS), "true": module.true}
        return found


# ------------------------------------------------------------------ several runs


@dataclass(frozen=True)
class Again:
    """The same module run more than once, evaluated before or after it is trained."""

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
        else:
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


@dataclass(frozen=True)
class TestedAlone:
    """A module that reads shapes is trained, saved, tested; then another with its weights, by the same Trainer."""

    __test__ = False
    folder: Path

    def run(self) -> dict[str, Any]:
        first, other = Shapes(), Shapes()
        runner = fit(first, plugins=[plan_for("32-true")], **fsdp2())
        runner.save_checkpoint(self.folder)
        runner.test(first, batches(), verbose=False)
        runner.test(other, batches(), ckpt_path=self.folder, verbose=False)
        return {"trained": first.validated, "other": other.validated}


@dataclass(frozen=True)
class Restored:
    """What a run left on the module, and what a second plan without pins left of those."""

    def run(self) -> dict[str, Any]:
        module = Ranked()

        def marked(name: str) -> list[str]:
            return [where for where, part in module.named_modules() if name in part.__dict__]

        fit(module, plugins=[plan_for("bf16-mixed", pins=PINS, checkpointing="Linear")], **fsdp2())
        hooks = [name for name, part in module.named_modules() if len(part._forward_pre_hooks) > 1]
        left = {"checkpointed": marked("_lmp_checkpoint"), "hooks": hooks, "pinned": marked("_lmp_pin")}
        fit(module, plugins=[plan_for("bf16-mixed")], **fsdp2())
        return {**left, "still": marked("_lmp_pin"), "forward": "forward" in module.__dict__}


class Averaged(Ranked):
    """Swaps in other weights while it is validated, as a moving average does."""

    def on_validation_start(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.kept, strict=True):
                parameter.copy_(value)


@dataclass(frozen=True)
class ValidatedOnOthers:
    """Validation on other weights in the middle of training."""

    def run(self) -> dict[str, Any]:
        found = {}
        for name, host in (("ddp", ddp()), ("sharded", fsdp2(wrap="LayerNorm"))):
            module, runner = Averaged(), trainer(plugins=[plan_for("bf16-mixed")], val_check_interval=2, **host)
            runner.fit(module, batches(), batches())
            found[name] = {"weights": whole(module), "validated": module.validated, "losses": module.losses}
        return found
