"""What happened in a run, step by step, as a callback sees it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core import rank_zero
from torch import Tensor

from support.models import same_weights, weights
from support.running import fit


def optimizer_state(trainer: Trainer) -> list[Tensor]:
    return [
        value.detach().clone()
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def gradients(module: LightningModule) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


class Trace(Callback):
    """A list entry a training batch: weights and optimizer state after it, the plan's readings, the gradients seen.

    ``seen`` are the gradients ``on_before_optimizer_step`` saw, an entry a call.
    """

    module: Any

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[list[Tensor]] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self.global_steps: list[int] = []
        self.seen: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = weights(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen.append(gradients(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(weights(pl_module))
        self.states.append(optimizer_state(trainer))
        self.global_steps.append(trainer.global_step)
        plan: Any = trainer.precision_plugin
        if getattr(plan, "scaler", None) is not None:
            self.scales.append(plan.scaler.get_scale())
        if hasattr(plan, "step_skipped"):
            self.skipped.append(plan.step_skipped)


def traced(module: LightningModule, *callbacks: Callback, **options: Any) -> Trace:
    """What happened in a fit of ``module``; ``callbacks`` come before the trace."""
    trace = Trace()
    fit(module, callbacks=[*callbacks, trace], **options)
    trace.module = module
    return trace


def same_runs(one: Trace, other: Trace) -> bool:
    """Whether losses, and weights and optimizer state after each batch, are equal bit for bit."""
    assert one.module.losses == other.module.losses
    same = [*map(same_weights, one.weights, other.weights), *map(equal_states, one.states, other.states)]
    return len(one.weights) == len(other.weights) > 0 and all(same)


def equal_states(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def lightning_says() -> Iterator[list[str]]:
    """What is logged through Lightning's ``rank_zero_info`` meanwhile."""
    lines: list[str] = []
    logger, handler = rank_zero.log, _Lines(lines)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
