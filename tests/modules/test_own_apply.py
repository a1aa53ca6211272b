"""Modules with an ``_apply`` of their own are cast by it, as ``module.to(dtype)`` of stock Lightning casts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_mp.modules.patterns import original_class
from support.models import FEATURES, HIDDEN
from support.oracles import plan_for, stock_for
from support.own_apply import CASES, FREQUENCIES, CastsAChildsAttributes, CastsAnAttribute
from support.running import fit

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
every_case = pytest.mark.parametrize("case", CASES)


class Fitted(LightningModule):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), inner, nn.Linear(FEATURES, HIDDEN))
        self.metric = MeanSquaredError()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _seeded(case: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return CASES[case]()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@every_case
def test_a_true_mode_casts_as_stock_does(case: str) -> None:
    ours, theirs = Fitted(_seeded(case)), Fitted(_seeded(case))
    identities = {name: id(tensor) for name, tensor in ours.named_parameters()}
    fit(ours, plugins=[plan_for("bf16-true")])
    fit(theirs, **stock_for("bf16-true"))
    assert ours.losses == theirs.losses
    expected = _tensors(theirs)
    for name, tensor in _tensors(ours).items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    assert {name: id(tensor) for name, tensor in ours.named_parameters()} == identities


@every_case
def test_a_half_model_becomes_fp32_where_weights_are_stored_in_it(case: str) -> None:
    module = Fitted(_seeded(case)).to(FP16)
    fit(module, plugins=[plan_for("bf16-mixed")])
    assert {parameter.dtype for parameter in module.parameters()} == {FP32}
    fit(module, plugins=[plan_for("32-true")])
    assert len(module.losses) == 16


@every_case
def test_nothing_is_asked_of_it_where_nothing_is_cast(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Fitted(_seeded(case))
    calls = list[str]()
    own = type(module.net[1])._apply
    monkeypatch.setattr(type(module.net[1]), "_apply", lambda self, fn, *rest: calls.append(str(fn)) or own(self, fn))
    plan_for("16-mixed").apply(module)
    assert calls == []


@every_case
def test_a_pin_keeps_all_of_it_in_its_dtype_wherever_the_model_goes(case: str) -> None:
    module = Fitted(_seeded(case))
    fit(module, plugins=[plan_for("bf16-true", pins={"net.1": "fp32"})])
    module.to("cpu").to(FP16)
    pinned = [*module.net[1].parameters(), *module.net[1].buffers()]
    assert {tensor.dtype for tensor in pinned} <= {FP32}
    assert {parameter.dtype for parameter in module.net[0].parameters()} == {FP16}
    for part in module.net[1].modules():
        own = [*vars(part).values(), *vars(part).get("_memories", {}).values(), *vars(part).get("grids", [])]
        assert {value.dtype for value in own if isinstance(value, Tensor)} <= {FP32}, original_class(part)


def test_a_pin_inside_of_one_that_casts_its_children_keeps_its_own_dtype() -> None:
    module = Fitted(CastsAChildsAttributes())
    plan_for("bf16-true", pins={"net.1.layers.1": "fp32"}).apply(module)
    assert module.net[1].layers[1].table.dtype == FP32
    assert torch.equal(module.net[1].layers[1].table, FREQUENCIES.cos().repeat(FEATURES, 1))
    assert module.net[1].layers[0].weight.dtype == BF16


@pytest.mark.parametrize("pins", [None, {"metric": "bf16"}])
def test_a_metric_keeps_its_states_in_fp32_as_torchmetrics_does_for_a_cast(pins: dict[str, str] | None) -> None:
    module = Fitted(CastsAnAttribute())
    fit(module, plugins=[plan_for("bf16-true", pins=pins)])
    assert module.metric.sum_squared_error.dtype == FP32


class Tied(nn.Module):
    """The root of a model with an ``_apply``, ties of every kind, and a part that is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.packed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.two.weight = self.one.weight
        self.register_buffer("shared", torch.ones(3))
        self.one.register_buffer("shared", self.shared)
        self.packed.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))
        self.packed.register_buffer("scales", torch.ones(4))
        self.one.weight.grad = torch.ones(4, 4)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        return super()._apply(fn)


@pytest.mark.parametrize("overwrite", [False, True])
def test_ties_identities_and_quantized_weights_stay(overwrite: bool) -> None:
    module = Tied()
    before = {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        plan_for("bf16-true").convert_module(nn.Sequential(module))
        assert torch.__future__.get_overwrite_module_params_on_conversion() is overwrite
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())} == before
    assert module.two.weight is module.one.weight
    assert module.one.shared is module.shared
    assert (module.one.weight.dtype, module.shared.dtype, module.packed.scales.dtype) == (BF16, BF16, FP32)
    assert module.one.weight.grad is None
