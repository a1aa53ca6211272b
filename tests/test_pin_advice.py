"""Pins by measuring: healthy models need none, what does harm is found, and everything is given back as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from conformance.families import FAMILIES
from lightning_mp import MixedPrecisionPlan, PlanError, suggest_pins
from support.comparing import same
from support.models import Regression, batches

WIDTH = 32


class Mlp(nn.Module):
    """Rows through blocks with norms and dropout; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*block, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.net(x).squeeze(-1), y)


class Big(nn.Module):
    """A head whose numbers leave fp16: 2**16 and more inside, small again outside."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x * 200.0) * 200.0).squeeze(-1) / 1e4


class Heads(nn.Module):
    """A healthy trunk under some overflowing heads."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        names = ("value", "policy")[:heads]
        self.heads = nn.ModuleDict({name: Big() for name in names})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return sum((functional.mse_loss(head(hidden), y) for head in self.heads.values()), torch.zeros(()))


class Router(nn.Module):
    """Weights for four experts, of logits in the hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.softmax(self.gate(x) * 300.0, dim=-1)


class Routed(nn.Module):
    """Experts weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = self.router(x)
        mixed = sum(weights[:, i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))
        return functional.mse_loss(self.head(mixed).squeeze(-1), y)


class Angles(nn.Module):
    """Sines of positions in the thousands, times trained frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(3000, 3000 + x.shape[-1], device=x.device) * 1.0
        return torch.sin(positions * self.frequency)


class Positioned(nn.Module):
    """Rows with a positional table made of large integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = Angles(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.net(x + self.table(x)).squeeze(-1), y)


def _batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [(x, x.sum(1) / math.sqrt(WIDTH)) for x in torch.randn(3, 16, WIDTH, generator=made)]


class OfFamily(LightningModule):
    """One of conformance's families, and its own loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.family, self.model = FAMILIES[name], FAMILIES[name].model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.family.losses[""](self.model, batch)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "vit"])
def test_a_healthy_model_needs_no_pins(name: str, precision: str) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [FAMILIES[name].batch(generator) for _ in range(3)]
    advice = suggest_pins(OfFamily(name), data, MixedPrecisionPlan(precision))
    assert advice.pins == {}
    assert advice.error_before < 0.05
    assert "No pins" in str(advice)


#: the model, the mode, and of which a pin has to be part of what is found
SICK: dict[str, tuple[Callable[[], nn.Module], str, set[str]]] = {
    "an overflowing head": (Heads, "16-mixed", {"Big", "value", "heads.value"}),
    "two overflowing heads": (lambda: Heads(2), "16-mixed", {"Big"}),
    "a router": (Routed, "bf16-mixed", {"router", "gate", "router.gate", "Router"}),
    "a positional table": (Positioned, "bf16-true", {"table", "Angles"}),
}


@pytest.mark.parametrize("name", SICK)
def test_what_does_harm_is_found(name: str) -> None:
    kind, precision, right = SICK[name]
    torch.manual_seed(0)
    advice = suggest_pins(kind(), _batches(), MixedPrecisionPlan(precision))
    assert set(advice.pins) <= right, str(advice)
    assert len(advice.pins) == 1, str(advice)
    assert advice.error_after < advice.error_before / 2
    (row,) = advice.rows
    assert (row.error_before, row.error_after) == (advice.error_before, advice.error_after)
    assert row.modules > 0
    assert row.params > 0
    text = str(advice)
    assert f"pins={advice.pins!r}" in text
    assert "bytes" in text
    assert advice.to_dict()["pins"] == advice.pins


class Steps(Regression):
    """A LightningModule that logs, keeps what it saw, and draws random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.append(float(torch.rand(()) + random.random()))
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss}


def _state(module: nn.Module) -> tuple[Any, ...]:
    return (
        {name: (tensor.dtype, tensor.clone()) for name, tensor in module.state_dict().items()},
        {name: id(parameter) for name, parameter in module.named_parameters()},
        {name: parameter.grad for name, parameter in module.named_parameters()},
        [(type(one), one.training, list(one.__dict__)) for one in module.modules()],
        torch.get_rng_state(),
        random.getstate(),
        torch.get_default_dtype(),
        getattr(module, "losses", None) and list(module.losses),
    )


class Raises(Mlp):
    """Fails in its third forward."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        Raises.calls += 1
        if Raises.calls % 5 == 4:
            raise RuntimeError("of the user's own")
        return super().forward(x, y)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", [Steps, Mlp, Routed, Raises])
def test_everything_is_given_back_untouched(kind: Any, precision: str) -> None:
    module = kind()
    data = list(batches()) if kind is Steps else _batches()
    for parameter in list(module.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    module.net[1].eval() if hasattr(module, "net") else None
    before = _state(module)
    if kind is Raises:
        with pytest.raises(RuntimeError, match="of the user's own"):
            suggest_pins(module, data, MixedPrecisionPlan(precision))
    else:
        suggest_pins(module, data, MixedPrecisionPlan(precision), steps=2)
    assert same(before, _state(module))


@pytest.mark.parametrize("given", [[], iter(()), ()])
def test_no_batches_is_an_error_that_names_them(given: Any) -> None:
    with pytest.raises(PlanError, match="batches"):
        suggest_pins(Mlp(), given, MixedPrecisionPlan("bf16-mixed"))


class NoLoss(LightningModule):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class Manual(NoLoss):
    """Steps its optimizers by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.trainer.optimizers:
            optimizer.step()


class Later(NoLoss):
    """Made when the run begins."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.net = nn.Linear(WIDTH, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NoLoss, "no scalar loss"),
        (Manual, "Manual.training_step, which needs its Trainer"),
        (Later, "Later without parameters"),
    ],
)
def test_a_module_whose_loss_cannot_be_had_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        suggest_pins(kind(), _batches(), MixedPrecisionPlan("bf16-mixed"))


def test_a_batch_that_is_not_finite_in_fp32_is_refused_by_its_number() -> None:
    good, bad = list(_batches())[:2]
    with pytest.raises(PlanError, match="Batch 1, whose gradients are not finite"):
        suggest_pins(Mlp(), [good, (bad[0] * float("nan"), bad[1])], "bf16-mixed")


def test_the_plans_own_pins_stay() -> None:
    torch.manual_seed(0)
    plan = MixedPrecisionPlan("16-mixed", pins={"value": "fp32", "trunk": "bf16"})
    advice = suggest_pins(Heads(2), _batches(), plan)
    assert set(advice.pins) <= {"policy", "heads.policy", "Big"}
    assert "'trunk': 'bf16'" in str(advice)
