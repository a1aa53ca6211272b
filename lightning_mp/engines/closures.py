"""Optimizers that evaluate a closure themselves: always (LBFGS), or of their own accord (SAM and its kind)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat.lightning import LightningModule, MisconfigurationException, ParallelStrategy
from lightning_mp.compat.torch import copied
from lightning_mp.engines import optimizer_facts
from lightning_mp.errors import Fault, Faults, NonFiniteError, PlanError
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics import grads
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
    """A closure that was evaluated before the optimizer's step: its first call returns that, later ones evaluate again.

    SAM as it is mostly written uses the gradients at hand and takes them away before it calls the closure at all.
    """

    def __init__(self, optimizer: Optimizer, result: Any, again: Callable[[], Any]) -> None:
        self._optimizer, self.result, self.again = optimizer, result, again
        #: the optimizer has called it
        self.called = False
        #: the optimizer has had it evaluated again
        self.evaluated_again = False
        #: called after every further evaluation
        self.look: Callable[[], None] = lambda: None

    def require_called(self) -> None:
        """As in stock Lightning, where nothing else would have run the batch.

        Raises:
            MisconfigurationException: the optimizer takes a closure and did not call it.
        """
        if not self.called:
            raise MisconfigurationException(
                f"The closure hasn't been executed: {type(self._optimizer).__name__}.step(closure) did not call it. "
                "Call it there, or leave the argument out."
            )

    def __call__(self) -> Any:
        first, self.called = not self.called, True
        if first and any(parameter.grad is not None for parameter in grads.parameters_of(self._optimizer)):
            return self.result
        self.evaluated_again = True
        result = self.again()
        self.look()
        return result


def refuse(optimizer: Optimizer, policy: PrecisionPolicy) -> Any:
    """A second evaluation of the closure under loss scaling.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        f"{type(optimizer).__name__}, which evaluates its closure again, with precision={policy.precision!r}",
        "optimizers that step once a batch, since the loss scale may change between two evaluations",
        "use AdamW or SGD, or a precision without loss scaling ('bf16-mixed', '32-true')",
    )
    raise PlanError([fault])


def refuse_past_the_plan(optimizer: Optimizer, policy: PrecisionPolicy) -> None:
    """A step that nobody asked the plan for, under loss scaling.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        f"{type(optimizer).__name__}.step() called past the plan, which has to unscale and check, with "
        f"precision={policy.precision!r}",
        "steps of the optimizer that Lightning hands to optimizer_step, or that self.optimizers() returns",
        "call super().optimizer_step(...), or optimizer.step(closure=...) on that optimizer, not on what it wraps",
    )
    raise PlanError([fault])


def moved_already(optimizer: Optimizer, step: int) -> NonFiniteError:
    """An optimizer that evaluates its closure again found the value after it had moved the weights."""
    fault = Fault(
        f"a non-finite value at step {step} when {type(optimizer).__name__} evaluated its closure again",
        "non-finite values in the first evaluation, before weights are moved",
        "use an optimizer that evaluates once, such as AdamW, or lower its step size",
    )
    return NonFiniteError(str(fault), step=step)


def without_gradients(optimizer: Optimizer) -> dict[str, Any]:
    """The keywords of a step that only has to make state: a closure where the optimizer may call one."""
    return {"closure": lambda: torch.zeros(())} if optimizer_facts.takes_closure(optimizer) else {}


class Before:
    """Weights and state of an optimizer, and of those inside of it, as they were before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = [p for p in grads.parameters_of(optimizer) if not is_remote(p)]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        known: dict[int, Any] = {id(parameter): parameter for parameter in self._parameters}
        inner = list(parts(optimizer))
        # state made of a tensor subclass may have no clone of its own: torchao's has none
        kept = [value for part in inner for state in part.state.values() for value in state.values()]
        known |= {id(value): copied(value) for value in kept if isinstance(value, Tensor)}
        self._state = [(part, *deepcopy((dict(part.state), _options(part)), known)) for part in inner]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.copy_(value)
        for part, state, options in self._state:
            part.state.clear()
            part.state.update(state)
            for group, values in zip(part.param_groups, options, strict=True):
                group.update(values)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer, and those that it holds."""
    yield optimizer
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer):
            yield from parts(inner)


def run_again(optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> Tensor | None:
    """The last batch again, forward and backward, this rank's gradients alone."""
    optimizer.zero_grad()
    strategy = model.trainer.strategy
    with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext():
        return closure()
