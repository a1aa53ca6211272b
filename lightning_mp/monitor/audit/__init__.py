"""``audit``: what every module of a model or a run has and computes in, compared with what was declared for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import LightningModule, Precision, Trainer, check_copy, trainer_of
from lightning_mp.errors import Faults
from lightning_mp.monitor.audit import declared
from lightning_mp.monitor.audit.judge import Record
from lightning_mp.monitor.audit.observer import (
    Observed,
    modules_of,
    note_gradients,
    note_parameters,
    states_of,
    unseen,
)
from lightning_mp.monitor.audit.report import AuditReport, AuditRow, build
from lightning_mp.policy import PrecisionPolicy

__all__ = ["AuditReport", "AuditRow", "audit"]

_NOTHING_RAN = (
    "nothing was run: inputs, outputs and computation are those a PrecisionAudit callback saw, if there was one"
)


def audit(
    model_or_trainer: nn.Module | Trainer, *, plan: Precision | PrecisionPolicy | str | None = None
) -> AuditReport:
    """Declared against observed dtypes, a row for every module with parameters of its own; nothing is changed.

    For a Trainer, or a LightningModule attached to one, during or after ``fit``: parameters, gradients and optimizer
    state as they are now, and what a ``PrecisionAudit`` callback of its saw run; declared is what its precision
    plugin declares. Only this process is audited.

    For a bare module: parameters and gradients. Nothing is run.

    Args:
        model_or_trainer: what to look at.
        plan: for a module, a plan, its policy, one of Lightning's precision plugins, or a precision (``"bf16-mixed"``).
            What it would *change* in the module is not done here: call ``plan.convert_module(module)`` first, as the
            Trainer does.

    Raises:
        PlanError: a Trainer that has no module yet, or one together with ``plan``.
    """
    check_copy(model_or_trainer, "audit")
    trainer = model_or_trainer if isinstance(model_or_trainer, Trainer) else None
    if trainer is None and plan is None and isinstance(model_or_trainer, LightningModule):
        trainer = trainer_of(model_or_trainer)
    if trainer is not None:
        return _of_run(trainer, plan)
    module = cast("nn.Module", model_or_trainer)
    modules = modules_of(module)
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    seen = unseen(modules)
    note_gradients(seen, modules)
    note_parameters(seen, modules, {})
    return build(declared.by_any(plan, modules, device), [seen], where=device.type, notes=(_NOTHING_RAN,))


def _of_run(trainer: Trainer, plan: object) -> AuditReport:
    module = trainer.strategy.lightning_module
    with Faults("audit") as faults:
        if module is None:
            faults.add("a Trainer without a module", "call audit(module, plan=...) before fit")
        if plan is not None:
            faults.add("a Trainer with plan=", "remove it, or call audit(module, plan=...)")
    modules = modules_of(faults.sound(module))
    declaration, seen = declared.by_trainer(trainer, modules), unseen(modules)
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
