"""A gradient that stops being finite after the backward pass is a non-finite gradient, wherever that happens."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, AdamW

from lightning_mp import LossScaling
from support.manual import Manual, between
from support.models import Regression, same_weights
from support.oracles import MODES, SCALED, plan_for
from support.traces import Trace, equal_states, traced

BAD = 3
OPTIMIZERS: dict[str, Any] = {
    "fused": partial(AdamW, lr=1e-3, eps=1e-4, fused=True),
    "plain": partial(SGD, lr=1e-3, momentum=0.9),
}
CLIPS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}
#: mode and optimizer: every mode, and each way in which a step is held back
STEPS = [*((mode, "fused") for mode in MODES), ("32-true", "plain"), ("16-mixed", "plain")]
#: and with which clip
CLIPPED = [
    *((*step, "no clip") for step in STEPS),
    *((mode, "plain", clip) for mode in ("bf16-mixed", "16-mixed") for clip in ("norm", "value")),
]


def spoil(module: Any, value: float = float("inf")) -> None:
    if module.trainer.global_step == BAD:
        module.net[0].weight.grad[0, 0] = value


class AfterBackward(Regression):
    def on_after_backward(self) -> None:
        spoil(self)


class BeforeStep(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        spoil(self)


class InTheClip(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
        super().configure_gradient_clipping(optimizer, *given, **named)
        spoil(self, float("nan"))


class Spoils(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        spoil(pl_module)


AUTOMATIC: dict[str, Any] = {
    "on_after_backward": lambda make: (AfterBackward(make), []),
    "on_before_optimizer_step": lambda make: (BeforeStep(make), []),
    "configure_gradient_clipping": lambda make: (InTheClip(make), []),
    "a callback": lambda make: (Regression(make), [Spoils()]),
}


def _one_skip(trace: Trace, plan: Any) -> None:
    assert trace.skipped == [step == BAD for step in range(8)]
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    assert same_weights(trace.weights[BAD - 1], trace.weights[BAD])
    assert equal_states(trace.states[BAD - 1], trace.states[BAD])
    assert all(bool(torch.isfinite(weight).all()) for weight in trace.weights[-1].values())


@pytest.mark.parametrize(("mode", "optimizer", "clip"), CLIPPED)
@pytest.mark.parametrize("place", AUTOMATIC)
def test_the_step_is_skipped(place: str, mode: str, optimizer: str, clip: str) -> None:
    module, callbacks = AUTOMATIC[place](OPTIMIZERS[optimizer])
    plan = plan_for(mode, LossScaling(init_scale=64.0))
    trace = traced(module, *callbacks, plugins=[plan], **CLIPS[clip])
    _one_skip(trace, plan)
    if mode in SCALED:
        assert trace.scales == [64.0] * BAD + [32.0] * (8 - BAD)


def _after_own_unscale(m: Any, opt: Any) -> None:
    if m.user_scaler is not None:
        m.user_scaler.unscale_(opt)
    spoil(m)


def before_scaler_step(m: Any, batch: Any, batch_idx: int) -> None:
    opt, scaler = m.optimizers(), m.user_scaler
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    spoil(m)
    opt.step() if scaler is None else scaler.step(opt)


plain = between(lambda m, opt: None)


class ManualAfterBackward(Manual):
    def on_after_backward(self) -> None:
        spoil(self)


class ManualBeforeStep(Manual):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        spoil(self)


MANUAL: dict[str, Any] = {
    "between backward and step": partial(Manual, between(lambda m, opt: spoil(m))),
    "after the user's own unscale_": partial(Manual, between(_after_own_unscale)),
    "before the user's own scaler.step": partial(Manual, before_scaler_step),
    "on_after_backward": partial(ManualAfterBackward, plain),
    "on_before_optimizer_step": partial(ManualBeforeStep, plain),
}


@pytest.mark.parametrize(("mode", "optimizer"), [("32-true", "plain"), ("bf16-mixed", "fused"), ("16-mixed", "fused")])
@pytest.mark.parametrize("place", MANUAL)
def test_the_step_is_skipped_in_manual_optimization(place: str, mode: str, optimizer: str) -> None:
    plan = plan_for(mode, LossScaling(init_scale=64.0))
    _one_skip(traced(MANUAL[place](OPTIMIZERS[optimizer]), plugins=[plan]), plan)
