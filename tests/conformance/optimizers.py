"""What steps a model: torch's optimizers, and those of other people, written out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

Make = Callable[[Any], Optimizer]


class _Written(Optimizer):
    def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Written):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2: the sign of a momentum."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
        # a soft sign: of numbers near 0 the hard one is the order of a sum
        direction = torch.lerp(momentum, gradient, 0.1)
        parameter.sub_(direction / (direction.abs() + 1e-2), alpha=group["lr"])
        momentum.lerp_(gradient, 0.01)


class Lamb(_Written):
    """You et al., Large Batch Optimization for Deep Learning (2020), algorithm 2: Adam times a trust ratio a tensor."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first = state.setdefault("exp_avg", torch.zeros_like(parameter))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        step = state.setdefault("step", torch.tensor(0.0))
        step += 1
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient * gradient, 0.001)
        direction = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-2)
        trust = parameter.norm() / (direction.norm() + 1e-6)
        parameter.sub_(direction * trust, alpha=group["lr"])


class Delegating(Optimizer):
    """Steps an optimizer that it holds, with that one's groups and state, as Lookahead and the like do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class Sam(Delegating):
    """Foret et al., Sharpness-Aware Minimization (2021): the gradient is taken a step uphill."""

    radius = 0.05

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() + 1e-12
        moves = [p.grad * (self.radius / norm) for p in held]
        with torch.no_grad():
            for parameter, move in zip(held, moves, strict=True):
                parameter.add_(move)
        closure()
        with torch.no_grad():
            for parameter, move in zip(held, moves, strict=True):
                parameter.sub_(move)
        self.inner.step()
        return loss


def _eight_bits(parameters: Any, lr: float) -> Optimizer:
    from torchao.optim import AdamW8bit

    class Eager(AdamW8bit):
        """Its step is compiled, which takes longer than the run and is not done while operators are watched."""

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return Eager(parameters, lr=lr, eps=1e-2)


#: The large eps is for 16-true: squares of gradients are 0 in fp16, and a smaller one would let that decide the run.
_adamw = partial(AdamW, eps=1e-2)


@dataclass(frozen=True)
class Stepper:
    make: Callable[..., Optimizer]
    rate: float = 2e-2
    #: which parameters it takes; the others are frozen
    takes: Callable[[nn.Parameter], bool] = lambda parameter: True

    def optimizer(self, parameters: Any) -> Optimizer:
        return self.make([p for p in parameters if p.requires_grad], lr=self.rate)


STEPPERS = {
    "adamw_fused": Stepper(partial(_adamw, fused=True)),
    "adamw": Stepper(partial(_adamw, foreach=False)),
    "adamw_foreach": Stepper(partial(_adamw, foreach=True)),
    "sgd_momentum": Stepper(partial(SGD, momentum=0.9), rate=1e-1),
    "adafactor": Stepper(partial(Adafactor, eps=(None, 1e-2))),
    "muon": Stepper(Muon, rate=1e-2, takes=lambda parameter: parameter.ndim == 2),
    "lamb": Stepper(Lamb),
    "lion": Stepper(Lion, rate=1e-3),
    "wrapper": Stepper(lambda parameters, lr: Delegating(_adamw(parameters, lr=lr, fused=True))),
    "sam": Stepper(lambda parameters, lr: Sam(_adamw(parameters, lr=lr))),
}
if find_spec("torchao") is not None:
    STEPPERS["adamw_8bit"] = Stepper(_eight_bits)
