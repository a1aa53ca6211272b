"""Finds who computes in a step with a weight of a unit that is sharded then: each rank has a piece of it, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.errors import Fault, PlanError


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
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            self._read = self._name_in((*args, *(kwargs or {}).values())) or self._read
            self.explain(error)
            raise
        used = isinstance(result, Tensor) and result.requires_grad and result is not args[0]
        name = self._name_in((*args, *(kwargs or {}).values())) if used else None
        if name is not None and self._silent:
            raise PlanError([_fault(name)])
        self._read = self._read or name
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
                name = self._names.get(id(one)) if isinstance(one, Tensor) and self._away(one) else None
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
