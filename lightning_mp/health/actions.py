"""What is done about an alert: log it, skip the step, lower the learning rate for a while, or stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat.lightning import Trainer
from lightning_mp.compat.torch import waits_for_unscale
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads
from lightning_mp.record.events import KINDS, Kind

Action = Literal["log", "skip", "reduce_lr", "stop"]
#: the kinds that are known before the optimizer steps
KNOWN_EARLY: tuple[Kind, ...] = ("nonfinite_loss", "nonfinite_grad", "grad_norm_spike", "loss_divergence")
#: by how much ``"reduce_lr"`` lowers the learning rate, and for how many steps
FACTOR, STEPS = 0.1, 100


class ReduceLR:
    """Multiplies the learning rate by 0.1 for the next 100 optimizer steps, on top of any scheduler.

    Rates are multiplied during ``optimizer.step`` only, so that no scheduler, logger or checkpoint ever sees them.
    """

    def __init__(self) -> None:
        self._end = 0
        self._handles: list[Any] = []
        self._own: list[tuple[dict[str, Any], Any]] = []

    @property
    def factor(self) -> float:
        """What the current learning rate will be multiplied by in the coming step; 1 within it."""
        return FACTOR if self._handles and not self._own else 1.0

    def start(self, trainer: Trainer) -> None:
        """Begin with the next optimizer step; a reduction that is active restarts, and never multiplies twice."""
        self.release()
        self._end = trainer.global_step + STEPS
        for outer in trainer.optimizers:
            optimizer: Any = outer
            while not isinstance(optimizer, Optimizer):  # DeepSpeed puts its own around it
                optimizer = optimizer.optimizer
            self._handles.append(optimizer.register_step_pre_hook(self._lower))
            self._handles.append(optimizer.register_step_post_hook(self._restore))

    def after_batch(self, trainer: Trainer) -> None:
        """A training batch is over: end the reduction after its last step."""
        if trainer.global_step >= self._end:
            self.release()

    def release(self) -> None:
        """End the reduction, even inside a step that failed."""
        self._restore()
        while self._handles:
            self._handles.pop().remove()

    def _lower(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()
        for group in optimizer.param_groups:
            self._own.append((group, group["lr"]))
            group["lr"] = group["lr"] * FACTOR

    def _restore(self, *_: Any) -> None:
        for group, lr in self._own:
            group["lr"] = lr
        self._own.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_own": []}


def parse(actions: Mapping[str, Action] | None, faults: Faults) -> dict[Kind, Action]:
    """The action for each kind of event that has one; unknown ones are noted in ``faults``."""
    for kind, given in (actions or {}).items():
        if kind not in KINDS:
            faults.unknown("kind of event", kind, KINDS)
        elif given == "skip" and kind not in KNOWN_EARLY:
            kinds = ", ".join(KNOWN_EARLY)
            faults.add(f"actions[{kind!r}]='skip', which is known only after the step", fix=f"'skip' works for {kinds}")
        faults.one_of(f"actions[{kind!r}]", given, get_args(Action), "use 'log'")
    return cast("dict[Kind, Action]", dict(actions or {}))


def suppress(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """Make the coming step do nothing: torch's optimizers skip a parameter without a gradient.

    ``scaler`` is torch's, if the run has one: a fused optimizer leaves unscaling to its step, which would find none.
    """
    if scaler is not None and waits_for_unscale(scaler, optimizer):
        scaler.unscale_(optimizer)
    grads.drop(optimizer)
