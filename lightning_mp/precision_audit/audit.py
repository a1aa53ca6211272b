"""``audit`` and ``PrecisionAudit``: the observed dtypes of modules, compared with the declared ones."""

from shutil import get_terminal_size
from typing import Any, Literal

from torch import nn

from lightning_mp.compat.lightning import (
    LightningModule,
    Trainer,
    check_copy,
    rank_zero_info,
    rank_zero_warn,
    trainer_of,
)
from lightning_mp.errors import Faults, PlanError
from lightning_mp.precision_audit.judge import Declaration, by_trainer, carried_pins
from lightning_mp.precision_audit.observer import (
    Observed,
    Watch,
    from_all_ranks,
    modules_of,
    note_gradients,
    note_parameters,
    states_of,
    unseen,
)
from lightning_mp.precision_audit.report import AuditReport, AuditRow, build
from lightning_mp.record.run_folder import AUDIT, AUDIT_TABLE
from lightning_mp.record.run_log import RunDir, RunLog, WritesRun, callbacks_of

__all__ = ["AuditReport", "AuditRow", "PrecisionAudit", "audit"]

_NAME = "PrecisionAudit"
_LEAST_WIDTH, _WIDTH = 100, 110
_NOTHING_RAN = (
    "nothing was run: inputs, outputs and computation are those a PrecisionAudit callback saw, if there was one"
)


def audit(model_or_trainer: nn.Module | Trainer) -> AuditReport:
    """Compare declared with observed dtypes and return a row for every module with parameters of its own.

    For a Trainer, or a LightningModule attached to one, during or after ``fit``, the report has the present
    parameters, gradients and optimizer state. Operators are in it if the Trainer has a ``PrecisionAudit`` callback,
    which saw them run. The precision plugin declares the dtypes.

    For a module without a Trainer the report has parameters and gradients, and judges its pins alone.

    Nothing is run or changed, and only this process is audited.

    Raises:
        PlanError: the Trainer has no module yet, or is of the other copy of Lightning.
    """
    check_copy(model_or_trainer, "audit")
    attached = isinstance(model_or_trainer, LightningModule)
    trainer = trainer_of(model_or_trainer) if attached else model_or_trainer
    if isinstance(trainer, Trainer):
        return _of_run(trainer)
    assert isinstance(model_or_trainer, nn.Module)
    modules, first = modules_of(model_or_trainer), next(model_or_trainer.parameters(), None)
    declaration = Declaration(by="nothing but pins", **carried_pins(modules))
    where = "cpu" if first is None else first.device.type
    return build(declaration, [_present(modules)], where=where, notes=(_NOTHING_RAN,))


def _of_run(trainer: Trainer) -> AuditReport:
    module = trainer.strategy.lightning_module
    if module is None:
        raise PlanError.of("a Trainer without a module", "call audit(trainer) once fit has begun", "audit")
    modules = modules_of(module)
    declaration, seen = by_trainer(trainer, modules), _present(modules, trainer.optimizers)
    callbacks = (callback for callback in callbacks_of(trainer) if isinstance(callback, PrecisionAudit))
    record = next((callback.record for callback in callbacks if callback.record is not None), None)
    if record is not None:
        declared_then, seen_then = record
        for name in seen.keys() & seen_then.keys():
            now, then = ((each.declared(name), each.stored(name)) for each in (declaration, declared_then))
            seen[name].add_past(seen_then[name], same=now == then)
    where = f"{trainer.strategy.root_device.type}, after {trainer.global_step} steps"
    return build(declaration, [seen], where=where, notes=() if record else (_NOTHING_RAN,))


def _present(modules: dict[str, nn.Module], optimizers: Any = ()) -> dict[str, Observed]:
    """Return the dtypes of parameters, gradients and optimizer state; nothing is run."""
    seen = unseen(modules)
    note_parameters(seen, modules, states_of(optimizers))
    note_gradients(seen, modules)
    return seen


