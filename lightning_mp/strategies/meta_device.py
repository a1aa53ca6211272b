"""Models made on the meta device: their tensors are made unit by unit, initialised, and broadcast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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
_INTEGER = (torch.int64, torch.int32)


def cannot_initialise(model: nn.Module, faults: Faults, also: str = "") -> None:
    """Note modules on the meta device that nothing says how to initialise; ``also``: what else helps."""
    for name, module in (("", model), *named_submodules(model)):
        if _on_meta(module) and own_reset(module) is None and _initialiser_around(module, model) is None:
            faults.add(
                f"module {name or type(model).__name__!r} on the meta device, which has no reset_parameters()",
                f"give the module reset_parameters(), {also}or build it outside init_module(empty_init=True)",
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
    waiting = [module for module in (unit.modules() if recurse else (unit,)) if _on_meta(module)]
    if not waiting:
        return
    made = _make(waiting, root, place)
    for module in reversed(waiting):  # children before parents, as ``apply`` does
        initialise(module, root)
    _refuse_untouched(made, root)
    for tensor in made:
        there = tensor.detach().to(device)
        dist.broadcast(there, src=0)
        if there.device != tensor.device:
            tensor.detach().copy_(there)


def _on_meta(module: nn.Module) -> bool:
    tensors: Iterable[Tensor] = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def _make(waiting: Iterable[nn.Module], root: nn.Module, place: torch.device) -> list[Tensor]:
    """Replace meta tensors by ones that hold a mark of not being initialised; wherever ``root`` has them."""
    made: dict[int, Tensor] = {}
    for module in waiting:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_meta and id(tensor) not in made:
                made[id(tensor)] = _marked(tensor, place)
    kept: list[Tensor] = []  # an id is a tensor's own for as long as that is alive
    for module in root.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for key, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) in made:
                kept.append(tensor)
                setattr(module, key, made[id(tensor)])
    return list(made.values())


def _marked(tensor: Tensor, place: torch.device) -> Tensor:
    new: Tensor = torch.empty_like(tensor.detach(), device=place)
    if new.dtype in _FLOATING:
        new.fill_(float("nan"))
    elif new.dtype in _INTEGER:
        new.fill_(torch.iinfo(new.dtype).min)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key != IS_INITIALIZED:
            setattr(new, key, value)
    return new


def initialise(module: nn.Module, root: nn.Module) -> None:
    """By the module's own ``reset_parameters``, then as the model around it initialises its modules."""
    reset, around = own_reset(module), _initialiser_around(module, root)
    with torch.no_grad():
        if reset is not None:
            reset()
        if around is not None:
            around(module)


def _initialiser_around(module: nn.Module, root: nn.Module) -> Callable[[nn.Module], Any] | None:
    """``_init_weights`` of the innermost model that has it: transformers' convention, and of many others."""
    found = None
    for candidate in root.modules():
        method = initialiser(candidate)
        if method is not None and _takes_one(method) and any(inner is module for inner in candidate.modules()):
            found = method
    return found


def _takes_one(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def _refuse_untouched(made: Iterable[Tensor], root: nn.Module) -> None:
    untouched = {id(tensor) for tensor in made if _still_marked(tensor)}
    with Faults("strategy") as faults:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()) if untouched else ():
            if id(tensor) in untouched:
                faults.add(
                    f"{name!r} on the meta device, which its module's initialisation leaves as it is",
                    "set it in reset_parameters(), or build the module outside init_module(empty_init=True)",
                )


def _still_marked(tensor: Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.dtype in _FLOATING:
        return bool(tensor.isnan().any())
    return tensor.dtype in _INTEGER and bool((tensor == torch.iinfo(tensor.dtype).min).any())
