"""The scaler of the modes without loss scaling: gradients are checked as under a loss scale, and stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.numerics.found_inf import FoundInf
from lightning_mp.numerics.grads import gradients, parameters_of, step_unless, unscale_and_check_

LossT = TypeVar("LossT")


class NoOpScaler:
    """What an engine asks of a ``LossScaler``, with a scale of 1 that never moves.

    With ``checks=False`` gradients are not even looked at, and every step is applied.
    """

    def __init__(self, found_inf: FoundInf, device: torch.device, *, checks: bool) -> None:
        self.flags, self.checks, self._device = found_inf, checks, device
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def scale(self, outputs: LossT) -> LossT:
        """The loss itself."""
        return outputs

    def multiply_back_(self, optimizers: Iterable[Optimizer]) -> None:
        """A backward pass begins: what was seen of gradients that were not stepped with is forgotten."""
        for optimizer in optimizers:
            self.flags.drop(id(optimizer))

    def divide_(self, optimizers: Iterable[Optimizer]) -> None:
        """Nothing: gradients are always in true units."""

    def look_(self, optimizer: Optimizer) -> None:
        """Note whether the gradients, as they are now, are finite on this rank."""
        if self.checks:
            self.check_(parameters_of(optimizer), self.flags.of(optimizer, self._device))

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """Look at the gradients once more: 1 where they are not finite on some rank, else 0."""
        self.look_(optimizer)
        flag = self.flags.of(optimizer, self._device)
        self.flags.drop(id(optimizer))
        if self.checks:
            self.flags.reduce_(flag)
        return flag

    def check_(self, parameters: Iterable[Tensor], flag: Tensor) -> None:
        """Set ``flag`` to 1 where a gradient of this rank is not finite."""
        unscale_and_check_(gradients(parameters), self._one, flag)

    def step_checked(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the optimizer, or leave everything as it is if a gradient that was looked at is not finite.

        Returns what the optimizer returned, ``None`` where the host knows of a skip.
        """
        flag = self.flags.of(optimizer, self._device)
        self.flags.drop(id(optimizer))
        if self.checks:
            self.flags.reduce_(flag)
        self.flags.begin_step(flag)
        with self.flags.stepping():
            if not self.checks:
                return optimizer.step(**kwargs)
            return step_unless(optimizer, flag, self.flags.read, **kwargs)

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Take note of a step that was checked and made elsewhere, with its flag."""
        self.flags.begin_step(found_inf)

    def counts(self) -> int:
        """Every skip counts against the budget."""
        return 1

    def stepped(self, optimizer: Optimizer) -> bool:
        """No step is waited for."""
        return False

    def update(self) -> None:
        """Nothing to adjust."""

    def forget(self) -> None:
        """Drop what is known of gradients."""
        self.flags.clear()
