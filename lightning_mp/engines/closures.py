"""Closures handed to optimizers that may evaluate one of their own accord (SAM and its kind)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_mp.errors import Fault, PlanError


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
    """What a second evaluation under loss scaling comes to.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        "an optimizer that evaluates its closure again, under loss scaling",
        "optimizers that step once a batch, since the loss scale may change between two evaluations",
        "use AdamW or SGD, or a precision without loss scaling ('bf16-mixed', '32-true')",
    )
    raise PlanError([fault])
