"""Optimizers that evaluate their closure again within a step: they run as under stock Lightning, unchecked."""

from collections import OrderedDict
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_ as shorten
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from transformers.optimization import Adafactor as TransformersAdafactor

from conformance.optimizers import Lamb, Lion, Sam
from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError
from lightning_mp.errors import Faults
from lightning_mp.plan.optimizer_facts import check_shards, clips_by_norm, evaluates_again
from support.models import Regression, batches, same_weights, weights
from support.optimizers import Around, Delegating
from support.running import fit
from support.traces import lightning_says, same_runs, traced


class Extrapolates(SGD):
    """Takes the gradient ahead of the weights, as schedule-free's closure form does, unseen by autograd."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        moves = []
        for parameter in (one for group in self.param_groups for one in group["params"]):
            ahead = self.state[parameter].get("momentum_buffer", torch.zeros_like(parameter)) * 0.05
            parameter.data.add_(ahead)
            moves.append((parameter, ahead))
        loss = closure()
        for parameter, ahead in moves:
            parameter.data.sub_(ahead)
        super().step()
        return loss


OPTIMIZERS: dict[str, Any] = {
    "ahead": partial(Extrapolates, lr=1e-2, momentum=0.9),
    "LBFGS": partial(LBFGS, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_forward_sees_the_weights_it_sees_under_stock(name: str, mode: str) -> None:
    plan, window = MixedPrecisionPlan(mode), 2 if name == "ahead" else 1
    hosts = {"precision": mode}, {"plugins": [plan]}
    stock, ours = (traced(Regression(OPTIMIZERS[name]), accumulate_grad_batches=window, **host) for host in hosts)
    assert same_runs(stock, ours)
    assert (plan.applied_steps, plan.skipped_steps, plan.step_skipped) == (ours.global_steps[-1], 0, False)


# ------------------------------------------------------------------ closures that are optional by their signature


class Polyak(optim.Optimizer):
    """Its rate is the loss over the squared norm of the gradient, as of AliG and SPS."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("Polyak needs a closure")
        with torch.enable_grad():
            loss = closure()
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        rate = 0.1 * float(loss) / (sum(float(one.grad.pow(2).sum()) for one in held) + 1e-6)
        for one in held:
            one.sub_(rate * one.grad)
        return loss


class Sharp(optim.SGD):
    """SAM under a name of its own, which evaluates where it is and where it climbed to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        loss = torch.enable_grad()(closure)()
        self.climb_and_descend(closure)
        return loss

    def climb_and_descend(self, closure: Any) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        climbed = [0.05 * one.grad for one in held]
        self.move(held, climbed)
        self.zero_grad()
        torch.enable_grad()(closure)()
        self.move(held, [-one for one in climbed])
        super().step()

    def move(self, held: Any, by: Any) -> None:
        for one, far in zip(held, by, strict=True):
            one.add_(far)


class SharpByData(Sharp):
    """Past the count of versions, and without dropping a gradient."""

    def move(self, held: Any, by: Any) -> None:
        for one, far in zip(held, by, strict=True):
            one.data = one.data + far

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.param_groups[0]["params"][0].grad is None or torch.is_grad_enabled():
            super().zero_grad(set_to_none)


class SharpFromGradients(Sharp):
    """As published first: it climbs by the gradients that are there, then evaluates once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        self.climb_and_descend(closure)


class Ahead(Extrapolates):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Answers:
    """Without a step of its own: it answers by ``__getattr__``."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Lookahead(optim.Optimizer):
    """As timm's: made without ``Optimizer.__init__``, with hooks of its own."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        for slow, one in zip(self.slow, (one for group in self.param_groups for one in group["params"]), strict=True):
            slow.add_(one - slow, alpha=0.5)
            one.copy_(slow)
        return loss


class ClosureOnly(optim.SGD):
    """Hands on whatever it is given."""

    def step(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        return super().step(*arguments, **options)


class Flat(optim.SGD):
    """SAM as published, under a name of its own: in its first step stock Lightning has no gradients for it."""

    def first_step(self) -> None:
        self.climbed = [(one, 0.05 * one.grad) for one in self.param_groups[0]["params"] if one.grad is not None]
        for one, far in self.climbed:
            one.add_(far)
        self.zero_grad()

    def second_step(self) -> None:
        for one, far in self.climbed:
            one.sub_(far)
        super().step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        self.first_step()
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


class In(Delegating):
    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner)
        self.optimizers = [inner]
        self.__dict__["inner"] = Delegating(inner)


