"""``LossScaleMonitor``: a callback that shows the loss scale in loggers and on the progress bar."""

import math
from collections import deque
from contextlib import suppress
from typing import Any

from lightning_mp.compat.lightning import LightningModule, Trainer, check_copy, logged_step, rank_zero_info
from lightning_mp.errors import Faults
from lightning_mp.health.measurement import ToHost, Values
from lightning_mp.health.scale_sources import SkipCount, scale_source
from lightning_mp.plan.skip_aware import Override
from lightning_mp.record import metric_names
from lightning_mp.record.run_log import IN_MEMORY, RunCallback, StepTracker, is_fresh, log


class LossScaleMonitor(RunCallback):
    """A callback that logs the loss scale and the number of skipped steps.

    It reads the scaler of a MixedPrecisionPlan, of stock Lightning (torch's ``GradScaler``), or of
    DeepSpeed. The values go to every logger and to the progress bar. In a run without a loss scale
    they do not, and a message says so once.

    ``rows`` holds the last 1,000 readings. A reading has a ``step``, the Trainer's ``global_step``
    during the training step, and the values after that step. Their names are in
    :mod:`lightning_mp.record.metric_names`.

    Args:
        every_n_steps: the number of steps from one reading to the next. No step waits for the
            device: on CUDA, values are logged up to 3 steps later.

    Raises:
        PlanError: ``every_n_steps`` is not a whole number >= 1.
    """

    _of_run = ("_skips", "_bar", "_to_host")

    def __init__(self, every_n_steps: int = 1) -> None:
        with Faults("LossScaleMonitor") as faults:
            faults.whole("every_n_steps", every_n_steps, 1, "use every_n_steps=1")
        self.every_n_steps = every_n_steps
        self._rows: deque[dict[str, float]] = deque(maxlen=IN_MEMORY)
        self._said_none = False
        self._bar: Override | None = None
        self._reset()

    @property
    def rows(self) -> list[dict[str, float]]:
        """Return the last 1,000 readings, as logged."""
        return list(self._rows)

    def _reset(self) -> None:
        self._steps = StepTracker()
        self._skips: SkipCount | None = None
        self._until_reading = 0
        self._to_host: ToHost | None = None
        if self._bar is not None:
            self._bar.remove()
        self._bar = None
        #: the short form for the progress bar, such as ``scale=2^16, skipped=3``
        self._on_bar: dict[str, str] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_copy(trainer, "LossScaleMonitor")
        self._reset()
        if is_fresh(trainer):
            self._rows.clear()
        source = scale_source(trainer)
        if source is not None and source.scale() is not None:
            self._skips = SkipCount(source)
            self._to_host = ToHost(trainer.strategy.root_device, trainer.world_size)
            bar: Any = trainer.progress_bar_callback
            if getattr(bar, "is_enabled", bar is not None):
                self._bar = Override(bar, "get_metrics", lambda original, *args: {**original(*args), **self._on_bar})
        elif not self._said_none:
            self._said_none = True
            rank_zero_info(f"LossScaleMonitor: precision {trainer.precision} has no loss scale, nothing is logged")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._steps.batch_starts(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if trainer.training:
            self._steps.backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._skips is not None and self._steps.begins(trainer):
            self._skips.before_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._skips is None or self._to_host is None or not self._steps.batch_ends():
            return
        self._skips.after_batch()
        if self._until_reading == 0:
            self._until_reading = self.every_n_steps
            at = self._steps.step, logged_step(trainer)
            self._to_host.send(self._skips.values(), then=lambda read: self._log(trainer, read, *at))
        self._until_reading -= 1
        self._to_host.deliver()

    def _log(self, trainer: Trainer, read: Values, step: int, logged_at: int) -> None:
        values = {name: value for name, value in read.items() if value is not None}
        self._rows.append({metric_names.STEP: step, **values})
        log(trainer, values, logged_at)
        scale = values[metric_names.LOSS_SCALE]
        exponent = math.log2(scale) if scale > 0 else math.nan
        text = f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"
        self._on_bar = {"scale": text, "skipped": f"{values[metric_names.SKIPPED_STEPS]:.0f}"}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._to_host is not None:
            self._to_host.deliver(wait=True)

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        with suppress(RuntimeError):  # a failed device delivers nothing
            self.on_train_end(trainer, trainer.lightning_module)
        self._reset()
