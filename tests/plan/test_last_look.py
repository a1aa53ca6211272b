"""A gradient that stops being finite after the backward pass is a non-finite gradient, wherever that happens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim import SGD, AdamW

from lightning_mp import LossScaling, PlanError
from support.manual import Manual
from support.models import Regression, same_weights
from support.oracles import MODES, SCALED, plan_for
from support.running import fit
from support.traces import Trace

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
    """In batch ``BAD`` one entry of one gradient is not finite."""
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
    "a LambdaCallback": lambda make: (
        Regression(make),
        [LambdaCallback(on_before_optimizer_step=lambda _trainer, module, _optimizer: spoil(module))],
    ),
}


def _one_skip(trace: Trace, plan: Any) -> None:
    assert trace.skipped == [step == BAD for step in range(8)]
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    assert same_weights(trace.weights[BAD - 1], trace.weights[BAD])
    assert all(torch.equal(a, b) for a, b in zip(trace.states[BAD - 1], trace.states[BAD], strict=True))
    assert all(bool(torch.isfinite(weight).all()) for weight in trace.weights[-1].values())


@pytest.mark.parametrize(("mode", "optimizer", "clip"), CLIPPED)
@pytest.mark.parametrize("place", AUTOMATIC)
def test_the_step_is_skipped(place: str, mode: str, optimizer: str, clip: str) -> None:
    module, callbacks = AUTOMATIC[place](OPTIMIZERS[optimizer])
    trace, plan = Trace(), plan_for(mode, LossScaling(init_scale=64.0))
    fit(module, plugins=[plan], callbacks=[*callbacks, trace], **CLIPS[clip])
    _one_skip(trace, plan)
    if mode in SCALED:
        assert trace.scales == [64.0] * BAD + [32.0] * (8 - BAD)


def between(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    spoil(m)
    opt.step()


def plain(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    opt.step()


def after_own_unscale(m: Any, batch: Any, batch_idx: int) -> None:
    opt, scaler = m.optimizers(), m.user_scaler
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    if scaler is not None:
        scaler.unscale_(opt)
    spoil(m)
    opt.step()


def before_scaler_step(m: Any, batch: Any, batch_idx: int) -> None:
    opt, scaler = m.optimizers(), m.user_scaler
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    spoil(m)
    opt.step() if scaler is None else scaler.step(opt)


class ManualAfterBackward(Manual):
    def on_after_backward(self) -> None:
        spoil(self)


class ManualBeforeStep(Manual):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        spoil(self)


MANUAL: dict[str, Any] = {
    "between backward and step": partial(Manual, between),
    "after the user's own unscale_": partial(Manual, after_own_unscale),
    "before the user's own scaler.step": partial(Manual, before_scaler_step),
    "on_after_backward": partial(ManualAfterBackward, plain),
    "on_before_optimizer_step": partial(ManualBeforeStep, plain),
}


@pytest.mark.parametrize(("mode", "optimizer"), STEPS)
@pytest.mark.parametrize("place", MANUAL)
def test_the_step_is_skipped_in_manual_optimization(place: str, mode: str, optimizer: str) -> None:
    trace, plan = Trace(), plan_for(mode, LossScaling(init_scale=64.0))
    fit(MANUAL[place](OPTIMIZERS[optimizer]), plugins=[plan], callbacks=[trace])
    _one_skip(trace, plan)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around SGD; ``fresh`` as its authors wrote it: with the gradients at hand."""

    def __init__(self, parameters: Any, fresh: bool = False) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.inner = AdamW(self.param_groups, lr=1e-3, eps=1e-4)
        self.fresh = fresh

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = None if self.fresh else closure()
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        self.inner.step()
        return loss


@pytest.mark.parametrize("mode", SCALED)
def test_sam_under_a_loss_scale_is_refused_by_name_before_it_changed_anything(mode: str) -> None:
    module = Regression(SAM)
    with pytest.raises(PlanError, match=f"SAM, which evaluates its closure again, with precision='{mode}'"):
        fit(module, plugins=[plan_for(mode)])
    assert same_weights(dict(module.named_parameters()), dict(Regression(SAM).named_parameters()))
