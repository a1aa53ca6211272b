"""The loss scale in every logger and in the progress bar."""

from __future__ import annotations

from typing import Any

from lightning_mp.compat.both_copies import check_copy
from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_mp.errors import Faults
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.callback_utils import Steps, check_every, log, scale_source
from lightning_mp.monitor.run_files import is_fresh
from lightning_mp.monitor.scale_sources import Scale, ScaleSource, SkipCount, read_together


class LossScaleMonitor(Callback):
    """Logs the loss scale, its counters, and skipped steps: in total, in a row, and as a part of all.

    It reads any plugin's scaler: MixedPrecisionPlan's, stock Lightning's (torch's ``GradScaler``), and DeepSpeed's own.
    ``rows`` holds what was logged: ``step`` (the Trainer's ``global_step`` as the training step saw it) and the values
    after that step, under the names of :mod:`lightning_mp.monitor.metric_names`. A rule without hysteresis has no such
    value. Where
    there is no loss scale it says so once and logs nothing.

    Args:
        every_n_steps: steps from one reading to the next; on the others the device is not waited for.

    Raises:
        PlanError: ``every_n_steps`` is no whole number from 1 on.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        faults = Faults("LossScaleMonitor")
        check_every(every_n_steps, faults)
        faults.raise_if_any()
        self.every_n_steps = every_n_steps
        self.rows: list[dict[str, float]] = []
        self._said_none = False
        self._let_go()

    def _let_go(self) -> None:
        self._steps = Steps()
        self._source: ScaleSource | None = None
        self._skips: SkipCount | None = None
        self._until_reading = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find who keeps the scale."""
        check_copy(trainer, "LossScaleMonitor")
        self._let_go()
        if is_fresh(trainer):
            self.rows.clear()
        source = scale_source(trainer)
        if source is not None and source.scale() is not None:
            self._source, self._skips = source, SkipCount(source)
        elif not self._said_none:
            self._said_none = True
            rank_zero_info(f"LossScaleMonitor: precision {trainer.precision} has no loss scale, nothing is logged")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the step."""
        self._steps.batch_starts(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note that there will be something to step with."""
        self._steps.backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Count the step."""
        if self._skips is not None and self._steps.begins(trainer):
            self._skips.before_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read and log, every so many steps."""
        if self._source is None or self._skips is None or not self._steps.batch_ends():
            return
        self._skips.after_batch()
        if self._until_reading == 0:
            self._until_reading = self.every_n_steps
            scale = self._source.scale()
            assert scale is not None, "the scale was there when training began"
            self._log(trainer, pl_module, _read(scale, self._skips, trainer.strategy.root_device))
        self._until_reading -= 1

    def _log(self, trainer: Trainer, pl_module: LightningModule, values: dict[str, float]) -> None:
        self.rows.append({metric_names.STEP: self._steps.step, **values})
        log(trainer, values)
        bar: Any = trainer.progress_bar_callback
        if bar is not None and bar.is_enabled:
            for name in (metric_names.LOSS_SCALE, metric_names.SKIPPED_STEPS):
                pl_module.log(name, values[name], prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the scaler."""
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the scaler: Lightning calls no ``teardown`` of a callback after a failure."""
        self._let_go()

    def __getstate__(self) -> dict[str, Any]:
        # A copy (a spawned process, a sweep) belongs to no run.
        return {**self.__dict__, "_source": None, "_skips": None}


def _read(scale: Scale, skips: SkipCount, device: Any) -> dict[str, float]:
    read, _ = read_together(
        {
            metric_names.LOSS_SCALE: scale.scale,
            metric_names.GROWTH_TRACKER: scale.growth_tracker,
            metric_names.HYSTERESIS: scale.hysteresis,
            metric_names.SKIPPED_STEPS: skips.total,
            metric_names.SKIPPED_IN_A_ROW: skips.in_a_row,
            "since": skips.since,
        },
        device,
    )
    since = read.pop("since") or 0.0
    values = {name: value for name, value in read.items() if value is not None}
    return {**values, metric_names.SKIP_RATE: since / skips.attempts}