#: how it is made, and whether it steps once a pass
OPTIONAL: dict[str, tuple[Any, bool]] = {
    "Polyak": (Polyak, True),
    "Polyak in a wrapper": (lambda parameters: Delegating(Polyak(parameters)), True),
    "Polyak that answers": (lambda parameters: Answers(Polyak(parameters)), True),
    "SGD that answers": (lambda parameters: Answers(SGD(parameters, lr=1e-2, momentum=0.9)), True),
    "Lookahead": (lambda parameters: Lookahead(optim.AdamW(parameters, lr=1e-2)), True),
    "whatever": (partial(ClosureOnly, lr=1e-2), True),
    "SAM by another name": (partial(Sharp, lr=1e-2), False),
    "SAM by its two steps": (partial(Flat, lr=1e-2), False),
    "SAM by .data": (partial(SharpByData, lr=1e-2), False),
    "LBFGS in a wrapper": (lambda parameters: Delegating(LBFGS(parameters, lr=0.1, max_iter=3)), False),
    "LBFGS that answers": (lambda parameters: Answers(LBFGS(parameters, lr=0.1, max_iter=3)), False),
    "LBFGS in a list": (lambda parameters: In(LBFGS(parameters, lr=0.1, max_iter=3)), False),
}


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_closure_gives_what_it_gives_under_stock(name: str, mode: str) -> None:
    build, _ = OPTIONAL[name]
    hosts = {"precision": mode}, {"plugins": [MixedPrecisionPlan(mode)]}
    stock, ours = (traced(Regression(build), gradient_clip_val=0.5, **host) for host in hosts)
    assert same_runs(stock, ours)
    assert not same_weights(ours.start, ours.weights[-1])


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize("name", [name for name, (_, once) in OPTIONAL.items() if once])
def test_an_optional_closure_gives_the_true_loss_under_a_loss_scale(name: str, nonfinite: Any) -> None:
    """With every module pinned to fp32 the run is that of stock Lightning in fp32."""
    build, _ = OPTIONAL[name]
    plan = MixedPrecisionPlan("16-mixed", pins={"net": "fp32"}, nonfinite=nonfinite)
    stock, ours = (traced(Regression(build), **host) for host in ({"precision": "32-true"}, {"plugins": [plan]}))
    assert same_runs(stock, ours)


@pytest.mark.parametrize("name", [name for name, (_, once) in OPTIONAL.items() if not once])
def test_a_second_pass_within_a_step_is_refused_under_a_loss_scale(name: str) -> None:
    build, _ = OPTIONAL[name]
    with pytest.raises(PlanError, match="which evaluates its closure again, with precision='16-mixed'"):
        fit(Regression(build), plugins=[MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=64.0))])


