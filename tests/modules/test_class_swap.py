"""Swapping an instance's class for a subclass of it, and back."""

from __future__ import annotations

import pickle
from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from lightning_mp.modules.patterns import Swapped, swap_in, swap_out
from support.models import Regression
from support.running import fit

T = TypeVar("T")


class Doubled(Swapped):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)  # type: ignore[misc]


class Shifted(Swapped):
    def forward(self, *args: Any) -> Any:
        return 1 + super().forward(*args)  # type: ignore[misc]


ONE = torch.ones(1)


class Abstract(ABC, nn.Identity): ...


class Of(Generic[T], nn.Identity): ...


class OfFloats(Of[float], nn.Module): ...


@pytest.mark.parametrize("cls", [Abstract, Of, OfFloats])
def test_a_class_whose_first_base_has_no_dict_takes_a_mixin(cls: type[nn.Module]) -> None:
    module = cls()
    swap_in(module, Doubled)
    swap_in(module, Shifted)
    assert module(ONE) == pickle.loads(pickle.dumps(module))(ONE) == 3
    swap_out(module, Doubled)
    assert module(ONE) == 2
    swap_out(module, Shifted)
    assert type(module) is cls


# ---------------------------------------------------------------------- a forward set on the instance


@pytest.mark.parametrize("order", [(Doubled, Shifted), (Shifted, Doubled)])
def test_a_forward_set_on_the_instance_is_run_within(order: tuple[type[Swapped], type[Swapped]]) -> None:
    """As Liger's kernels are put in, and ``module.forward = torch.compile(module.forward)``."""
    module, own = nn.Linear(2, 2), lambda x: x + 10
    module.forward = own
    swap_in(module, order[0])
    swap_in(module, order[1])
    swap_in(module, Third, innermost=True)
    inner = -torch.tensor([10.0])
    expected = {Doubled: 1 + 2 * inner, Shifted: 2 * (1 + inner)}[order[0]]
    assert torch.equal(module(torch.zeros(1)), expected)
    for mixin in (*order, Third):
        swap_out(module, mixin)
    assert type(module) is nn.Linear
    assert vars(module)["forward"] is own


class Third(Swapped):
    def forward(self, *args: Any) -> Any:
        return -super().forward(*args)  # type: ignore[misc]


def test_a_patched_norm_is_pinned_and_given_back() -> None:
    module = Regression()
    seen: list[torch.dtype] = []

    def patched(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return nn.functional.layer_norm(x, (x.shape[-1],))

    module.net[1].forward = patched
    fit(module, plugins=[MixedPrecisionPlan("bf16-mixed", pins={"norms": "bf16"}, checkpointing="net.1")])
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 16, "each of 8 steps recomputes it"


# ---------------------------------------------------------------------- what configure_optimizers sees


class ByType(Regression):
    """Leaves weight decay off norms, which it tells by ``type(m) is``, as many recipes do."""

    def configure_optimizers(self) -> Any:
        norms = {id(p) for m in self.modules() if type(m) is nn.LayerNorm for p in m.parameters()}
        self.no_decay = len(norms)
        assert type(self) is ByType
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_configure_optimizers_sees_the_classes_that_the_user_wrote() -> None:
    _sees_the_users_classes("auto")


def _sees_the_users_classes(strategy: str) -> None:
    module = ByType()
    plan = MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"}, checkpointing="net")
    fit(module, plugins=[plan], strategy=strategy)
    assert module.no_decay == 2
    assert "configure_optimizers" not in vars(module)
