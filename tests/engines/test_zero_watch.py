"""What users do behind a ZeRO optimizer's back is seen: gradients looked for, weights changed, parameters left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp.engines.zero_watch import GradientsElsewhere, Weights


def _clips(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def _multiplies(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2.0)


def _sets(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)


LOOKED_FOR: dict[str, Callable[[nn.Module], Any]] = {"clips": _clips, "multiplies": _multiplies, "sets": _sets}


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_a_gradient_that_is_looked_for_in_a_hook_is_refused(name: str) -> None:
    module = nn.Linear(2, 2)
    with GradientsElsewhere(), pytest.raises(RuntimeError, match=r"Got parameter\.grad before the step, with ZeRO"):
        LOOKED_FOR[name](module)


def test_what_has_a_gradient_or_trains_nothing_may_be_asked() -> None:
    here, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    here.grad = torch.ones(2)
    with GradientsElsewhere():
        assert here.grad is not None
        assert frozen.grad is None
        assert torch.ones(2, requires_grad=True).grad is None


def _watched(decay: bool = False) -> tuple[nn.Sequential, Weights]:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[2].requires_grad_(False)
    return module, Weights(module.named_parameters(), {id(p): decay for p in module.parameters()})


@pytest.mark.parametrize(("decay", "earlier", "moves", "refused"), [
    (True, False, False, True),  # it would decay
    (False, True, True, True),  # moments of an earlier gradient would move it
    (False, True, False, False),
    (False, False, True, False),  # moments of 0
])  # fmt: skip
def test_a_parameter_without_a_gradient_is_refused_where_a_step_would_change_it(
    decay: bool, earlier: bool, moves: bool, refused: bool
) -> None:
    module, weights = _watched(decay)
    if earlier:
        module(torch.ones(1, 2)).sum().backward()
        weights.refuse_left_out(moves)
        weights.stepped()
    module[0](torch.ones(1, 2)).sum().backward()
    if not refused:
        weights.refuse_left_out(moves)
        return
    with pytest.raises(RuntimeError, match=r"no gradient for '1\.weight' and 0 others"):
        weights.refuse_left_out(moves)


def test_a_parameter_that_is_unfrozen_in_a_run_is_refused() -> None:
    module, weights = _watched()
    weights.refuse_unfrozen()
    module[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'2\.weight' and 0 others unfrozen"):
        weights.refuse_unfrozen()


def test_the_hooks_are_taken_off() -> None:
    module, weights = _watched(decay=True)
    weights.release()
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="no gradient for"):
        weights.refuse_left_out(moves=False)
