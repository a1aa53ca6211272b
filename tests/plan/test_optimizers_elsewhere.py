"""Optimizers that ``configure_optimizers`` does not return: no gradient of a scaled loss reaches them unsaid."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError
from support.manual import Pair
from support.models import Regression, batches, same_weights, weights
from support.running import fit, trainer
from support.traces import same_runs, traced

PINS = {"Linear": "fp32", "LayerNorm": "fp32"}
NONE = "ignore:.*configure_optimizers.* returned no optimizer|.*configure_optimizers.* returned `None`"
#: the first where the gradients are still there at the end of the pass
REFUSED = "|".join([
    r"with no parameter of the module, with precision='16-mixed'",
    r"SGD\.step\(\) of an optimizer that configure_optimizers\(\) did not return, with precision='16-mixed'",
])  # fmt: skip


def fp16() -> MixedPrecisionPlan:
    return MixedPrecisionPlan("16-mixed", pins=PINS, loss_scaling=LossScaling(init_scale=2.0**16))


class Dummy(torch.optim.Optimizer):
    """For a Trainer that wants an optimizer, over a parameter of its own, as transformers' layer-wise GaLore has it."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": 1e-2})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure() if closure is not None else None


class GradientRelease(torch.optim.Optimizer):
    """Steps each parameter's own optimizer in backward, and shows their groups as its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure() if closure is not None else None


class Elsewhere(Regression):
    """``returns`` is made of the optimizers that step elsewhere, and handed to Lightning."""

    def __init__(self, returns: Callable[[list[Any]], Any] = lambda _: None) -> None:
        super().__init__()
        self.returns = returns

    def step_all(self) -> None:
        for optimizer in self.own:
            optimizer.step()
            optimizer.zero_grad()

    def make_own(self) -> list[Any]:
        return [SGD(self.parameters(), lr=1e-2, momentum=0.9)]

    def configure_optimizers(self) -> Any:
        self.own = self.make_own()
        return self.returns(self.own)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


class AfterBackward(Elsewhere):
    def on_after_backward(self) -> None:
        self.step_all()


class AfterBatch(Elsewhere):
    def on_train_batch_end(self, *_: Any) -> None:
        self.step_all()


class InBackward(Elsewhere):
    """An optimizer a parameter, stepped as soon as its gradient is there."""

    def make_own(self) -> list[Any]:
        optimizers = {parameter: SGD([parameter], lr=1e-2, momentum=0.9) for parameter in self.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        return [*optimizers.values()]


class ByHand(Elsewhere):
    """Manual optimization with no optimizer of Lightning's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.step_all()


