"""Optimizers that are replaced, or stand elsewhere, on two ranks: fp16 with a loss scale equals fp32 bit for bit."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn.utils import clip_grad_norm_

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError
from support.comparing import of_training, same
from support.models import batches, same_weights
from support.ranks import Ranks
from support.replacing import REPLACED, Replaces
from support.running import fit
from support.sharded import HOSTS, Ranked, whole

pytestmark = pytest.mark.gloo
PINS = {"Linear": "fp32", "LayerNorm": "fp32"}


def fp16() -> MixedPrecisionPlan:
    return MixedPrecisionPlan("16-mixed", pins=PINS, loss_scaling=LossScaling(init_scale=2.0**16))


class ByHand(Ranked):
    """Steps by hand, after a clip over all parameters; no optimizer has the norm, of which gradients are left."""

    def __init__(self, manual: bool = True) -> None:
        super().__init__(optimizer="momentum", even=True)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            clip_grad_norm_(self.parameters(), 0.5)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([*self.net[0].parameters(), *self.net[3].parameters()])


def ended(plan: Any, host: str, module: LightningModule, *callbacks: Any) -> Any:
    fit(module, data=batches(24), plugins=[plan], callbacks=list(callbacks), max_epochs=2, **HOSTS[host]())
    return whole(module)


def replaced(host: str) -> dict[str, bool]:
    """Whether fp16 with a scale ends with the weights of fp32."""
    equal: dict[str, bool] = {}
    for place, how in enumerate(REPLACED):
        manual = place % 2 == ("ddp", "fsdp2").index(host)
        plain = ended(MixedPrecisionPlan("32-true"), host, ByHand(manual), Replaces(how))
        scaled = ended(fp16(), host, ByHand(manual), Replaces(how))
        equal[f"{how}, {'by hand' if manual else 'automatic'}"] = same_weights(plain, scaled)
    return equal


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_replaced_optimizers_equal_fp32_bit_for_bit(ranks: Ranks, host: str) -> None:
    for equal in ranks.call(replaced, host):
        assert [how for how, is_equal in equal.items() if not is_equal] == []


class Elsewhere(Ranked):
    """No optimizer of Lightning's, or a dummy: its own steps once the gradients are there."""

    def __init__(self, returned: Any = None) -> None:
        super().__init__()
        self.returned = returned
        self.losses = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        return self.returned

    def on_after_backward(self) -> None:
        self.own.step()
        self.own.zero_grad()


def elsewhere(host: str) -> tuple[bool, str]:
    plain = ended(MixedPrecisionPlan("32-true"), host, Elsewhere())
    equal = same_weights(plain, ended(fp16(), host, Elsewhere()))
    # of one parameter of the module's, which keeps a gradient: what steps elsewhere is met in its own step
    beside = Elsewhere()
    beside.returned = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    try:
        ended(fp16(), host, beside)
    except PlanError as error:
        return equal, str(error)
    return equal, "it ran"


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_no_scaled_gradient_reaches_an_optimizer_elsewhere(ranks: Ranks, host: str) -> None:
    for equal, said in ranks.call(elsewhere, host):
        assert equal
        assert "SGD with no parameter of the module, with precision='16-mixed'" in said


class HeadBeside(Elsewhere):
    """Lightning has the optimizer of the first layer."""

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(self.net[3].parameters(), lr=1e-2)
        return torch.optim.SGD(self.net[0].parameters(), lr=1e-2)


def beside(host: str) -> str:
    try:
        ended(fp16(), host, HeadBeside())
    except PlanError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_an_optimizer_beside_lightnings_is_refused_on_every_rank(ranks: Ranks, host: str) -> None:
    for said in ranks.call(beside, host):
        assert "SGD.step() of an optimizer that configure_optimizers() did not return" in said


def under_zero(how: str) -> str:
    try:
        ended(MixedPrecisionPlan("32-true"), "zero2", Ranked(), Replaces(how))
    except RuntimeError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("how", ["set up each epoch", "an average around each", "cleared and set up"])
def test_replaced_optimizers_are_refused_under_zero(ranks: Ranks, how: str) -> None:
    for said in ranks.call(under_zero, how):
        assert "in a run with ZeRO, whose own optimizer steps" in said


class TrainsALayerLater(Ranked):
    """From the fourth batch on the first layer trains too: its group is added then, or its rate was zero before."""

    def __init__(self, adds: bool) -> None:
        super().__init__(even=True)
        self.adds = adds

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net[1:].parameters())}, {"params": list(self.net[0].parameters()), "lr": 0.0}]
        return torch.optim.SGD(groups[:1] if self.adds else groups, lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            optimizer = self.optimizers()
            if self.adds:
                optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-2})
            else:
                optimizer.param_groups[1]["lr"] = 1e-2


def with_a_group_later(host: str, adds: bool) -> Any:
    try:
        return ended(MixedPrecisionPlan("32-true"), host, TrainsALayerLater(adds))
    except RuntimeError as error:
        return str(error)


def test_a_group_added_under_zero_is_refused_and_a_rate_of_zero_until_then_is_the_same(ranks: Ranks) -> None:
    added = ranks.call(with_a_group_later, "ddp", True)
    waiting = ranks.call(with_a_group_later, "zero2", False)
    refused = ranks.call(with_a_group_later, "zero2", True)
    for weights, others, said in zip(added, waiting, refused, strict=True):
        assert not isinstance(weights, str), weights
        assert same(weights, others, of_training("32-true", 1e-2))
        assert "optimizer.add_param_group() in a run with ZeRO, which partitions" in said
