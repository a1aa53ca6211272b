"""What the callbacks that change something share: one owner at a time, and everything given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, check_copy
from lightning_mp.errors import Faults
from lightning_mp.modules.class_swap import call_with_original_classes
from lightning_mp.precision import MixedPrecisionPlan


class ActingCallback(Callback):
    """Applies something in ``setup`` and undoes it in ``teardown``, or in ``on_exception`` if the run failed."""

    #: the field of MixedPrecisionPlan that does the same
    plan_field: str

    def __init__(self) -> None:
        self._undo: Callable[[], object] | None = None

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Check, then do it; what undoes it, or ``None`` if there was nothing to do."""
        raise TypeError(f"{type(self).__name__} must define apply()")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to work beside a plan, then apply.

        Raises:
            PlanError: a MixedPrecisionPlan is present, or what was given does not fit the model.
        """
        name = type(self).__name__
        check_copy(trainer, name)
        faults = Faults(name)
        if isinstance(trainer.precision_plugin, MixedPrecisionPlan):
            faults.add(
                f"{name} beside {trainer.precision_plugin!r}",
                f"{name} with Lightning's own precision plugins",
                f"remove {name} and set MixedPrecisionPlan({self.plan_field}=...)",
            )
            faults.raise_if_any()
        self._give_back()
        undo = self.apply(trainer, pl_module, faults)
        if undo is not None:
            restore = call_with_original_classes(pl_module, "configure_optimizers")
            self._undo = lambda: (undo(), restore())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo: Lightning calls no ``teardown`` of a callback after a failure."""
        self._give_back()

    def _give_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __getstate__(self) -> dict[str, Any]:
        # A copy (a spawned process, a sweep) has applied nothing.
        return {**self.__dict__, "_undo": None}
