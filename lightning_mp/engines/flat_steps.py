"""Whether an optimizer steps each number by itself, found by letting a copy of it step: flat shards need that."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import without_step_hooks

#: where a flat tensor of two rows is cut, neither at a row's end nor in its middle
_CUT = 5
_MATRIX = torch.linspace(-1.0, 2.0, 12).view(2, 6)
_GRADIENTS = (torch.linspace(-2.0, 0.5, 12).view(2, 6).sin(), torch.linspace(1.0, 3.0, 12).view(2, 6).cos())


def steps_alone(optimizer: Optimizer) -> bool:
    """Whether a copy of it steps a matrix without a closure, and without an optimizer inside that holds the weights."""
    try:
        return not torch.equal(_whole(optimizer), _MATRIX)
    except Exception:  # whatever it needs, a matrix on the CPU is not all
        return False


def why_not(optimizer: Optimizer) -> str | None:
    """Why pieces of a flat tensor would not step as the tensor itself does; None where they do, or nothing is known.

    A copy of the optimizer takes two steps on a small matrix, and two on the same numbers, flat and in two pieces.
    ``optimizer``, its parameters and the generators stay as they are.
    """
    if not steps_alone(optimizer):
        return None
    try:
        pieces = _stepped(optimizer, _pieces(_MATRIX), [_pieces(gradient) for gradient in _GRADIENTS])
    except Exception as error:
        return f"it takes no flat tensors ({error})"
    same = torch.allclose(torch.cat(pieces), _whole(optimizer).flatten(), rtol=1e-4, atol=1e-6)
    return None if same else "what it does to a number depends on the other numbers of its tensor"


def _whole(optimizer: Optimizer) -> Tensor:
    return _stepped(optimizer, [_MATRIX], [[gradient] for gradient in _GRADIENTS])[0]


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [piece.clone() for piece in tensor.flatten().tensor_split([_CUT])]


def _stepped(optimizer: Optimizer, tensors: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """The tensors after a step for each of ``gradients``, with the options of the first group."""
    alike = without_step_hooks(optimizer)
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    alike.state = defaultdict(dict)
    alike.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    step = type(optimizer).step  # a scheduler has put a method of the original into its instance
    with torch.random.fork_rng(devices=[]):
        for each in gradients:
            for parameter, gradient in zip(parameters, each, strict=True):
                parameter.grad = gradient.clone()
            step(alike)
    return [parameter.detach() for parameter in parameters]
