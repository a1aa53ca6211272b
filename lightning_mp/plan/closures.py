"""A closure for an optimizer whose forward and backward pass has run already."""

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

#: The number of small parameters whose values are compared, and the greatest number of values of
#: each. Versions are not enough, because a write through ``.data`` does not raise the version of a
#: tensor. A copy of whole weights would cost memory in every step.
_SAMPLES, _SAMPLE_SIZE = 4, 1024


class EvaluatedClosure:
    """A closure for one step of an optimizer, after forward and backward have run.

    The first call returns the loss of that pass, unless the optimizer has changed weights, or has
    dropped or changed gradients (SAM). Then, and in later calls, another pass runs.

    Args:
        loss: the value that the pass returned.
        optimizer: the optimizer that is about to step. The first numbers of its smallest parameters
            are copied.
        run_again: runs the pass again and returns its loss, or raises an error. Its argument is
            True if the optimizer changed its weights without using the gradients, so that the first
            pass was useless.
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
        """Return the loss of the pass that has run, or of another pass.

        Errors of ``run_again`` are not caught.
        """
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
        """True if a weight was written to since the step began.

        A device sync if versions are equal. A write through ``.data`` is noticed only in the first
        numbers of the smallest parameters.
        """
        if any(version(parameter) != before for parameter, before in self._versions):
            return True
        pairs = ((_first_numbers(parameter), before) for parameter, before in self._values)
        return not all(torch.allclose(now, before, 0, 0, equal_nan=True) for now, before in pairs)


def _first_numbers(parameter: Tensor) -> Tensor:
    """Return a view of the first ``_SAMPLE_SIZE`` numbers, at most, of this rank's shard."""
    numbers = local(parameter).detach()
    while numbers.dim() > 1 and numbers.numel() > _SAMPLE_SIZE:
        numbers = numbers[0]
    return numbers[:_SAMPLE_SIZE] if numbers.dim() else numbers
