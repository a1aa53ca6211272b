"""Records which dtypes modules run in during the first steps, and reports where they are not those declared."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Any, Literal

from lightning_mp.compat.lightning import LightningModule, Trainer, check_copy, rank_zero_info, rank_zero_warn
from lightning_mp.errors import Faults
from lightning_mp.precision_audit.audit import AuditReport, AuditRow
from lightning_mp.precision_audit.judge import Record, by_trainer
from lightning_mp.precision_audit.observer import (
    Watch,
    from_all_ranks,
    modules_of,
    note_gradients,
    note_parameters,
    states_of,
)
from lightning_mp.precision_audit.report import build
from lightning_mp.record.run_folder import AUDIT, AUDIT_TABLE, RunFolder
from lightning_mp.record.run_log import RunDir, WritesRun, end_run, open_folder

_NAME = "PrecisionAudit"
_LEAST_WIDTH, _WIDTH = 100, 110


class PrecisionAudit(WritesRun):
    """Records for every module the dtypes of parameters, inputs, outputs, computation, gradients, reductions and state.

    They are compared with what the ``MixedPrecisionPlan``, or Lightning's own plugin, declares. The table is printed,
    and written to ``audit.json`` and ``audit.md``; a difference warns, or raises. The audit only reads: results are the
    same with and without it, and no hook is left once it is over. The inside of compiled modules cannot be observed.

    Args:
        steps: how many optimizer steps are audited, from the first one of the run.
        on_mismatch: ``"warn"`` or ``"raise"``, on every rank, whichever rank found it.
        run_dir: the folder to write to; by default one of the run's own, in the logger's folder.

    Attributes:
        rows: the rows of the last report, :class:`~lightning_mp.precision_audit.audit.AuditRow`.
        report: the last report, ``None`` before the first.

    Raises:
        PlanError: an invalid argument; while training under ``on_mismatch="raise"``, every difference.
    """

    _of_run = ("_watch", "_folder")

    def __init__(self, steps: int = 1, on_mismatch: Literal["warn", "raise"] = "warn", run_dir: RunDir = None) -> None:
        with Faults("PrecisionAudit") as faults:
            faults.whole("steps", steps, 1, "use steps=1 to audit the first step")
            faults.one_of("on_mismatch", on_mismatch, ("warn", "raise"), "leave it out for 'warn'")
        self.steps, self.on_mismatch, self.run_dir = steps, on_mismatch, run_dir
        self.report: AuditReport | None = None
        #: what was observed, for ``lightning_mp.audit(trainer)``
        self.record: Record | None = None
        self._folder: RunFolder | None = None
        self._watch: Watch | None = None
        self._began = 0

    @property
    def rows(self) -> list[AuditRow]:
        """A row a module, of the last report."""
        return [] if self.report is None else list(self.report.rows)

    # ------------------------------------------------------------------ the run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew."""
        check_copy(trainer, "PrecisionAudit")
        self._release(trainer)
        if stage == "fit":
            self.report = self.record = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder, once it is known whether the run resumes.

        Raises:
            PlanError: another run or PrecisionAudit writes there already.
        """
        self._folder = open_folder(trainer, self.run_dir, _NAME)

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Report on a step that failed, and remove every hook."""
        try:
            if self._watch is not None:
                self._watch.stop()
                if error is not None:
                    self._conclude(trainer, self._watch, failed=True)
        finally:
            if self._folder is not None:
                end_run(self._folder, trainer, _NAME, error)
            self._watch = self._folder = None

    # ------------------------------------------------------------------ the audited steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._watch is None:
            if self.report is not None:
                return
            zero = hasattr(trainer.strategy, "deepspeed_engine")
            self._watch, self._began = Watch(modules_of(pl_module), gradient_hooks=zero), trainer.global_step
        self._watch.start(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._watch is not None:
            self._watch.in_backward = True

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:
            self._watch.in_backward = False
            note_gradients(self._watch.seen, modules_of(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is not None:
            self._watch.stop()
            if trainer.global_step >= self._began + self.steps:
                self._conclude(trainer, self._watch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:  # a batch that the module's on_train_batch_start left out has no end
            self._watch.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:  # fewer steps than ``steps``
            self._conclude(trainer, self._watch)

    # ------------------------------------------------------------------ the report

    def _conclude(self, trainer: Trainer, watch: Watch, failed: bool = False) -> None:
        modules, began = modules_of(trainer.lightning_module), self._began
        note_parameters(watch.seen, modules, states_of(trainer.optimizers))
        watch.attribute_reductions()
        declaration = by_trainer(trainer, modules)
        self._watch = None
        self.record = Record(declaration, watch.seen)
        steps = f"step {began}" if trainer.global_step <= began + 1 else f"steps {began} to {trainer.global_step - 1}"
        where = f"{steps}, {trainer.strategy.root_device.type}, {type(trainer.strategy).__name__}"
        ranks = [watch.seen] if failed else from_all_ranks(watch.seen)  # the others may not have failed
        self.report = build(declaration, ranks, where=where)
        if self._folder is not None:
            self._folder.write(AUDIT, self.report.to_dict())
            self._folder.text(AUDIT_TABLE, self.report.to_markdown())
        if not failed:
            width = max(_LEAST_WIDTH, get_terminal_size((_WIDTH, 0)).columns)
            rank_zero_info(f"PrecisionAudit: {self.report.to_text(width)}")
        if self.on_mismatch == "raise" and not failed:
            self.report.raise_if_different()
        elif not self.report.ok:
            rank_zero_warn(f"PrecisionAudit: {self.report.summary}\n{self.report.explanation()}")
