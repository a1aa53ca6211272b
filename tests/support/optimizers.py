"""Optimizers that people use besides torch's plain ones."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.optim import Adafactor, AdamW
from transformers.optimization import Adafactor as TransformersAdafactor


class Delegating:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


class Around(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


def partly_fused(parameters: Any) -> AdamW:
    first, *others = list(parameters)
    return AdamW([{"params": [first]}, {"params": others, "fused": False}], lr=1e-2, eps=1e-4, fused=True)


class ScalerAware(torch.optim.Optimizer):
    """Divides by the scale and skips by itself if it is given a scaler, as apex, FusedLAMB and hivemind do."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        inverse, overflowed = 1.0, 0.0
        if grad_scaler is not None:
            overflowed = sum(float(flag) for flag in grad_scaler._check_inf_per_device(self).values())
            inverse = 1.0 / grad_scaler.get_scale()
        if not overflowed:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(1e-2 * inverse * parameter.grad)
        return loss


class TwoInOne:
    """Two optimizers under one name, which says that it knows of loss scales and does not, as of Muon with AdamW."""

    def __init__(self, parameters: Any) -> None:
        first, *others = list(parameters)
        self.first, self.second = ScalerAware([first]), AdamW(others, lr=1e-2, eps=1e-4, fused=True)
        self._step_supports_amp_scaling = True
        self.defaults = self.second.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.first.param_groups + self.second.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        return {**self.first.state, **self.second.state}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self.first.step()
        self.second.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.first.zero_grad(set_to_none)
        self.second.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first.load_state_dict(state["first"])
        self.second.load_state_dict(state["second"])


class OwnStep(AdamW):
    """A fused optimizer of torch's by its constructor alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)
        return loss


class Renamed(AdamW):
    """A fused optimizer of torch's under a name of the user's: it takes the flag on the device."""


def patched(parameters: Any) -> AdamW:
    """A fused optimizer whose ``step`` a user has replaced on the instance."""
    optimizer = AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)
    optimizer.step = MethodType(OwnStep.step, optimizer)  # type: ignore[method-assign]
    return optimizer


_fused = partial(AdamW, lr=1e-2, eps=1e-4, fused=True)
OPTIMIZERS: dict[str, Any] = {
    "adafactor": partial(Adafactor, lr=1e-2),
    "adafactor-transformers": partial(TransformersAdafactor, lr=None),
    "delegating": lambda parameters: Delegating(_fused(parameters)),
    "around": lambda parameters: Around(_fused(parameters)),
    "partly-fused": partly_fused,
}
#: that say they skip by a flag on the device, and do not
CLAIM_TO_SKIP: dict[str, Any] = {
    "scaler-aware": ScalerAware,
    "two-in-one": TwoInOne,
    "own-step": partial(OwnStep, lr=1e-2, fused=True),
    "patched-step": patched,
}
