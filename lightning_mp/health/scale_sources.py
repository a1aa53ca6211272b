"""The loss scale and the skipped steps of a run, from a plan, torch's GradScaler or DeepSpeed.

There is no device sync. A number is a Python number if the host knows it, else a scalar on the
device. So the caller can read all scalars together.
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
    """The scaler of a MixedPrecisionPlan. It counts skipped steps in modes without scaling too."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler, self.floor = scaler, scaler.config.floor

    def scale(self) -> Number | None:
        return self._scaler.state.scale if self._scaler.enabled else None

    def skipped(self) -> Number:
        return self._scaler.skipped


class StockSource:
    """torch's ``GradScaler``, which counts nothing. A skipped step is recognised by a lower scale.

    A step at a scale of 0 counts as skipped, because that scale cannot fall.
    """

    floor = 0.0

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._before: Tensor | None = None
        self._skipped: Number = 0

    def scale(self) -> Tensor:
        """Return a copy of the scale, by the only public call without a device sync."""
        return self.scaler.scale(self._one)

    def before_step(self) -> None:
        self.after_step()
        self._before = self.scale()

    def after_step(self) -> None:
        if self._before is not None:
            now = self.scale()
            self._skipped = self._skipped + ((now < self._before) | (now == 0)).float()
            self._before = None

    def skipped(self) -> Number:
        return self._skipped


class DeepSpeedSource:
    """A ``DeepSpeedEngine`` without a plan. Its scale and counts are Python numbers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.floor = deepspeed.floor_of(engine)

    def scale(self) -> float | None:
        """Return the loss scale, or ``None`` if gradients are not scaled (bf16, fp32)."""
        return deepspeed.scale_of(self._engine)

    def skipped(self) -> Number:
        return self._engine.skipped_steps


ScaleSource = PlanSource | StockSource | DeepSpeedSource


def scale_source(trainer: Trainer) -> ScaleSource | None:
    """Return the source of this run's loss scale and skips.

    ``None`` for a stock plugin without an enabled scaler.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        return PlanSource(plugin.loss_scaler)
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return DeepSpeedSource(trainer.strategy.deepspeed_engine)
    scaler: Any = getattr(plugin, "scaler", None)
    return StockSource(scaler, trainer.strategy.root_device) if scaler is not None and scaler.is_enabled() else None


class SkipCount:
    """A count of the skipped steps of a run.

    Steps before a resume are included if the source kept them. ``skipped`` returns the number of
    skipped steps so far, by default the count of ``source``. A batch in which several optimizers
    stepped counts as skipped if none of the steps was applied.
    """

    def __init__(self, source: ScaleSource | None, skipped: Callable[[], Number] | None = None) -> None:
        self._source = source
        self._stock = source if isinstance(source, StockSource) else None
        self._skipped = skipped or (lambda: 0 if source is None else source.skipped())
        #: the number of skipped steps
        self.total = _kept(self._skipped())
        self._tried = 0  # steps in the present batch
        #: true if the last batch with a step was skipped
        self.skipped_last: Number = 0

    def before_step(self) -> None:
        """Note that an optimizer is about to step."""
        if self._stock is not None:
            self._stock.before_step()
        self._tried += 1

    def after_batch(self) -> None:
        """Update the counts after a training batch. Without a step in it nothing changes."""
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
        """Return the loss scale, which may be ``None``, and the skips, under their logged names."""
        return {
            metric_names.LOSS_SCALE: None if self._source is None else self._source.scale(),
            metric_names.SKIPPED_STEPS: self.total,
        }


def _kept(value: Number) -> Number:
    """Return the present value, which later in-place changes do not affect."""
    return value.clone() if isinstance(value, Tensor) else value
