"""No alert on fifty fine-tuning runs whose loss is mostly noise, while what they learn lowers the held-out loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_mp.monitor.alerts import Alerts, Reading

RUNS, STEPS, FEATURES, HELD_OUT = 50, 300, 32, 4096


def logits(weights: Tensor, x: Tensor) -> Tensor:
    return (x @ weights.unsqueeze(-1)).squeeze(-1)


def batch(truth: Tensor, rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features of each run, and labels that follow them only a little."""
    x = torch.randn(RUNS, rows, FEATURES, generator=draw)
    return x, torch.bernoulli(torch.sigmoid(logits(truth, x)), generator=draw)


def loss_of(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits(weights, x), y, reduction="none")


@pytest.mark.parametrize(("rows", "lr"), [(8, 3e-3), (32, 1e-3)])
def test_flat_noisy_losses_give_no_alert(rows: int, lr: float) -> None:
    """Fifty heads on frozen features, trained next to one another by Adam."""
    draw = torch.Generator().manual_seed(rows)
    truth = 0.5 * torch.randn(RUNS, FEATURES, generator=draw) / math.sqrt(FEATURES)
    weights = (truth + 0.03 * torch.randn(RUNS, FEATURES, generator=draw)).requires_grad_()
    held_out = batch(truth, HELD_OUT, draw)
    before = loss_of(weights.detach() * 0, *held_out)
    with torch.no_grad():
        weights.mul_(0.1)
    optimizer = torch.optim.Adam([weights], lr=lr)
    readings: list[list[Reading]] = [[] for _ in range(RUNS)]
    for step in range(STEPS):
        losses = loss_of(weights, *batch(truth, rows, draw)).mean(1)
        optimizer.zero_grad()
        losses.sum().backward()
        old, gradients = weights.detach().clone(), weights.grad
        assert gradients is not None
        optimizer.step()
        moved = (weights.detach() - old).norm(dim=1) / old.norm(dim=1)
        numbers = torch.stack([losses.detach(), gradients.norm(dim=1), moved], 1)
        for run, (loss, norm, ratio) in zip(readings, numbers.tolist(), strict=True):
            run.append(Reading(step=step, loss=loss, grad_norm=norm, update_ratio=ratio, lr=lr))
    fallen = before - loss_of(weights.detach(), *held_out)
    assert (fallen.mean() / (fallen.std() / math.sqrt(fallen.numel()))) > 28
    said = []
    for run in readings:
        alerts = Alerts()
        said += [event for reading in run for event in alerts.judge(reading)]
    assert [event for event in said if event.is_alert] == []
    assert any(event.kind == "loss_plateau" for event in said)  # flat they are
