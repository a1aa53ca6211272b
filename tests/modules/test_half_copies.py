"""Half copies: the half value in a product, gradients added in fp32, and who else reads one is told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.errors import PlanError
from lightning_mp.modules.half_copies import HalfCopy, Run, give_back, hold, stand_in, stored_dtype


class Twice(nn.Module):
    """One linear layer used twice, and attention, whose projection's weight it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x).relu())
        return self.attention(x, x, x, need_weights=False)[0]


PLACES = (("layer", "layer", "weight"), ("attention", "attention", "in_proj_weight"))
OUT = ("attention", "attention.out_proj", "weight")


def _held(module: nn.Module, dtype: torch.dtype, run: Run, in_fp32: bool = False) -> None:
    of: dict[str, list[tuple[nn.Module, str]]] = {}
    for hooked, holder, key in (*PLACES, OUT):
        part = module.get_submodule(holder)
        hold(part.get_parameter(key), dtype, f"{holder}.{key}", run, lambda: in_fp32)
        of.setdefault(hooked, []).append((part, key))
    for name, holders in of.items():
        stand_in(module.get_submodule(name), holders, dtype)


def _gradients(module: nn.Module, dtype: torch.dtype, again: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.linspace(-1, 1, 48).view(2, 3, 8)
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if again else module(x)
    out.float().pow(2).sum().backward()
    return out, {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_fp32_weights(dtype: torch.dtype, again: bool) -> None:
    plain, copies = Twice(), Twice()
    _held(copies, dtype, Run(""))
    (out, gradients), (other, others) = _gradients(copies, dtype, again), _gradients(plain, dtype, again)
    assert torch.equal(out, other)
    assert all(torch.equal(gradients[name].float(), others[name]) for name in others)
    assert gradients["layer.weight"].dtype == torch.float32  # two uses, added in fp32
    assert gradients["attention.in_proj_weight"].dtype == dtype
    assert any((gradient != gradient.to(dtype)).any() for gradient in others.values())


def test_a_gradient_may_be_asked_for_in_fp32() -> None:
    module = Twice()
    _held(module, torch.bfloat16, Run(""), in_fp32=True)
    assert {gradient.dtype for gradient in _gradients(module, torch.bfloat16)[1].values()} == {torch.float32}


def test_a_second_step_starts_anew() -> None:
    plain, copies = Twice(), Twice()
    _held(copies, torch.bfloat16, Run(""))
    for _ in range(2):
        others, gradients = (_gradients(module, torch.bfloat16)[1] for module in (plain, copies))
        assert all(torch.equal(gradients[name].float(), others[name]) for name in others)
        for module in (plain, copies):
            module.zero_grad()


def _read(weight: HalfCopy) -> Any:
    return weight.float().sum()


READS: dict[str, Callable[[HalfCopy], Any]] = {
    "values": _read,
    "data": lambda weight: weight.data.sum(),
    "transposed": lambda weight: weight.T.sum(),
    "in a product": lambda weight: nn.functional.linear(torch.ones(1, 8), weight),
    "written in place": lambda weight: torch.no_grad()(weight.mul_)(0.5),
    "copied": copy.deepcopy,
    "saved": lambda weight: nn.ParameterList([weight]).state_dict()["0"].clone(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_one_in_a_step_is_refused_and_elsewhere_told_once(read: Callable[[HalfCopy], Any]) -> None:
    run, module = Run("The fp32 value is elsewhere."), Twice()
    _held(module, torch.bfloat16, run)
    weight: Any = module.layer.weight
    with run.step(), pytest.raises(PlanError, match=r"layer\.weight.*pins=\{'layer': 'fp32'\}"):
        read(weight)
    outside = _read if read is READS["in a product"] else read  # whose dtypes need autocast
    with pytest.warns(UserWarning, match=r"layer\.weight.*elsewhere"):
        outside(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _read(weight)


def test_what_tells_no_value_is_answered() -> None:
    run, module = Run(""), Twice()
    _held(module, torch.bfloat16, run)
    weight: Any = module.layer.weight
    with run.step():
        assert (weight.shape, weight.numel(), weight.device.type, weight.requires_grad) == ((8, 8), 64, "cpu", True)
        assert weight.dtype == stored_dtype(weight) == torch.float32
        assert weight.grad is None
    assert weight.element_size() == 2


def test_a_hook_sees_and_returns_the_gradient_in_fp32() -> None:
    plain, copies = Twice(), Twice()
    _held(copies, torch.bfloat16, Run(""))
    seen: dict[int, list[Tensor]] = {}
    for module in (plain, copies):
        found = seen.setdefault(id(module), [])
        for weight in (module.layer.weight, module.attention.in_proj_weight):
            weight.register_hook(lambda gradient, found=found: found.append(gradient) or gradient * 3.1)
            weight.register_post_accumulate_grad_hook(lambda weight, found=found: found.append(weight.grad.clone()))
    others, gradients = (_gradients(module, torch.bfloat16)[1] for module in (plain, copies))
    assert all(torch.equal(gradients[name].float(), others[name]) for name in others)
    for one, other in zip(*seen.values(), strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


def test_where_autocast_is_off_it_is_refused() -> None:
    module = Twice()
    _held(module, torch.bfloat16, Run(""))
    with pytest.raises(PlanError, match=r"layer\.weight.*autocast is off"):
        module(torch.ones(2, 3, 8))
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(PlanError, match="another dtype"):
        module(torch.ones(2, 3, 8))


def test_given_back_it_is_a_parameter_as_before() -> None:
    module, plain = Twice(), Twice()
    _held(module, torch.bfloat16, Run(""))
    weight: Any = module.layer.weight
    assert isinstance(weight, HalfCopy)
    give_back(weight, plain.layer.weight.data.clone())
    assert type(module.layer.weight) is nn.Parameter
    assert torch.equal(module.layer.weight, plain.layer.weight)
    assert not {"label", "run", "uses", "total", "in_fp32", "handed_out"} & vars(module.layer.weight).keys()