class WithoutOptimizer(Elsewhere):
    """Descends by hand: no hook of torch's can see it."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(1e-2 * parameter.grad)
                parameter.grad = None


WAYS = [AfterBackward, AfterBatch, InBackward, ByHand, WithoutOptimizer]
ALL = pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)


@pytest.mark.filterwarnings(NONE)
@ALL
def test_without_an_optimizer_losses_are_not_scaled(kind: Any) -> None:
    stock, ours = (traced(kind(), **host) for host in ({"precision": "32-true"}, {"plugins": [fp16()]}))
    assert same_runs(stock, ours)
    assert not same_weights(ours.start, ours.weights[-1])


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.* returned `None`")
def test_that_losses_are_not_scaled_is_said_once() -> None:
    with pytest.warns(UserWarning, match="losses are not scaled under precision='16-mixed'") as said:
        fit(AfterBackward(), plugins=[fp16()])
    assert len([each for each in said if "are not scaled" in str(each.message)]) == 1


@pytest.mark.parametrize("returns", [lambda _: Dummy(), GradientRelease], ids=["a dummy", "gradient release"])
@pytest.mark.parametrize("kind", [AfterBackward, AfterBatch, InBackward, ByHand], ids=lambda kind: kind.__name__)
def test_scaled_gradients_beside_another_optimizer_are_refused(kind: Any, returns: Any) -> None:
    module = kind(returns)
    before = weights(module)
    with pytest.raises(PlanError, match=REFUSED):
        fit(module, plugins=[fp16()])
    assert same_weights(weights(module), before)
    assert not _global_optimizer_pre_hooks


def test_a_dummy_optimizer_beside_a_module_that_descends_by_hand_is_refused() -> None:
    module = WithoutOptimizer(lambda _: Dummy())
    before = weights(module)
    with pytest.raises(PlanError, match="returned Dummy with no parameter of the module, with precision='16-mixed'"):
        fit(module, plugins=[fp16()])
    assert same_weights(weights(module), before)


def test_an_optimizer_of_parameters_outside_of_the_module_is_scaled_and_stepped() -> None:
    """A net in a plain list, which torch does not register."""

    class Hidden(Regression):
        def __init__(self) -> None:
            super().__init__(partial(SGD, lr=1e-2))
            self.hidden = [self._modules.pop("net")]

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return (self.hidden[0](x).float() - y).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return self.make_optimizer(self.hidden[0].parameters())

    hidden, plan = Hidden(), MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=64.0))
    before = weights(hidden.hidden[0])
    fit(hidden, plugins=[plan])
    assert plan.applied_steps == 8
    assert not same_weights(weights(hidden.hidden[0]), before)


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [AfterBackward, AfterBatch, InBackward, ByHand], ids=lambda kind: kind.__name__)
def test_without_a_loss_scale_optimizers_elsewhere_step_as_under_stock(kind: Any, mode: str) -> None:
    hosts = {"precision": mode}, {"plugins": [MixedPrecisionPlan(mode)]}
    assert same_runs(*(traced(kind(lambda _: Dummy()), **host) for host in hosts))


class Gan(Pair):
    """The optimizer of ``other`` stands elsewhere; ``step`` makes its step."""

    def __init__(self, step: Callable[[Any, Any, Any], None]) -> None:
        super().__init__(lambda *_: None, optimizer=partial(SGD, lr=1e-2))
        self.step_other = step

    def configure_optimizers(self) -> Any:
        self.aside = self.make_optimizer(self.other.parameters())
        return self.make_optimizer(self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.losses_of(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(first)
        optimizer.step()
        self.aside.zero_grad()
        self.step_other(self, self.aside, second)
        self.losses.append(first.item() + second.item())


def _plainly(module: Any, optimizer: Any, loss: Tensor) -> None:
    module.manual_backward(loss)
    optimizer.step()


def _by_the_plans_scaler(module: Any, optimizer: Any, loss: Tensor) -> None:
    scaler = module.user_scaler
    module.manual_backward(loss)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _on_a_loss_of_its_own(module: Any, optimizer: Any, loss: Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    optimizer.step()


def test_an_optimizer_beside_those_of_lightning_is_refused_where_it_steps_on_a_scaled_loss() -> None:
    with pytest.raises(PlanError, match=REFUSED):
        fit(Gan(_plainly), plugins=[fp16()])


@pytest.mark.parametrize("way", [_by_the_plans_scaler, _on_a_loss_of_its_own], ids=["scaler.step", "loss.backward"])
def test_an_optimizer_beside_those_of_lightning_steps_on_true_gradients(way: Any) -> None:
    stock, ours = (traced(Gan(way), **host) for host in ({"precision": "32-true"}, {"plugins": [fp16()]}))
    assert same_runs(stock, ours)


def test_a_module_that_adapts_itself_in_test_step_does_so_after_a_fit_too() -> None:
    class Adapts(Pair):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            own = SGD(self.parameters(), lr=1e-2)
            with torch.enable_grad():
                self.manual_backward(self.loss(batch))
            own.step()
            own.zero_grad()

    def way(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()[0]
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    runs: list[Any] = []
    for host in ({"precision": "32-true"}, {"plugins": [fp16()]}):
        module, runner = Adapts(way), trainer(inference_mode=False, **host)
        runner.fit(module, batches())
        runner.test(module, batches(), verbose=False)
        runs.append(weights(module))
    assert same_weights(*runs)


def test_a_fit_inside_of_a_fit_steps_its_own_optimizer() -> None:
    class Outer(Regression):
        def on_train_epoch_end(self) -> None:
            self.inner = Regression(partial(SGD, lr=1e-2))
            fit(self.inner, plugins=[fp16()])

    outer, alone = Outer(), Regression(partial(SGD, lr=1e-2))
    fit(outer, plugins=[fp16()])
    fit(alone, precision="32-true")
    assert same_weights(weights(outer.inner), weights(alone))


class Grows(Regression):
    """The first layer is trained from the fourth batch on, as finetuning callbacks do it."""

    manual = False

    def __init__(self) -> None:
        super().__init__(lambda _: SGD(self.net[3].parameters(), lr=1e-2))
        self.automatic_optimization = not self.manual

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.optimizers[0].add_param_group({"params": self.net[0].parameters(), "lr": 1e-2})


class GrowsByHand(Grows):
    manual = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.mark.parametrize("make", [Grows, GrowsByHand])
def test_gradients_of_a_group_that_is_added_in_the_run_are_divided_by_the_scale_once(make: type[Grows]) -> None:
    scaled, plain = make(), make()
    before = weights(scaled)["net.0.weight"]
    fit(scaled, plugins=[fp16()])
    fit(plain, plugins=[MixedPrecisionPlan("32-true", pins=PINS)])
    assert (weights(scaled)["net.0.weight"] - before).abs().max() > 1e-3
    # pinned to fp32, and the scale is a power of two
    assert same_weights(weights(scaled), weights(plain))
