"""The loss scale and the skipped steps of a run, from a plan, torch's scaler or DeepSpeed, without a device sync.

Every number is a Python one where the host knows it, else a device scalar, so that all can be read together.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lightning_mp.compat import deepspeed
from lightning_mp.compat.lightning import DeepSpeedStrategy, Trainer
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.plan.run import PlanBase
from lightning_mp.record import metric_names

Number = Tensor | float


class PlanSource:
    """The scaler of a MixedPrecisionPlan, which is disabled in a mode without scaling, and counts all the same."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler, self.floor = scaler, scaler.config.floor

    def scale(self) -> Number | None:
        return self._scaler.state.scale if self._scaler.enabled else None

    def skipped(self) -> Number:
        return self._scaler.skipped


class StockSource:
    """torch's ``GradScaler``, which counts nothing: its scale falls if and only if it skipped the step."""

    floor = 0.0

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._before: Tensor | None = None
        self._skipped: Number = 0

    def scale(self) -> Tensor:
        """A copy of it, by the one public way that does not read it."""
        return self.scaler.scale(self._one)

    def before_step(self) -> None:
        self.after_step()
        self._before = self.scale()

    def after_step(self) -> None:
        if self._before is not None:
            now = self.scale()
            self._skipped = self._skipped + ((now < self._before) | (now == 0)).float()  # at 0 it cannot fall
            self._before = None

    def skipped(self) -> Number:
        return self._skipped


class DeepSpeedSource:
    """A stock ``DeepSpeedEngine``, whose scale and counts are Python numbers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.floor = deepspeed.floor_of(engine)

    def scale(self) -> float | None:
        """``None`` where gradients are not scaled: bf16, fp32."""
        return deepspeed.scale_of(self._engine)

    def skipped(self) -> Number:
        return self._engine.skipped_steps


ScaleSource = PlanSource | StockSource | DeepSpeedSource


def scale_source(trainer: Trainer) -> ScaleSource | None:
    """The object that scales this run's loss or skips its steps; ``None`` where there is none."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        return PlanSource(plugin.loss_scaler)
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return DeepSpeedSource(trainer.strategy.deepspeed_engine)
    scaler: Any = getattr(plugin, "scaler", None)
    return StockSource(scaler, trainer.strategy.root_device) if scaler is not None and scaler.is_enabled() else None


class SkipCount:
    """Skipped steps, over a run and over what it resumed from.

    ``skipped`` says how many were skipped by now, by default as ``source`` counts. A training batch in which several
    optimizers stepped is skipped where none of them was applied.
    """

    def __init__(self, source: ScaleSource | None, skipped: Callable[[], Number] | None = None) -> None:
        self._source = source
        self._stock = source if isinstance(source, StockSource) else None
        self._skipped = skipped or (lambda: 0 if source is None else source.skipped())
        #: skipped steps, those before a resume included where the source kept them
        self.total = _kept(self._skipped())
        self._tried = 0  # in the batch at hand
        #: whether the last batch that stepped was skipped
        self.skipped_last: Number = 0

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._stock is not None:
            self._stock.before_step()
        self._tried += 1

    def after_batch(self) -> None:
        """The training batch is over; one in which nothing stepped leaves everything as it was."""
        tried, self._tried = self._tried, 0
        if not tried:
            return
        if self._stock is not None:
            self._stock.after_step()
        now = self._skipped()
        skipped = now - self.total >= tried
        self.skipped_last = skipped.float() if isinstance(skipped, Tensor) else skipped
        self.total = _kept(now)

    def values(self) -> dict[str, Number | None]:
        """The loss scale, if there is one, and the skips, by the names under which they are logged."""
        return {
            metric_names.LOSS_SCALE: None if self._source is None else self._source.scale(),
            metric_names.SKIPPED_STEPS: self.total,
        }


def _kept(value: Number) -> Number:
    """The value as it is now, whatever is added to it in place later."""
    return value.clone() if isinstance(value, Tensor) else value
