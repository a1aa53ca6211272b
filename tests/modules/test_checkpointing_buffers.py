"""Buffers that a forward changes are changed once where it is run again, and it computes what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils

from lightning_mp.callbacks import ActivationCheckpointing
from support.comparing import same
from support.models import FEATURES
from support.norms import STEPS, Normed, conv_net, run
from support.running import fit


class Average(nn.Module):
    """Its output depends on an average that its forward moves: in place, through ``.data``, or by a new tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        new = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        if self.how == "assigned":
            self.mean = new
        else:
            (self.mean.data if self.how == "data" else self.mean).copy_(new)
        return torch.relu(hidden * (1 + self.mean))


def _linear(wrap: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return wrap(nn.Linear(FEATURES, FEATURES), **options)


def _instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), norm, nn.Flatten(), nn.Linear(FEATURES, FEATURES))


INNER: dict[str, Callable[[], nn.Module]] = {
    "batch norm, cumulative": lambda: nn.Sequential(_linear(nn.Sequential), nn.BatchNorm1d(FEATURES, momentum=None)),
    "instance norm": _instance_norm,
    "spectral norm": lambda: _linear(utils.parametrizations.spectral_norm),
    "spectral norm by hook": lambda: _linear(utils.spectral_norm),
    "in place": lambda: Average("in place"),
    "data": lambda: Average("data"),
    "assigned": lambda: Average("assigned"),
}
NETS = {"batch norms": conv_net} | {
    name: lambda inner=inner: nn.Sequential(nn.Sequential(inner()), nn.Linear(FEATURES, 1))
    for name, inner in INNER.items()
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
@pytest.mark.parametrize("checkpointing", ["net", {"modules": "net", "mode": "selective"}], ids=["full", "selective"])
@pytest.mark.parametrize("net", NETS)
def test_a_run_is_the_one_without(net: str, checkpointing: Any) -> None:
    found = run("single", "32-true", Normed(NETS[net]), checkpointing=checkpointing)
    expected = run("single", "32-true", Normed(NETS[net]))
    assert same(found["tensors"], expected["tensors"])


def test_nor_does_the_callback_count_twice() -> None:
    module = Normed()
    fit(module, max_steps=STEPS, callbacks=[ActivationCheckpointing("net")])
    assert module.net[1].num_batches_tracked == STEPS
