"""What hooks read and write under ZeRO is watched, also within other modes that handle torch's functions."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")
from lightning_mp.deepspeed.engine import GradientsElsewhere
from lightning_mp.deepspeed.partitioned import PartitionedWeights

#: modes that may be around a hook's code, inside of the one that watches
INNER: dict[str, Any] = {
    "none": lambda weight: [],
    "weights of ZeRO-3": lambda weight: [PartitionedWeights([("weight", weight)])],
    "a default device": lambda weight: [torch.device("cpu")],
    "both": lambda weight: [PartitionedWeights([("weight", weight)]), torch.device("cpu")],
}


def within(*modes: AbstractContextManager[Any]) -> ExitStack:
    stack = ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


@pytest.mark.parametrize("inner", INNER)
def test_gradients_that_a_hook_clips_are_refused_within_other_modes(inner: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    with within(GradientsElsewhere(), *INNER[inner](weight)), pytest.raises(RuntimeError, match="clipped by hand"):
        nn.utils.clip_grad_norm_([weight], 1.0)


@pytest.mark.parametrize("inner", INNER)
def test_a_gradient_that_a_hook_reads_is_said_to_be_none_within_other_modes(inner: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    with within(GradientsElsewhere(), *INNER[inner](weight)), pytest.warns(UserWarning, match=f"^{__name__} reads"):
        assert weight.grad is None


@pytest.mark.parametrize("device", [False, True])
def test_a_write_to_a_partitioned_weight_is_refused_within_a_default_device(device: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    modes = [PartitionedWeights([("weight", weight)]), *([torch.device("cpu")] if device else [])]
    with within(*modes), pytest.raises(RuntimeError, match="'weight' written to"):
        weight.data.mul_(2)
