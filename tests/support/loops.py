"""The plain scaled training loop of torch's documentation, without a trainer."""

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

INF = float("inf")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def backward(model: nn.Module, scaler: GradScaler, step: int, overflow: bool) -> None:
    """One scaled backward pass on the step's own batch; an overflow makes a gradient infinite."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    scaler.scale(model(x).float().pow(2).mean()).backward()
    if overflow:
        next(model.parameters()).grad[0, 0] = INF


def train(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, trace: list[bool], start: int = 0) -> list[float]:
    scales = []
    for step, overflow in enumerate(trace, start):
        optimizer.zero_grad()
        backward(model, scaler, step, overflow)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales
