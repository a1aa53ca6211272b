"""``audit``: what every module of a model or a run has and computes in, compared with what was declared for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn

from lightning_mp.compat.lightning import LightningModule, Trainer, check_copy, trainer_of
from lightning_mp.errors import PlanError
from lightning_mp.precision_audit.judge import Declaration, Record, active_pins, active_wide, by_trainer
from lightning_mp.precision_audit.observer import (
    Observed,
    modules_of,
    note_gradients,
    note_parameters,
    states_of,
    unseen,
)
from lightning_mp.precision_audit.report import AuditReport, AuditRow, build

__all__ = ["AuditReport", "AuditRow", "audit"]

_NOTHING_RAN = (
    "nothing was run: inputs, outputs and computation are those a PrecisionAudit callback saw, if there was one"
)


def audit(model_or_trainer: nn.Module | Trainer) -> AuditReport:
    """Declared against observed dtypes, a row for every module with parameters of its own; nothing is changed.

    For a Trainer, or a LightningModule attached to one, during or after ``fit``: parameters, gradients and optimizer
    state as they are now, and what a ``PrecisionAudit`` callback of its saw run; declared is what its precision
    plugin declares. Only this process is audited.

    For a bare module: parameters and gradients, of which pins are judged. Nothing is run.

    Raises:
        PlanError: a Trainer that has no module yet.
    """
    check_copy(model_or_trainer, "audit")
    if isinstance(model_or_trainer, Trainer):
        return _of_run(model_or_trainer)
    trainer = trainer_of(model_or_trainer) if isinstance(model_or_trainer, LightningModule) else None
    if trainer is not None:
        return _of_run(trainer)
    modules = modules_of(model_or_trainer)
    first = next(model_or_trainer.parameters(), None)
    seen = unseen(modules)
    note_gradients(seen, modules)
    note_parameters(seen, modules, {})
    declaration = Declaration(by="nothing but pins", pins=active_pins(modules), wide=active_wide(modules))
    return build(declaration, [seen], where="cpu" if first is None else first.device.type, notes=(_NOTHING_RAN,))


def _of_run(trainer: Trainer) -> AuditReport:
    module = trainer.strategy.lightning_module
    if module is None:
        raise PlanError.of("a Trainer without a module", "call audit(trainer) once fit has begun", "audit")
    modules = modules_of(module)
    declaration, seen = by_trainer(trainer, modules), unseen(modules)
    note_parameters(seen, modules, states_of(trainer.optimizers))
    note_gradients(seen, modules)
    records = (getattr(callback, "record", None) for callback in cast("Any", trainer).callbacks)
    record = next((found for found in records if isinstance(found, Record)), None)
    for name in seen.keys() & record.seen.keys() if record is not None else ():
        assert record is not None
        now, then = ((one.declared(name), one.stored(name)) for one in (declaration, record.declaration))
        _add_record(seen[name], record.seen[name], same=now == then)
    where = f"{trainer.strategy.root_device.type}, after {trainer.global_step} steps"
    return build(declaration, [seen], where=where, notes=() if record else (_NOTHING_RAN,))


def _add_record(seen: Observed, before: Observed, same: bool) -> None:
    """Add what only shows while a step runs; what ran under another declaration (a pin removed since) is past."""
    seen.add(replace(before, trained=set(), frozen=set(), special=set(), grad=seen.grad or before.grad, state=set()))
    if not seen.state:
        seen.state |= before.state
    if not same:
        for past in (seen.ran, seen.grad, seen.state):
            past.clear()
