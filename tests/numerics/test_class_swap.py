"""Swapping an instance's class for a subclass of it, and back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.numerics.class_swap import Swapped, swap_in, swap_out, swapped_with


class Doubled(Swapped):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)  # type: ignore[misc]


class Shifted(Swapped):
    def forward(self, *args: Any) -> Any:
        return 1 + super().forward(*args)  # type: ignore[misc]


class WithState(nn.Module):
    """Chooses what is pickled of it."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = "do not pickle"
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "secret"}


ONE = torch.ones(1)


def identity() -> nn.Module:
    return nn.Identity()


def test_the_innermost_mixin_runs_first() -> None:
    module = identity()
    swap_in(module, Doubled)
    swap_in(module, Shifted)
    assert module(ONE) == 3
    other = identity()
    swap_in(other, Shifted)
    swap_in(other, Doubled)
    assert other(ONE) == 4


@pytest.mark.parametrize("mixins", [(Doubled, Shifted), (Shifted, Doubled)])
def test_a_mixin_is_taken_out_from_wherever_it_is(mixins: tuple[type[Swapped], ...]) -> None:
    for gone, stays in ((Doubled, Shifted), (Shifted, Doubled)):
        module = identity()
        for mixin in mixins:
            swap_in(module, mixin)
        swap_out(module, gone)
        assert not swapped_with(module, gone)
        assert swapped_with(module, stays)
        swap_out(module, stays)
        assert type(module) is nn.Identity


def test_taking_out_what_was_never_in_changes_nothing() -> None:
    module = identity()
    swap_out(module, Doubled)
    assert type(module) is nn.Identity


def test_a_swapped_class_looks_like_its_base_and_is_made_once() -> None:
    one, two = identity(), identity()
    swap_in(one, Doubled)
    swap_in(two, Doubled)
    assert type(one) is type(two)
    assert isinstance(one, nn.Identity)
    assert (type(one).__name__, type(one).__qualname__, type(one).__module__, type(one).__doc__) == (
        "Identity",
        "Identity",
        nn.Identity.__module__,
        nn.Identity.__doc__,
    )
    assert repr(one) == "Identity()"


@pytest.mark.parametrize(
    "travel", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "copy", "pickle"]
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), WithState, lambda: nn.LSTM(1, 1)], ids=["", "state", "LSTM"])
def test_a_swapped_module_travels(make: Any, travel: Any) -> None:
    module = nn.Sequential(make())
    swap_in(module[0], Shifted)
    swap_in(module, Doubled)
    travelled = travel(module)
    assert [type(m) for m in travelled.modules()] == [type(m) for m in module.modules()]
    assert list(travelled.state_dict()) == list(module.state_dict())
    if not isinstance(module[0], nn.LSTM):
        assert travelled(ONE[None]) == module(ONE[None])
    swap_out(travelled, Doubled)
    assert type(travelled) is nn.Sequential


def test_a_modules_own_choice_of_what_is_pickled_holds() -> None:
    module = WithState()
    swap_in(module, Doubled)
    assert not hasattr(pickle.loads(pickle.dumps(module)), "secret")


def test_hooks_and_training_mode_travel_along() -> None:
    module = nn.Linear(1, 1).eval()
    module.register_forward_hook(_ten)
    swap_in(module, Doubled)
    copied = copy.deepcopy(module)
    assert copied(ONE) == 10
    assert not copied.training


def _ten(*_: Any) -> Tensor:
    return torch.full((1,), 10.0)
