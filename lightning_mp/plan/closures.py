"""The closure that an optimizer is given: it returns the loss of the pass that has run already."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import version
from lightning_mp.numerics.grads import local, parameters_of

#: A write through ``.data`` counts no version. So the values of this many parameters are compared, in their first rows,
#: of this many numbers at most: a copy of whole weights would cost memory in every step.
_SAMPLES, _SAMPLE_SIZE = 4, 1024


class EvaluatedClosure:
    """A closure for one step of an optimizer, after forward and backward have run.

    The first call returns their loss, as an optimizer that calls its closure first expects. A later call, or one after
    the optimizer has moved its weights or dropped gradients (SAM), asks for another pass.

    Args:
        loss: what the pass returned.
        optimizer: the optimizer that is about to step.
        run_again: runs the pass again and returns its loss, or raises an error. It is told by True that the optimizer
            moved its weights without a use of the gradients, so that the first pass was of no use.
    """

    def __init__(self, loss: Any, optimizer: Optimizer, run_again: Callable[[bool], Any]) -> None:
        self._loss = loss
        self._run_again = run_again
        self._is_called = False
        updated = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        self._gradients = [(parameter, id(parameter.grad), version(parameter.grad)) for parameter in updated]
        self._versions = [(parameter, version(parameter)) for parameter in updated]
        dense = [parameter for parameter in updated if parameter.layout is torch.strided]
        smallest = nsmallest(_SAMPLES, dense, key=methodcaller("numel"))
        self._values = [(parameter, _first_numbers(parameter).clone()) for parameter in smallest]

    def __call__(self) -> Any:
        """Return the loss of the pass that has run, or of another pass; what ``run_again`` raises is raised."""
        first_call = not self._is_called
        self._is_called = True
        gradients_used = not first_call or self._gradients_changed()
        if not gradients_used and not self._weights_moved():
            return self._loss
        with torch.enable_grad():
            return self._run_again(not gradients_used)

    def _gradients_changed(self) -> bool:
        """True if a gradient was dropped or written to since the step began."""
        now = [(parameter, id(parameter.grad), version(parameter.grad)) for parameter, *_ in self._gradients]
        return any(new[1:] != old[1:] for new, old in zip(now, self._gradients, strict=True))

    def _weights_moved(self) -> bool:
        """True if a weight was written to since the step began; a device sync."""
        if any(version(parameter) != before for parameter, before in self._versions):
            return True
        pairs = ((_first_numbers(parameter), before) for parameter, before in self._values)
        return not all(torch.allclose(now, before, 0, 0, equal_nan=True) for now, before in pairs)


def _first_numbers(parameter: Tensor) -> Tensor:
    """Return a view of the first numbers of this rank's part of a parameter, ``_SAMPLE_SIZE`` at most."""
    numbers = local(parameter).detach()
    while numbers.dim() > 1 and numbers.numel() > _SAMPLE_SIZE:
        numbers = numbers[0]
    return numbers[:_SAMPLE_SIZE] if numbers.dim() else numbers
