"""What users do behind a ZeRO optimizer's back is seen: gradients looked for, parameters left out or frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_mp.deepspeed.engine import Gradients, GradientsElsewhere


def _clips(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def _sets(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(("change", "said"), [(_clips, "gradients clipped by hand"), (_sets, r"parameter\.grad set")])
def test_a_change_of_gradients_in_a_hook_is_refused(change: Callable[[nn.Module], Any], said: str) -> None:
    with GradientsElsewhere(), pytest.raises(RuntimeError, match=f"(?i){said} before the step, with ZeRO"):
        change(nn.Linear(2, 2))


def _under(reads: GradientsElsewhere, module: nn.Module) -> dict[str, float]:
    with reads:
        return grad_norm(module, norm_type=2)


def test_who_reads_gradients_in_a_hook_finds_none_and_is_warned_once() -> None:
    module, reads = nn.Linear(2, 2), GradientsElsewhere()
    with pytest.warns(UserWarning, match=r"utilities.grads reads parameter\.grad, which is None here") as said:
        norms = _under(reads, module), _under(reads, module)
    assert norms == ({}, {})
    assert len(said) == 1
    assert "safe_get_full_grad" in str(said[0].message)


@pytest.fixture
def module() -> nn.Sequential:
    """Two trained layers and a frozen one."""
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    layers[2].requires_grad_(False)
    return layers


def _pass(module: nn.Sequential, *used: int) -> None:
    x = torch.ones(1, 2)
    for place in used:
        x = module[place](x)
    x.sum().backward()


@pytest.mark.parametrize("by_window", [False, True])
def test_each_pass_has_to_reach_every_trained_parameter_or_where_zero_can_each_window(
    module: nn.Sequential, by_window: bool
) -> None:
    gradients = Gradients(module.named_parameters(), compares=False, by_window=by_window)
    _pass(module, 0, 1, 2)
    gradients.finish_pass(ends_window=True)
    gradients.begin_window()
    _pass(module, 0)
    if by_window:
        gradients.finish_pass(ends_window=False)
        _pass(module, 1)
        gradients.finish_pass(ends_window=True)
        gradients.begin_window()
        _pass(module, 0)
    with pytest.raises(RuntimeError, match=r"'1\.weight' and 0 others without a gradient in a backward pass"):
        gradients.finish_pass(ends_window=by_window)


def test_what_is_frozen_or_unfrozen_in_a_run_is_known_by_name(module: nn.Sequential) -> None:
    gradients = Gradients(module.named_parameters(), compares=False, by_window=False)
    assert gradients.changed(module.named_parameters()) == []
    module[0].requires_grad_(False)
    module[2].requires_grad_(True)
    assert gradients.changed(module.named_parameters()) == ["0.weight", "2.weight"]
