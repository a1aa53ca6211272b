"""What users do behind a ZeRO optimizer's back is seen: gradients looked for, weights changed, parameters left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_mp.engines.zero import GradientsElsewhere, Weights


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
        weights.stepped()
    module[0](torch.ones(1, 2)).sum().backward()
    if not refused:
        weights.refuse(moves=moves)
        return
    with pytest.raises(RuntimeError, match=r"'1\.weight' and 0 others without a gradient"):
        weights.refuse(moves=moves)


def test_a_parameter_that_is_unfrozen_in_a_run_is_refused() -> None:
    module, weights = _watched()
    weights.refuse(moves=False)
    module[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'2\.weight' and 0 others unfrozen"):
        weights.refuse(moves=False)
