"""Which hooks may change gradients, and what holds schedulers and weight averages on skipped steps."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, cast

from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, WeightAveraging, is_overridden

Skipped = Callable[[], bool]
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."


def may_change_gradients(module: LightningModule) -> bool:
    """Whether a hook between the unscaling and the step may leave gradients not finite; this package's own do not."""
    if any(is_overridden(name, module, LightningModule) for name in _HOOKS):
        return True
    callbacks: list[Callback] = cast("Any", module.trainer).callbacks
    theirs = (callback for callback in callbacks if not type(callback).__module__.startswith(_OURS))
    return any(is_overridden(_HOOKS[0], callback, Callback) for callback in theirs)


class Override:
    """A method of one instance, until it is removed; others may be stacked on it. A copy of the instance has its own.

    ``instead`` is called with the original and the arguments; once it is removed, the original is.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self.owner, self.name, self.active, self._instead = owner, name, True, instead
        #: what the instance had under that name; ``None``: its class's own
        self.before = owner.__dict__.get(name)
        owner.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.before or partial(getattr(type(self.owner), self.name), self.owner)
        return self._instead(original, *args, **kwargs) if self.active else original(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The user's method, by which Lightning's ``is_overridden`` judges whether it is one of the user's."""
        if isinstance(self.before, Override):
            return self.before.__wrapped__
        return self.before or getattr(type(self.owner), self.name)

    def remove(self) -> None:
        """Restore the attribute, unless another override was put over this one."""
        self.active = False
        top = self.owner.__dict__.pop(self.name, None)
        while isinstance(top, Override) and not top.active:
            top = top.before
        if top is not None:
            self.owner.__dict__[self.name] = top

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.owner))
        return self if copied is None else MethodType(getattr(type(copied), self.name), copied)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)  # of the copy: by then it has its class's own


def hold_on_skips(trainer: Trainer, module: LightningModule, skipped: Skipped) -> Callable[[], None]:
    """Leave step-interval schedulers and weight averages as they are while ``skipped()``; returns what undoes it.

    Overriding the module's hook, not the scheduler's ``step``, keeps schedulers saveable, and as callbacks expect them.
    """
    undo = ExitStack()

    def step(original: Any, scheduler: Any, metric: Any) -> None:
        interval = next((c.interval for c in trainer.lr_scheduler_configs if c.scheduler is scheduler), None)
        if interval != "step" or not skipped():
            original(scheduler, metric)

    def should_update(original: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        wanted = original(step_idx=step_idx, epoch_idx=epoch_idx)
        return wanted and not (step_idx is not None and skipped())

    undo.callback(Override(module, "lr_scheduler_step", step).remove)  # schedulers may be replaced in the run
    for callback in cast("list[Any]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, WeightAveraging):
            undo.callback(Override(callback, "should_update", should_update).remove)
    return undo.close
