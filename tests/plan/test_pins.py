"""Pins in a run: they stay in their dtype, and a product of a pinned weight outside of its forward is refused."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.callbacks import DtypePinning
from lightning_mp.compat.lightning import LightningModule
from support.models import FEATURES, Regression, batches
from support.oracles import plan_for
from support.running import fit, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's tracing asks
FP32 = torch.float32
lenient = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)


def test_a_later_plan_replaces_earlier_pins() -> None:
    module = Regression(lenient)
    fit(module, plugins=[plan_for("bf16-true", pins={"LayerNorm": "fp32"})])
    fit(module, plugins=[plan_for("bf16-true", pins={"net.3": "fp32"})])
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == FP32} == {"net.3.weight", "net.3.bias"}
    fit(module, plugins=[plan_for("32-true")])
    assert {p.dtype for p in module.parameters()} == {FP32}
    assert type(module.net[1]) is nn.LayerNorm


class Encoder(Regression):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 16)), layer, nn.Flatten(), nn.Linear(16, 1))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("pins", [{"norms": "fp32"}, {"linear1": "fp32", "linear2": "fp32"}])
def test_an_encoder_layer_is_evaluated_through_its_pins(pins: dict[str, str]) -> None:
    before, module = torch.backends.mha.get_fastpath_enabled(), Encoder()
    runner = trainer(plugins=[plan_for("bf16-true", pins=pins)], limit_val_batches=1)
    runner.fit(module, batches(), batches())
    runner.validate(module, batches(), verbose=False)
    assert torch.backends.mha.get_fastpath_enabled() is before is True


class Replaces(Regression):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[3] = nn.Linear(*self.net[3].weight.shape[::-1])
            if self.whole:
                self.net = nn.Sequential(*self.net)


@pytest.mark.parametrize("whole", [False, True])
def test_a_pinned_module_that_is_replaced_in_a_run_is_refused(whole: bool) -> None:
    with pytest.raises(PlanError, match=r"'net\.3', pinned to fp32 \('net\.3'\), was replaced in the run"):
        fit(Replaces(whole), plugins=[plan_for("bf16-mixed", pins={"net.3": "fp32"})], max_epochs=2)


class Counts(Regression):
    def __init__(self, norms: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.LayerNorm(FEATURES) for _ in range(norms)), nn.Linear(FEATURES, 1))

    def on_train_batch_start(self, *rest: Any) -> None:
        self.calls = 0
        sys.setprofile(self.count)

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sys.setprofile(None)
        return self.loss(batch)


def test_a_step_looks_no_pinned_module_up() -> None:
    modules = [Counts(norms) for norms in (1, 16)]
    for module in modules:
        fit(module, plugins=[plan_for("bf16-mixed", pins={"norms": "fp32"})], max_steps=3)
    assert modules[0].calls == modules[1].calls > 0


class Reader(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((F.linear(self.inner(batch[0]), self.inner.weight), batch[1]))


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_a_product_outside_of_the_pinned_forward_is_refused_before_a_weight_moves(mode: str) -> None:
    """Each way to read a weight is in tests/modules/test_first_step.py."""
    module = Reader()
    before = module.inner.weight.detach().clone()
    with pytest.raises(PlanError, match=r"inner\.weight is pinned to fp32 \('inner'\)"):
        fit(module, max_steps=2, plugins=[plan_for(mode, pins={"inner": "fp32"})])
    assert torch.equal(module.inner.weight, before)


class Validates(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.linear(batch[0], self.net[0].weight).mean()


def test_the_sanity_check_is_watched_too() -> None:
    runner = trainer(plugins=[plan_for("bf16-mixed", pins={"net.0": "fp32"})], num_sanity_val_steps=1, max_steps=1)
    with pytest.raises(PlanError, match=r"net\.0\.weight is pinned"):
        runner.fit(Validates(), batches(), batches())
    assert runner.global_step == 0


@pytest.mark.parametrize("checkpointing", [None, "net"])
def test_in_fp32_and_for_a_pin_to_what_is_computed_nothing_deviates(checkpointing: Any) -> None:
    for mode, pin in (("32-true", "fp32"), ("bf16-mixed", "bf16")):
        plan = MixedPrecisionPlan(mode, pins={"inner": pin}, checkpointing=checkpointing)
        fit(Reader(), max_steps=1, plugins=[plan])


class Large(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, 1))
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 1e5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]).float() * 1e-5 - batch[1]).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients += [parameter.grad.clone() for parameter in self.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-13)


def _gradients(compiles: bool) -> list[Tensor]:
    torch._dynamo.reset()
    module = Large()
    if compiles:
        module.net.compile(backend="aot_eager")
    fit(module, precision="bf16-mixed", callbacks=[DtypePinning({"Linear": "fp32"})])
    return module.gradients


def test_they_hold_in_compiled_backward_passes_with_stock_plugins_too() -> None:
    """Under plans: tests/conformance/test_compiled_gloo.py."""
    eager, compiled = _gradients(False), _gradients(True)
    assert len(compiled) == 8 * 4
    assert all(map(torch.equal, eager, compiled))
