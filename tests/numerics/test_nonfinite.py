"""Naming the module in which the first non-finite value was born."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mp.numerics.nonfinite import Origin, locate

INF, NAN = float("inf"), float("nan")
X = torch.linspace(0.1, 1, 8).reshape(2, 4)


def net(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))


def step(root: nn.Module, x: Tensor = X, loss: Callable[[Tensor], Tensor] = Tensor.sum) -> Callable[[], Tensor]:
    def run() -> Tensor:
        value = loss(root(x))
        value.backward()
        return value

    return run


@torch.no_grad()
def set_(parameter: Tensor, value: float) -> None:
    parameter.view(-1)[0] = value


@pytest.mark.parametrize("layer", range(3))
def test_an_fp16_overflow_is_named_by_the_layer_that_made_it(layer: int) -> None:
    root = net(3)
    with torch.no_grad():
        for k, one in enumerate(root):
            one.weight.fill_(6e4 if k == layer else 0.5)
            one.bias.zero_()
    with torch.autocast("cpu", torch.float16):
        found = locate(root, step(root, loss=lambda out: out.float().sum()))
    assert found == Origin(str(layer), f"{layer}.weight", "forward")


def test_an_operation_between_modules_is_told_from_the_batch() -> None:
    """As a product of queries and keys that overflows: no module's output is bad, nor is the batch."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            q = self.query(x)
            return self.out((q * 1e30 @ (q * 1e30).t()) @ q)

    root = nn.ModuleDict({"attention": Scores()})
    found = locate(root, step(root["attention"]))
    assert (found.module, found.input_bad, found.after) == ("attention.out", True, "attention.query")
    assert "or an operation between module 'attention.query' and that one" in str(found)


class Attention(nn.Module):
    """Masks as many models do: minus infinity above the diagonal, from a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.softmax, self.proj = Mask(), nn.Softmax(-1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.softmax(self.mask(x @ x.mT)) @ x)


class Mask(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -INF)


def test_a_mask_of_minus_infinity_is_no_culprit() -> None:
    root = nn.Sequential(Attention(), nn.Linear(4, 4))
    assert locate(root, step(root)) is None
    set_(root[1].weight, NAN)
    assert locate(root, step(root)) == Origin("1", "1.weight", "forward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_not_what_ran_last(reentrant: bool) -> None:
    root = net(3)

    def run() -> Tensor:
        middle = checkpoint(root[:2], X.clone().requires_grad_(), use_reentrant=reentrant)
        loss = root[2](middle).sum() / 0.0
        loss.backward()
        return loss

    found = locate(root, run)
    assert (found.module, found.phase) == ("2", "loss")


@pytest.mark.parametrize("bad", range(3))
def test_what_is_compiled_is_watched_too(bad: int) -> None:
    root = net(3)
    for layer in root:
        layer.compile(backend="eager")
    step(root)()
    assert locate(root, step(root)) is None
    set_(root[bad].weight, NAN)
    assert locate(root, step(root)) == Origin(str(bad), f"{bad}.weight", "forward")