def test_an_optimizer_that_climbs_by_the_gradients_at_hand_gets_those_of_the_batch() -> None:
    """Stock Lightning has none for it in the first step: a plain loop is what it is written for."""
    module, plain = Regression(partial(SharpFromGradients, lr=1e-2)), Regression()
    fit(module, plugins=[MixedPrecisionPlan("32-true")])
    optimizer = SharpFromGradients(plain.parameters(), lr=1e-2)
    for batch in batches():

        def run(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = plain.loss(batch)
            loss.backward()
            return loss

        run()
        optimizer.step(run)
    assert same_weights(weights(module), weights(plain))


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
def test_an_optimizer_that_moves_before_its_closure_steps_as_under_stock(mode: str) -> None:
    """One pass more, in the first step in which it moved."""
    hosts = {"precision": mode}, {"plugins": [MixedPrecisionPlan(mode)]}
    stock, ours = (traced(Regression(partial(Ahead, lr=1e-2, momentum=0.9)), **host) for host in hosts)
    assert all(map(same_weights, stock.weights, ours.weights))
    assert len(stock.weights) == len(ours.weights) == 8
    assert len(ours.module.losses) == 9


def test_an_optimizer_that_moves_before_its_closure_is_refused_under_a_loss_scale() -> None:
    with pytest.raises(PlanError, match="Ahead, which evaluates its closure again, with precision='16-mixed'"):
        fit(Regression(partial(Ahead, lr=1e-2, momentum=0.9)), plugins=[MixedPrecisionPlan("16-mixed")])


def test_gradients_of_a_second_pass_are_said_once_to_be_unchecked() -> None:
    with lightning_says() as lines:
        fit(Regression(partial(Sharp, lr=1e-2)), plugins=[MixedPrecisionPlan("bf16-mixed")])
    assert lines.count("Sharp evaluates its closure again within a step: its gradients are not checked") == 1


def test_a_bad_step_of_an_optimizer_with_an_optional_closure_is_skipped() -> None:
    plan = MixedPrecisionPlan("32-true")
    trace = traced(Regression(Polyak, overflow_at=(3,)), plugins=[plan])
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    assert same_weights(trace.weights[2], trace.weights[3])


class Stepped(optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Prodigy(optim.SGD):
    """By its name, one whose rate is estimated over all parameters."""


MAKE: dict[str, Any] = {
    "AdamW": partial(optim.AdamW, fused=True),
    "Lion": partial(Lion, lr=1e-3),
    "Adafactor": optim.Adafactor,
    "transformers": partial(TransformersAdafactor, lr=None),
    "LAMB": partial(Lamb, lr=1e-2),
    "LAMB in a wrapper": lambda parameters: Around(Lamb(parameters, lr=1e-2)),
    "AdamW in a wrapper": lambda parameters: Around(optim.AdamW(parameters)),
    "no Optimizer": lambda parameters: Delegating(optim.AdamW(parameters)),
    "Muon": partial(optim.Muon, lr=1e-2),
    "8 bits": lambda parameters: pytest.importorskip("torchao.optim").AdamW8bit(parameters),
    "SAM": lambda parameters: Sam(optim.AdamW(parameters)),
    "Prodigy": Prodigy,
    "unknown": partial(Stepped, lr=0.1),
}
#: what is not refused is missing here
ANSWERS: dict[str, dict[Any, str]] = {
    "flat pieces": dict.fromkeys(
        ["Adafactor", "transformers", "LAMB", "LAMB in a wrapper", "Muon", "SAM", "Prodigy", "8 bits"], "needs whole"
    ),
    "a stage": dict.fromkeys(["LAMB", "LAMB in a wrapper", "SAM", "Prodigy"], "needs whole"),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shards", ANSWERS)
def test_who_may_not_be_given_shards_is_known_by_name(shards: Any, name: str) -> None:
    faults, wanted = Faults(), ANSWERS[shards].get(name, "")
    check_shards(MAKE[name]([nn.Parameter(torch.ones(4, 4))]), shards, "here", faults)
    said = "".join(map(str, faults.found))
    assert wanted in said
    assert bool(wanted) == bool(said)


class ClipsInStep(optim.SGD):
    """As Mask2Former's optimizer of full-model clipping does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        nn.utils.clip_grad_norm_(chain(*(group["params"] for group in self.param_groups)), 0.5)
        return super().step(closure)


def _clip_each(parameter: nn.Parameter) -> None:
    shorten(parameter, 0.5)


def clipping_class(clip: Any) -> Any:
    """As detectron2 makes a class of an optimizer's: the function that clips is in a closure."""

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                clip(parameter)
        return optim.SGD.step(self, closure)

    return type("SGDWithGradientClip", (optim.SGD,), {"step": step})


class ClipsInAMethod(optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self._shorten()
        return super().step(closure)

    def _shorten(self) -> None:
        for group in self.param_groups:
            nn.utils.get_total_norm([parameter.grad for parameter in group["params"]])


class WithOption(optim.SGD):
    """Has the option of timm's Adan."""

    def __init__(self, parameters: Any, max_grad_norm: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["max_grad_norm"] = max_grad_norm


def with_hook(parameters: Any) -> Any:
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_arguments: shorten(parameters, 0.5))
    return optimizer


CLIPS: dict[str, tuple[Any, bool]] = {
    "in a hook": (with_hook, True),
    "in its step": (partial(ClipsInStep, lr=0.1), True),
    "in a method": (partial(ClipsInAMethod, lr=0.1), True),
    "in a closure, by another name": (partial(clipping_class(_clip_each), lr=0.1), True),
    "by an option": (partial(WithOption, max_grad_norm=1.0), True),
    "by an option that is off": (partial(WithOption, max_grad_norm=0.0), False),
    "by value": (partial(clipping_class(lambda each: nn.utils.clip_grad_value_(each, 1.0)), lr=0.1), False),
    **{name: (MAKE[name], False) for name in ("AdamW", "Lion", "unknown", "LAMB", "transformers", "Muon")},
}


@pytest.mark.parametrize("name", CLIPS)
def test_an_optimizer_whose_step_clips_by_a_norm_is_known_by_its_code_or_its_option(name: str) -> None:
    build, clips = CLIPS[name]
    optimizer = build([nn.Parameter(torch.ones(4, 4))])
    assert clips_by_norm(optimizer) == clips
    StepLR(optimizer, 1)  # wraps the step
    assert clips_by_norm(optimizer) == clips


@pytest.mark.parametrize(
    ("build", "again"),
    [
        (partial(optim.LBFGS, lr=0.1), True),
        (OPTIMIZERS["ahead"], True),
        (lambda parameters: Sam(optim.AdamW(parameters)), True),
        (partial(Stepped, lr=0.1), False),
        (partial(optim.AdamW, lr=0.1), False),
    ],
)
def test_which_optimizers_evaluate_their_closure_again(build: Any, again: bool) -> None:
    optimizer = build([nn.Parameter(torch.ones(2))])
    assert evaluates_again(optimizer) == again
    if isinstance(optimizer, optim.Optimizer):
        optim.lr_scheduler.ConstantLR(optimizer)  # it wraps ``step`` on the instance
        assert evaluates_again(optimizer) == again
