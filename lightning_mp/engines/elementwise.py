"""Whether an optimizer may be given pieces of parameters: found out by giving it some."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_mp.engines.closures import parts
from lightning_mp.numerics.grads import parameters_of

#: torch's that treat every number by itself
_ELEMENTWISE = frozenset[type[Optimizer]](
    (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
)
_SHAPE, _STEPS, _RATE = (8, 16), 2, 1e-2
#: of the largest update; the pieces of an elementwise optimizer differ in the last bits
_WITHIN = 1e-3


def fault_on_flat_pieces(optimizer: Optimizer) -> str | None:
    """Why ``optimizer`` cannot step on flat pieces of its parameters; ``None`` where it can, or cannot be tried."""
    return _tried(optimizer, lambda whole: [piece.clone() for piece in whole.reshape(-1).chunk(2)])


def fault_on_dtensors(optimizer: Optimizer) -> str | None:
    """The same on the DTensors that FSDP2 makes of its parameters; every rank calls it."""
    example = next((p for p in parameters_of(optimizer) if isinstance(p, DTensor)), None)
    if example is None:
        return None
    mesh, placements = example.device_mesh, example.placements
    return _tried(optimizer, lambda whole: [distribute_tensor(whole.clone(), mesh, placements)])


#: what is allowed where an optimizer gets pieces, and what to do
INSTEAD = (
    "an optimizer that updates each number by itself (AdamW, SGD, Lion)",
    "use one of these, or strategy='mp_ddp'",
)


def _tried(optimizer: Optimizer, split: Callable[[Tensor], Sequence[Tensor]]) -> str | None:
    """Step on a small parameter as a whole, and by an optimizer for each of its pieces; a wrapper by what it holds."""
    return next((why for part in parts(optimizer) if (why := _tried_alone(part, split))), None)


def _tried_alone(optimizer: Optimizer, split: Callable[[Tensor], Sequence[Tensor]]) -> str | None:
    if type(optimizer) in _ELEMENTWISE:
        return None
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for p in parameters_of(optimizer)), torch.device("cpu"))
    start, *slopes = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(1 + _STEPS))
    with torch.random.fork_rng():
        try:
            whole = _stepped(optimizer, [start], [[slope] for slope in slopes])
        except Exception:  # it wants arguments that are not known, or more than a step: nothing can be said
            return None
        try:
            pieces = [
                _stepped(optimizer, [piece], [[split(slope)[index]] for slope in slopes])
                for index, piece in enumerate(split(start))
            ]
        except Exception as error:
            return f"which fails on them: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = torch.cat([_whole(piece).reshape(-1) for piece in pieces]).reshape(_SHAPE)
    off = (found - whole).abs().max() / (whole - start).abs().max().clamp(min=1e-12)
    return None if off < _WITHIN else "whose step depends on the parameter as a whole"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stepped(optimizer: Optimizer, starts: Sequence[Tensor], slopes: Sequence[Sequence[Tensor]]) -> Tensor:
    """The parameter after a step for each of ``slopes`` of a new optimizer, made as ``optimizer`` was."""
    made = [nn.Parameter(start.clone()) for start in starts]
    names = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in names}
    if isinstance(settings.get("lr"), (float, Tensor)):
        settings["lr"] = _RATE  # a warm-up may begin at 0
    again: Any = type(optimizer)
    again = again(made, **settings)
    for slope in slopes:
        for parameter, gradient in zip(made, slope, strict=True):
            parameter.grad = gradient.clone()
        again.step()
    return made[0].detach()
