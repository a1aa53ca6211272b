"""What is done about an alert: log it, skip the step, lower the learning rate, stop, or call a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

from torch.optim import Optimizer

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.errors import Faults, did_you_mean, is_number
from lightning_mp.monitor.events import KINDS, Event, Kind
from lightning_mp.numerics import grads

Word = Literal["log", "skip", "reduce_lr", "stop"]
Call = Callable[[Event, Trainer, LightningModule], Any]
#: the kinds that are known before the optimizer steps
KNOWN_EARLY: tuple[Kind, ...] = ("nonfinite_loss", "nonfinite_grad", "grad_norm_spike", "loss_divergence")
_ALLOWED = "'log', 'skip', 'stop', 'reduce_lr', ReduceLR(factor, steps), or a callable(event, trainer, pl_module)"


class ReduceLR:
    """Multiplies the learning rate by ``factor`` for the next ``steps`` optimizer steps, on top of any scheduler.

    Rates are multiplied during ``optimizer.step`` only, so that no scheduler, logger or checkpoint ever sees them.

    Raises:
        PlanError: a factor that is not at least 0 and below 1, or no whole number of steps.
    """

    def __init__(self, factor: float = 0.1, steps: int = 100) -> None:
        with Faults("ReduceLR") as faults:
            if not is_number(factor) or not 0 <= factor < 1:
                faults.add(f"factor={factor!r}", "0 <= factor < 1", "use factor=0.1")
            faults.whole("steps", steps, 1, "use steps=100")
        self.factor, self.steps = factor, steps
        self._end = 0
        self._handles: list[Any] = []
        self._own: list[tuple[dict[str, Any], Any]] = []

    @property
    def active(self) -> bool:
        """Whether the next step is made at the lower rate."""
        return bool(self._handles)

    @property
    def still_to_come(self) -> float:
        """What the current learning rate will be multiplied by in the coming step; 1 within it."""
        return self.factor if self.active and not self._own else 1.0

    def start(self, trainer: Trainer) -> None:
        """Begin with the next optimizer step; a reduction that is active restarts, and never multiplies twice."""
        self.release()
        self._end = trainer.global_step + self.steps
        for optimizer in map(_torch_optimizer, trainer.optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._lower))
            self._handles.append(optimizer.register_step_post_hook(self._restore))

    def after_batch(self, trainer: Trainer) -> None:
        """A training batch is over: end the reduction after its last step."""
        if self.active and trainer.global_step >= self._end:
            self.release()

    def release(self) -> None:
        """End the reduction, even inside a step that failed."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _lower(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()
        for group in optimizer.param_groups:
            self._own.append((group, group["lr"]))
            group["lr"] = group["lr"] * self.factor

    def _restore(self, *_: Any) -> None:
        for group, lr in self._own:
            group["lr"] = lr
        self._own.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(factor={self.factor!r}, steps={self.steps!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_own": []}


Action = Literal["log", "skip", "stop"] | ReduceLR | Call
ActionLike = Word | ReduceLR | Call


def parse(actions: Mapping[str, ActionLike] | None, faults: Faults) -> dict[Kind, Action]:
    """The action for each kind of event that has one; unknown ones are noted in ``faults``."""
    found: dict[Kind, Action] = {}
    for kind, given in (actions or {}).items():
        if kind not in KINDS:
            faults.unknown("kind of event", kind, KINDS)
        elif given == "skip" and kind not in KNOWN_EARLY:
            faults.add(
                f"actions[{kind!r}]='skip', which is known only after the step",
                f"'skip' for {', '.join(KNOWN_EARLY)}",
                "use 'log', 'stop', 'reduce_lr' or a callable",
            )
        if given in ("log", "skip", "stop"):
            found[cast("Kind", kind)] = given
        elif given == "reduce_lr":
            found[cast("Kind", kind)] = ReduceLR()
        elif isinstance(given, ReduceLR) or (callable(given) and not isinstance(given, type)):
            found[cast("Kind", kind)] = given
        else:
            fix = did_you_mean(given, get_args(Word), "use 'log'") if isinstance(given, str) else "use 'log'"
            faults.add(f"actions[{kind!r}]={given!r}", _ALLOWED, fix)
    return found


def describe(action: Action) -> str:
    """The action as an event names it."""
    if isinstance(action, str):
        return action
    if isinstance(action, ReduceLR):
        return f"reduce_lr(factor={action.factor:g}, steps={action.steps})"
    return f"call {getattr(action, '__name__', type(action).__name__)}"


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that updates weights, below the one DeepSpeed puts around it."""
    while not isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def suppress(optimizer: Optimizer, *, scaled: bool) -> None:
    """Make the coming step do nothing: torch's optimizers skip a parameter without a gradient.

    ``scaled``: the optimizer unscales gradients within the step, and torch's scaler has to see them before that.
    """
    if not scaled:
        grads.drop(optimizer)
        return
    handles: list[Any] = []

    def once(stepping: Optimizer, *_: Any) -> None:
        handles.pop().remove()
        grads.drop(stepping)

    handles.append(optimizer.register_step_pre_hook(once))