class PrecisionAudit(WritesRun):
    """Records for every module the dtypes of parameters, inputs, outputs, computation, gradients, reductions and state.

    The ``MixedPrecisionPlan``, or Lightning's own plugin, declares the dtypes to compare them with. The table is
    printed, and written to ``audit.json`` and ``audit.md``. A difference warns or raises. The audit only reads: results
    are the same with and without it, and its hooks are removed at its end. Compiled modules cannot be observed inside.

    Args:
        steps: how many optimizer steps are audited, from the first one of the run.
        on_mismatch: ``"warn"`` or ``"raise"``, on every rank, also if one rank alone differs.
        run_dir: the folder to write to; by default the run's folder.

    Attributes:
        rows: the rows of the last report, :class:`~lightning_mp.precision_audit.report.AuditRow`.
        report: the last report, ``None`` before the first.

    Raises:
        PlanError: an invalid argument; while training under ``on_mismatch="raise"``, every difference.
    """

    _of_run = ("_watch",)

    def __init__(self, steps: int = 1, on_mismatch: Literal["warn", "raise"] = "warn", run_dir: RunDir = None) -> None:
        with Faults(_NAME) as faults:
            faults.whole("steps", steps, 1, "use steps=1 to audit the first step")
            faults.one_of("on_mismatch", on_mismatch, ("warn", "raise"), "leave it out for 'warn'")
        self.steps, self.on_mismatch, self.run_dir = steps, on_mismatch, run_dir
        self.report: AuditReport | None = None
        #: the declaration and the observations of the last report, for ``lightning_mp.audit(trainer)``
        self.record: tuple[Declaration, dict[str, Observed]] | None = None
        self._log = RunLog(_NAME)
        self._watch: Watch | None = None
        self._began = 0

    @property
    def rows(self) -> list[AuditRow]:
        """Return the rows of the last report; an empty list before the first."""
        return [] if self.report is None else list(self.report.rows)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_copy(trainer, _NAME)
        self._release(trainer)
        if stage == "fit":
            self.report = self.record = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder, once it is known whether the run resumes.

        Raises:
            PlanError: another run or PrecisionAudit writes there already.
        """
        self._log.open(trainer, self.run_dir)

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Report on a step that failed, and remove every hook."""
        try:
            if self._watch is not None:
                self._watch.stop()
                if error is not None:
                    self._conclude(trainer, self._watch, failed=True)
        finally:
            self._log.close(trainer, error)
            self._watch = None

    # ------------------------------------------------------------------ the audited steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.report is not None:
            return
        if self._watch is None:
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
        if self._watch is not None:  # no on_train_batch_end follows if the module's on_train_batch_start skips a batch
            self._watch.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:  # fewer steps than ``steps``
            self._conclude(trainer, self._watch)

    def _conclude(self, trainer: Trainer, watch: Watch, failed: bool = False) -> None:
        modules, began = modules_of(trainer.lightning_module), self._began
        note_parameters(watch.seen, modules, states_of(trainer.optimizers))
        watch.attribute_reductions()
        declaration = by_trainer(trainer, modules)
        self._watch, self.record = None, (declaration, watch.seen)
        steps = f"step {began}" if trainer.global_step <= began + 1 else f"steps {began} to {trainer.global_step - 1}"
        where = f"{steps}, {trainer.strategy.root_device.type}, {type(trainer.strategy).__name__}"
        ranks = [watch.seen] if failed else from_all_ranks(watch.seen)  # the others may not have failed
        report = self.report = build(declaration, ranks, where=where)
        if (folder := self._log.folder) is not None:
            folder.write(AUDIT, report.to_dict())
            folder.text(AUDIT_TABLE, report.to_markdown())
        if not failed:
            width = max(_LEAST_WIDTH, get_terminal_size((_WIDTH, 0)).columns)
            rank_zero_info(f"{_NAME}: {report.to_text(width)}")
            if self.on_mismatch == "raise":
                report.raise_if_different()
        if not report.ok:
            rank_zero_warn(f"{_NAME}: {report.summary}\n{report.explanation()}")
