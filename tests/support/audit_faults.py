"""Small models in which one module does not do what the precision says, each in a way that users have done it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.models import FEATURES, HIDDEN, Regression


class CastBehind(Regression):
    def on_train_start(self) -> None:
        self.net[3].bfloat16()


class HalfCheckpoint(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.bfloat16()


class OutsideAutocast(Regression):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:3](x)
        with torch.autocast("cpu", enabled=False):
            return (self.net[3](hidden.float()) - y).pow(2).mean()


class TurnsAutocastOff(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return x @ x.t() @ x


class CastsItself(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return functional.linear(x.half(), self.weight.half(), self.bias.half()).to(x.dtype)


class HalfNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.bfloat16(), (HIDDEN,), self.weight.bfloat16(), self.bias.bfloat16())


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LostPin(Regression):
    """Its pinned norm is given half-precision weights, as loading a state dict by assignment does."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.net[1] = norm or OwnRMSNorm()

    def on_train_start(self) -> None:
        half = {name: value.bfloat16() for name, value in self.net[1].state_dict().items()}
        self.net[1].load_state_dict(half, assign=True)
        self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())


class _KeepsAverages(torch.optim.SGD):
    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, lr=1e-3)
        self.dtype = dtype

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = parameter.detach().to(self.dtype)
        return result


class Replaced(Regression):
    def __init__(self, index: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net[index] = make()


Inside = partial(Replaced, 2, TurnsAutocastOff)
Custom = partial(Replaced, 0, partial(CastsItself, FEATURES, HIDDEN))
NormInHalf = partial(Replaced, 1, partial(HalfNorm, HIDDEN))
OwnNormInHalf = partial(Replaced, 1, OwnRMSNorm)
HalfState = partial(Regression, partial(_KeepsAverages, dtype=torch.bfloat16))
FullState = partial(Regression, partial(_KeepsAverages, dtype=torch.float32))


class RootProduct(Regression):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", enabled=False):
            weight = self.net[3].weight.float()
            regular = (weight @ weight.t()).sum()
        return (self.net(x).float() - y).pow(2).mean() + regular * 0
