"""Pins by measuring: healthy models need none, what does harm is found, and everything is given back as it was."""

import math
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from conformance.families import FAMILIES
from lightning_mp import FP8, MixedPrecisionPlan, Pin, PlanError, suggest_pins
from support.comparing import same, state_of
from support.models import Regression, batches

WIDTH = 32


class Mlp(nn.Module):
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


def _batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [(x, x.sum(1) / math.sqrt(WIDTH)) for x in torch.randn(3, 16, WIDTH, generator=made)]


class OfFamily(LightningModule):
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


class Written(nn.Module):
    """A norm of plain operators: the derivative of its root is the third power of what it divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Normed(LightningModule):
    """Small numbers through that norm: the output is of size 1, and 316 ** 3 is no number of fp16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), Written(), nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.head(self.norm(self.first(batch[0]) * 1e-3)).squeeze(-1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Loud(Mlp):
    """A loss of size 1e8, whose gradients fp16 does not have, in whatever module."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).float() * 1e8


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_an_overflow_in_backward_alone_is_a_pin_of_the_module_that_it_is_in(precision: str) -> None:
    advice = suggest_pins(Normed(), _batches(), precision)
    assert (advice.pins, advice.scale) == ({"norm": "fp32"}, None), str(advice)
    assert advice.error_before > 0.5  # two of three gradients are infinite
    assert advice.error_after < 0.02


def test_where_no_pin_helps_it_is_the_scale_that_would_do() -> None:
    plan = MixedPrecisionPlan("16-mixed")
    advice = suggest_pins(Loud(), _batches(), plan)
    assert advice.pins == {}
    assert advice.scale is not None
    assert advice.scale < 1
    text = str(advice)
    assert "overflows from a finite loss" in text
    assert f"write loss_scaling=LossScaling(init_scale={advice.scale!r}, min_scale=0.0)" in text
    assert advice.to_dict() == {"pins": {}, "rows": [], "scale": advice.scale}
    rule = advice.suggested().loss_scaling
    again = suggest_pins(Loud(), _batches(), MixedPrecisionPlan("16-mixed", loss_scaling=rule))
    assert (again.pins, again.scale) == ({}, None)
    assert again.error_before < advice.error_before / 2


class Sunk(nn.Module):
    """Blocks, and a layer before a norm: its first row may be far larger than the rest, or its last column."""

    def __init__(self, row: float = 1.0, column: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mix, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.ones(64, 1), persistent=False)
        self.register_buffer("columns", torch.ones(WIDTH), persistent=False)
        self.rows[0], self.columns[-1] = row, column
        if column != 1.0:
            nn.init.zeros_(self.mix.weight[:, -1:].detach())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.into(x)
        hidden = (hidden + self.blocks(hidden)) * self.rows * self.columns
        return functional.mse_loss(self.head(self.after(self.mix(hidden))), y)


def _tokens() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [(x, x.flip(1)) for x in torch.randn(3, 64, WIDTH, generator=made)]


def _fp8(recipe: Any, **options: Any) -> MixedPrecisionPlan:
    pytest.importorskip("torchao")
    return MixedPrecisionPlan("fp8-mixed", fp8=FP8(recipe=recipe, small="convert", **options))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_a_healthy_model_needs_no_layer_left_out_of_fp8(recipe: str) -> None:
    advice = suggest_pins(Sunk(), _tokens(), _fp8(recipe))
    assert (advice.pins, advice.fp8_skip) == ({}, ())
    assert "No layer to leave out of FP8" in str(advice)
    assert advice.to_dict()["fp8_skip"] == []


FLUSHED = {
    "a row, one scale a tensor": ({"row": 1e5}, "tensorwise"),
    "a column, one scale a row": ({"column": 1e7}, "rowwise"),
    "a column, one scale a block": ({"column": 1e7}, "mxfp8"),
}


@pytest.mark.parametrize("case", FLUSHED)
def test_a_layer_whose_numbers_fp8_flushes_to_zero_is_named_with_its_gain(case: str) -> None:
    sizes, recipe = FLUSHED[case]
    module = Sunk(**sizes)
    before = state_of(module)
    advice = suggest_pins(module, _tokens(), _fp8(recipe, skip="head"))
    assert same(before, state_of(module))
    assert (advice.pins, advice.fp8_skip) == ({}, ("mix",)), str(advice)
    (row,) = advice.fp8_rows
    assert (row.dtype, row.modules, row.params) == ("bf16", 1, WIDTH * (WIDTH + 1))
    assert row.error_after < row.error_before / 2
    assert advice.fp8_errors == (row.error_before, row.error_after)
    assert "Write FP8(skip=['head', 'mix'])." in str(advice)
    assert advice.suggested().fp8 == FP8(recipe=recipe, small="convert", skip=("head", "mix"))  # type: ignore[arg-type]


def test_what_is_suggested_is_confirmed_by_paired_runs_when_asked() -> None:
    module = Normed()
    before = state_of(module)
    advice = suggest_pins(module, _batches(), "16-mixed", confirm=True)
    assert same(before, state_of(module))
    assert advice.confirmed, str(advice)
    assert advice.comparison is not None
    assert [plan.policy.pins for plan in advice.comparison.plans] == [(Pin("norm", "fp32"),), ()]
    trained, skipped = ([run.final_loss for run in plan.runs] for plan in advice.comparison.plans)
    assert all(loss is not None and math.isfinite(loss) for loss in trained)
    assert all(map(math.isnan, cast("Any", skipped)))  # of every step
    assert "Confirmed by 4 pairs of runs of 40 steps" in str(advice)
    assert advice.to_dict()["confirmed"] is True


class Steps(Regression):
    """A LightningModule that logs, keeps what it saw, and draws random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.append(float(torch.rand(()) + random.random()))
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss}


class Raises(Mlp):
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
    before = state_of(module)
    if kind is Raises:
        with pytest.raises(RuntimeError, match="of the user's own"):
            suggest_pins(module, data, MixedPrecisionPlan(precision))
    else:
        suggest_pins(module, data, MixedPrecisionPlan(precision), steps=2)
    assert same(before, state_of(module))


class NoLoss(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class Later(NoLoss):
    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.net = nn.Linear(WIDTH, 1)


def _second_not_finite() -> list[tuple[Tensor, Tensor]]:
    good, (x, y), _ = _batches()
    return [good, (x * math.nan, y)]


#: the module, the batches, options, and what the error says
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any], str]] = {
    "no batch": (Mlp, list, {}, r"batches=\[\] hold none"),
    "an iterator at its end": (Mlp, lambda: iter(()), {}, "batches=.* hold none"),
    "no loss": (NoLoss, _batches, {}, "no scalar loss"),
    "made later": (Later, _batches, {}, "Later without parameters"),
    "not finite in fp32": (Mlp, _second_not_finite, {}, "Batch 1, whose gradients are not finite"),
    "no optimizer": (Mlp, _batches, {"confirm": True}, "confirm=True with a Mlp"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_measured_is_refused(what: str) -> None:
    kind, data, options, said = REFUSED[what]
    with pytest.raises(PlanError, match=said):
        suggest_pins(kind(), data(), "bf16-mixed", **options)


def test_the_plans_own_pins_stay() -> None:
    torch.manual_seed(0)
    plan = MixedPrecisionPlan("16-mixed", pins={"value": "fp32", "trunk": "bf16"})
    advice = suggest_pins(Heads(2), _batches(), plan)
    assert set(advice.pins) <= {"policy", "heads.policy", "Big"}
    assert "'trunk': 'bf16'" in str(advice)
