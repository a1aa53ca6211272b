"""The norms that users take, by Lightning's ``grad_norm`` and torch's ``clip_grad_norm_``, where ranks hold pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import called_by_grad_norm
from lightning_mp.compat.torch_sharding import take_total_norms_by
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics import grad_norm, grads

_NORM: Any = Tensor.norm


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
