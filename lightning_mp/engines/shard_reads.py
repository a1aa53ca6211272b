"""What users read of shards: norms of gradients, which are those of whole ones, and weights outside of their unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import called_by_grad_norm
from lightning_mp.compat.torch_sharding import take_total_norms_by
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics import grad_norm, grads

_NORM: Any = Tensor.norm
_CASTS_AS = (Tensor.type_as, Tensor.to)
#: set on what was made of a sharded weight and has no gradient, to the weight's name
_MADE_OF = "lmp_made_of"


class WholeNorms(TorchFunctionMode):
    """Within it, the norms that ``grad_norm`` takes are those of whole gradients; of mere ``pieces`` none are taken."""

    def __init__(self, *, pieces: str | None) -> None:
        super().__init__()
        self._pieces = pieces

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _NORM or not called_by_grad_norm():
            return result
        if self._pieces is not None:
            fault = Fault(
                f"grad_norm(...) {self._pieces}",
                "torch.nn.utils.clip_grad_norm_(parameters, max_norm), which returns the norm over all shards",
                "log that, watch with TrainingHealth(), or use strategy='mp_fsdp2'",
            )
            raise PlanError([fault])
        return result.full_tensor() if isinstance(result, DTensor) else result


def sum_total_norms(engine: StepEngine, groups: Callable[[], grad_norm.Groups]) -> Callable[[], None]:
    """Have ``clip_grad_norm_`` clip the engine's gradients by the norm over ``groups``; what is returned ends that."""

    def total(
        own: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        members: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(p.grad) for optimizer in engine.optimizers for p in grads.parameters_of(optimizer)}
        if members and not any(id(member) in held for member in members):
            return own(members, norm_type, error_if_nonfinite, foreach)
        norm = own(members, norm_type, False, foreach)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        plain = torch.as_tensor(whole, dtype=torch.float32, device=engine.device)
        return grad_norm.over_shards(plain, norm_type, groups(), error_if_nonfinite=error_if_nonfinite)

    return take_total_norms_by(total)


class ShardReads(TorchFunctionMode):
    """Within it, a use of one of ``named`` that is ``away``, and of which a gradient would be taken.

    Args:
        named: the parameters as they are while they are sharded.
        away: whether one is.
        silent: torch would compute with the piece; else it fails sooner or later, and ``explain`` says why.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], away: Callable[[Tensor], bool], *, silent: bool
    ) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in named}
        self._away, self._silent = away, silent
        self._read: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of what is cast like a second tensor, the values of that one are not read
        name = self._name_in(args[:1] if func in _CASTS_AS else (*args, *(kwargs or {}).values()))
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            self._read = name or self._read
            self.explain(error)
            raise
        if name is None or not isinstance(result, Tensor) or result is args[0]:
            return result
        if result.requires_grad:
            if self._silent:
                raise PlanError([_fault(name)])
            self._read = self._read or name
        elif isinstance(result, DTensor):
            setattr(result, _MADE_OF, name)
        return result

    def explain(self, error: RuntimeError) -> None:
        """Name the weight that was used before torch failed so.

        Raises:
            PlanError: where one was, and the error is of the kind to which that leads.
        """
        kind = any(word in str(error) for word in ("DTensor", "size mismatch", "must be a matrix"))
        if self._read is not None and kind and not isinstance(error, PlanError):
            raise PlanError([_fault(self._read)]) from error

    def _name_in(self, arguments: Iterable[Any]) -> str | None:
        for one in arguments:
            if isinstance(one, (list, tuple)):
                name = self._name_in(cast("Iterable[Any]", one))
            else:
                away = isinstance(one, Tensor) and self._away(one)
                name = self._names.get(id(one)) or getattr(one, _MADE_OF, None) if away else None
            if name is not None:
                return name
        return None


def _fault(name: str) -> Fault:
    return Fault(
        f"{name!r} used in the step outside of the unit that holds it, whose weights are sharded there",
        "weights within their module's forward, and those of the root, which belong to no other unit",
        "call the module, or compute with the weight in its forward; pin or wrap what reads it, not it alone; "
        "weight_decay= in the optimizer for a penalty; or use strategy='mp_ddp'",
    )
