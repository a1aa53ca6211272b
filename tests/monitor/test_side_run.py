"""A module that is run on the side keeps nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.monitor.side_run import untouched


class Keeps(nn.Module):
    """Everything a module can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("absent", None)
        self.count, self.name, self.total = 0, "a", torch.zeros(2)
        self.items, self.table, self.names = [1, 2], {"a": 1}, {"x"}
        self.inner = nn.BatchNorm1d(2)
        with torch.inference_mode():
            self.evaluated = torch.ones(1)


def _all(module: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """Every tensor, and everything else as text."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    values |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    values |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    tensors = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    return tensors, {name: repr(value) for name, value in values.items() if name not in tensors}


def _set_attribute(module: Keeps) -> None:
    module.new = 1


def _delete_attribute(module: Keeps) -> None:
    del module.name


CHANGES: dict[str, Callable[[Keeps], Any]] = {
    "a number": lambda m: setattr(m, "count", 5),
    "a tensor, in place": lambda m: m.total.add_(1),
    "a tensor, another one": lambda m: setattr(m, "total", torch.ones(3)),
    "a list": lambda m: m.items.append(3),
    "a dict": lambda m: m.table.update(b=2),
    "a set": lambda m: m.names.clear(),
    "another list": lambda m: setattr(m, "items", []),
    "a buffer, in place": lambda m: m.average.add_(1),
    "a buffer, another one": lambda m: setattr(m, "average", torch.ones(2)),
    "a buffer that was not there": lambda m: setattr(m, "absent", torch.ones(2)),
    "statistics of a batch": lambda m: m.inner(torch.randn(4, 2)),
    "a gradient": lambda m: (m.weight * 3).sum().backward(),
    "a new attribute": _set_attribute,
    "an attribute less": _delete_attribute,
}


@pytest.mark.parametrize("gradient", [None, 2.0])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_all_is_as_before(change: str, gradient: float | None, fails: bool) -> None:
    module = Keeps()
    if gradient is not None:
        module.weight.grad = torch.full((2,), gradient)
    items, total, (tensors, others) = module.items, module.total, _all(module)
    try:
        with untouched(module, torch.device("cpu")):
            CHANGES[change](module)
            if fails:
                raise KeyError("planned")
    except KeyError:
        assert fails
    torch.testing.assert_close(_all(module)[0], tensors, rtol=0, atol=0)
    assert _all(module)[1] == others
    assert module.items is items
    assert module.total is total


def test_a_backward_pass_within_begins_without_gradients() -> None:
    module = Keeps()
    module.weight.grad = torch.full((2,), 7.0)
    with untouched(module, torch.device("cpu")):
        (module.weight * 3).sum().backward()
        assert torch.equal(module.weight.grad, torch.full((2,), 3.0))
