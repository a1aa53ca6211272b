"""Swapping an instance's class for a subclass of it, and back."""

from __future__ import annotations

import pickle
from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp import MixedPrecisionPlan
from lightning_mp.errors import Faults
from lightning_mp.modules import checkpointing, pins
from lightning_mp.modules.patterns import Swapped, matches, swap_in, swap_out
from lightning_mp.policy import Checkpointing, Pin
from support.models import Regression
from support.ranks import in_a_process
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


class TestBelowFullyShard:
    """FSDP2 gives a module a class of its own; that class must outlive a run's mix-ins."""

    @staticmethod
    def sharded(module: nn.Module) -> nn.Module:
        # what fully_shard does to the class; with a process group it is run in tests/fsdp2
        cls = type(module)
        module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        return module

    def test_pins_and_checkpointing_that_stay_below_it_are_off_once_removed(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        faults = Faults()
        pinned = pins.resolve(net, [Pin("0", "bf16")], faults)
        config = Checkpointing(modules="1")
        pins.apply(pinned, mixed=True, compute_dtype=torch.float32, device_type="cpu")
        applied = checkpointing.apply(net, checkpointing.select(net, config, faults), config)
        for layer in net:
            self.sharded(layer)
        assert net[0](torch.ones(1, 2)).dtype == torch.bfloat16
        pins.remove(net.modules())
        applied.close()
        for parameter in net[0].parameters():
            parameter.data = parameter.data.float()
        assert all(isinstance(layer, FSDPModule) for layer in net)
        assert net(torch.ones(1, 2)).dtype == torch.float32
        assert net[0](torch.ones(1, 2)).dtype == torch.float32

    @pytest.mark.parametrize("pattern", ["Linear", "FSDPLinear"])
    def test_patterns_see_the_original_class(self, pattern: str) -> None:
        layer = self.sharded(nn.Linear(1, 1))
        assert matches(pattern, "x", layer) is (pattern == "Linear")


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


@pytest.mark.gloo
def test_so_it_does_where_units_are_sharded() -> None:
    in_a_process(_sees_the_users_classes, "mp_fsdp2")


def _sees_the_users_classes(strategy: str) -> None:
    module = ByType()
    plan = MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"}, checkpointing="net")
    fit(module, plugins=[plan], strategy=strategy)
    assert module.no_decay == 2
    assert "configure_optimizers" not in vars(module)


def test_a_run_that_fails_before_leaves_the_method_alone() -> None:
    class Fails(ByType):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("the user's own")

    module = Fails()
    with pytest.raises(RuntimeError, match="own"):
        fit(module, plugins=[MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"})])
    assert "configure_optimizers" not in vars(module)
