"""Models made on the meta device: their tensors are made unit by unit, initialised, and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat.torch import own_reset
from lightning_mp.compat.transformers import IS_INITIALIZED, initialiser
from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import named_submodules
from lightning_mp.numerics.dtypes import TORCH_DTYPES

_FLOATING = (*TORCH_DTYPES.values(), torch.float64)


def cannot_initialise(model: nn.Module, faults: Faults) -> None:
    """Note modules on the meta device that nothing says how to initialise."""
    for name, module in (("", model), *named_submodules(model)):
        if any(map(_is_meta, _own(module).values())) and not _initialisers(module, model):
            faults.add(
                f"module {name or type(model).__name__!r} on the meta device, which has no reset_parameters()",
                "give the module reset_parameters(), or build it outside init_module(empty_init=True)",
            )


def materialize(
    unit: nn.Module, root: nn.Module, place: torch.device, device: torch.device, *, recurse: bool = True
) -> None:
    """Make what ``unit`` has on the meta device at ``place``, initialise it, and broadcast rank 0's values.

    Ties hold; the first owner of a tied weight decides its values. ``device`` is what the ranks communicate over.
    Without ``recurse`` only what is ``unit``'s own is made, not what is in modules below it.

    Raises:
        PlanError: a module's initialisation left a tensor untouched.
    """
    every = list(unit.modules() if recurse else (unit,))
    waiting = [module for module in every if any(map(_is_meta, _own(module).values()))]
    if not waiting:
        return
    kept = {id(one): one for module in waiting for one in _own(module).values() if _is_meta(one)}
    made = {key: _marked(one, place) for key, one in kept.items()}
    for module in root.modules():  # wherever it is tied
        for key, tensor in _own(module).items():
            if id(tensor) in made:
                setattr(module, key, made[id(tensor)])
    with torch.no_grad():
        for module in reversed(waiting):  # children before parents, as ``apply`` does
            for initialiser in _initialisers(module, root):
                initialiser()
    _refuse_untouched(made.values(), root)
    for tensor in made.values():
        there = tensor.detach().to(device)
        dist.broadcast(there, src=0)
        if there.device != tensor.device:
            tensor.detach().copy_(there)


def _refuse_untouched(made: Iterable[Tensor], root: nn.Module) -> None:
    untouched = {id(one) for one in made if one.dtype in _FLOATING and bool(one.detach().isnan().any())}
    with Faults("strategy") as faults:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()) if untouched else ():
            if id(tensor) in untouched:
                faults.add(
                    f"{name!r} on the meta device, which its module's initialisation leaves as it is",
                    "set it in reset_parameters(), or build the module outside init_module(empty_init=True)",
                )


def _own(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)])


def _is_meta(tensor: Tensor) -> bool:
    return tensor.is_meta


def _marked(tensor: Tensor, place: torch.device) -> Tensor:
    """A tensor like it at ``place``, of NaN where it is floating: a mark of not being initialised."""
    new: Tensor = torch.empty_like(tensor.detach(), device=place)
    if new.dtype in _FLOATING:
        new.fill_(float("nan"))
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key != IS_INITIALIZED:
            setattr(new, key, value)
    return new


def _initialisers(module: nn.Module, root: nn.Module) -> list[Callable[[], Any]]:
    """The module's own ``reset_parameters``, then ``_init_weights`` of the innermost model around it that has it.

    That is transformers' convention, and of many others.
    """
    own = own_reset(module)
    inside = [one for one in root.modules() if initialiser(one) and any(part is module for part in one.modules())]
    around = initialiser(inside[-1]) if inside else None
    return [*([own] if own else []), *([partial(around, module)] if around else [])]
