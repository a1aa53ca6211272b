"""Lightning's ``grad_norm``, which users call in hooks, where every rank has a piece of each gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import called_by_grad_norm
from lightning_mp.errors import Fault, PlanError

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
