"""Ways in which users write a LightningModule and run it, each under DDP and under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.fsdp2 import BAD_RANK, OPTIMIZERS, PINS, Ranked, both, ddp, fsdp2, full, trained, whole
from support.manual import Pair
from support.models import InfiniteGradient, batches
from support.oracles import plan_for
from support.running import fit, trainer


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


WAYS = {kind.__name__: kind for kind in (Direct, Parts, Returns, Frozen, Attends)}


def way(name: str, mode: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One of them."""
    return both(WAYS[name], mode, strategy, **options)


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


def by_hand(how: str, mode: str, bad: dict[int, str], wrap: Any, optimizer: str) -> dict[str, Any]:
    """Manual optimization under both."""
    found = {}
    for name, host in (("ddp", ddp()), ("fsdp2", fsdp2(wrap=wrap))):
        module = Players(how, bad, optimizer)
        found[name] = {**trained(mode, host, module, pins=PINS), "true": module.true}
    return found


# ------------------------------------------------------------------ several runs


def again(how: str) -> dict[str, Any]:
    """The same module run more than once, evaluated before or after it is trained."""
    found = {}
    for name, host in (("ddp", ddp), ("fsdp2", fsdp2)):
        module, plan = Ranked((1,)), plan_for("16-mixed", pins=PINS)
        runner = trainer(plugins=[plan], **host())
        if how == "validate":
            runner.validate(module, batches(), verbose=False)
        elif how == "predict":
            runner.predict(module, batches())
        elif how == "failed":
            module.training_step, step = _fails, module.training_step
            try:
                runner.fit(module, batches())
            except KeyError:
                module.training_step = step
            runner = trainer(plugins=[plan_for("16-mixed", pins=PINS)], **host())
        else:
            runner.fit(module, batches(), batches())
        if how == "new plan":
            runner = trainer(plugins=[plan_for("bf16-mixed", pins=PINS)], **host())
        elif how == "same trainer":
            runner.fit_loop.max_epochs = 2
        runner.fit(module, batches(), batches())
        runner.validate(module, batches(), verbose=False)
        runner.test(module, batches(), verbose=False)
        predicted = torch.cat([full(part) for part in runner.predict(module, batches())])
        found[name] = {
            "weights": whole(module),
            "losses": module.losses,
            "validated": module.validated,
            "predicted": predicted,
        }
    return found


def _fails(batch: Any, batch_idx: int) -> Any:
    raise KeyError("planned")


def restored() -> dict[str, Any]:
    """What a run left on the module, and what a second plan without pins left of those."""
    module = Ranked()
    fit(module, plugins=[plan_for("bf16-mixed", pins=PINS, checkpointing="Linear")], **fsdp2())
    left = [name for name, part in module.named_modules() if "_lmp_checkpoint" in part.__dict__]
    hooks = [name for name, part in module.named_modules() if len(part._forward_pre_hooks) > 1]
    pinned = [name for name, part in module.named_modules() if "_lmp_pin" in part.__dict__]
    fit(module, plugins=[plan_for("bf16-mixed")], **fsdp2())
    still = [name for name, part in module.named_modules() if "_lmp_pin" in part.__dict__]
    forward = "forward" in module.__dict__
    return {"checkpointed": left, "hooks": hooks, "pinned": pinned, "still": still, "forward": forward}


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


def averaged() -> dict[str, Any]:
    """Validation on other weights in the middle of training."""
    found = {}
    for name, host in (("ddp", ddp()), ("fsdp2", fsdp2(wrap="LayerNorm"))):
        module, runner = Averaged(), trainer(plugins=[plan_for("bf16-mixed")], val_check_interval=2, **host)
        runner.fit(module, batches(), batches())
        found[name] = {"weights": whole(module), "validated": module.validated, "losses": module.losses}
    return found
