"""Optimizers that evaluate a closure themselves: always (LBFGS), or of their own accord (SAM and its kind)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.policy import PrecisionPolicy


def refuse_under_scaling(optimizers: Iterable[Optimizer], policy: PrecisionPolicy, faults: Faults) -> None:
    """Note each of ``optimizers``, which evaluate the closure themselves, beside a loss scale."""
    for optimizer in optimizers:
        faults.add(
            f"{type(optimizer).__name__} with precision={policy.precision!r}",
            "an optimizer that does not evaluate the closure itself, since the loss scale may change in between",
            "use AdamW or SGD, or a precision without loss scaling ('bf16-mixed', '32-true')",
        )


class Evaluated:
    """A closure that was evaluated once already: the first call returns that, later ones go to ``again``."""

    def __init__(self, result: Any, again: Callable[[], Any]) -> None:
        self._result, self._again, self._fresh = result, again, True

    def __call__(self) -> Any:
        if self._fresh:
            self._fresh = False
            return self._result
        return self._again()


def refuse() -> Any:
    """A second evaluation of the closure under loss scaling.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        "an optimizer that evaluates its closure again, under loss scaling",
        "optimizers that step once a batch, since the loss scale may change between two evaluations",
        "use AdamW or SGD, or a precision without loss scaling ('bf16-mixed', '32-true')",
    )
    raise PlanError([fault])
