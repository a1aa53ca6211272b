"""Buffers that a forward changes are changed once where it is run again, and it computes what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.modules import checkpointing
from lightning_mp.policy import Checkpointing
from support.comparing import same
from support.models import FEATURES
from support.norms import Normed, conv_net, run


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


@pytest.mark.parametrize("options", [{}, {"mode": "selective", "save_ops": ("bmm",)}], ids=["full", "selective"])
def test_a_retained_graph_computes_from_the_buffers_of_the_forward(options: Any) -> None:
    """In each of its backward passes."""
    root = nn.Sequential(Average("in place"))
    checkpointing.apply(root, root, Checkpointing(modules="0", **options))
    loss = root(torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in root.parameters()]
    loss.backward()
    assert all(torch.equal(one.grad, 2 * once) for one, once in zip(root.parameters(), first, strict=True))


class Tables(nn.Module):
    """Reads a table that it never changes, and from its third forward on changes a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(1000, 4))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.count += 1
        return torch.tanh(self.linear(x) * self.table[0])


def _copied_bytes(root: nn.Module) -> int:
    """What a forward and its backward pass copy."""

    class Copies(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.clone.default:
                self.bytes += args[0].nbytes
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        root(torch.ones(2, 4)).sum().backward()
    return copies.bytes


def test_buffers_that_no_forward_changes_are_copied_in_the_first_one_alone() -> None:
    root = nn.Sequential(nn.Sequential(Tables(), nn.BatchNorm1d(4)))
    table = root[0][0].table.nbytes
    checkpointing.apply(root, [root[0]], Checkpointing(modules="0"))
    assert _copied_bytes(root) >= table
    assert _copied_bytes(root) < table / 10, "the statistics of the batch norm, twice"
    assert root[0][1].num_batches_tracked == 2
    root.eval()
    _copied_bytes(root)
    assert _copied_bytes(root) < table / 10
    assert root[0][1].num_batches_tracked == 2
