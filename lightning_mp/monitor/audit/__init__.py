"""``audit``: what every module of a model or a run has and computes in, compared with what was declared for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp.compat.lightning import LightningModule, Precision, Trainer, check_copy, trainer_of
from lightning_mp.errors import Faults
from lightning_mp.monitor.audit import declared
from lightning_mp.monitor.audit.inspect_run import Record, modules_of, one_pass, states_of
from lightning_mp.monitor.audit.observer import Observed, note_gradients, note_parameters, unseen
from lightning_mp.monitor.audit.report import AuditReport, AuditRow, build
from lightning_mp.policy import PrecisionPolicy

__all__ = ["AuditReport", "AuditRow", "audit"]

_NOTHING_RAN = (
    "nothing was run: inputs, outputs and computation are those a PrecisionAudit callback saw, if there was one"
)


def audit(
    model_or_trainer: nn.Module | Trainer,
    *,
    plan: Precision | PrecisionPolicy | str | None = None,
    batch: Any = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
) -> AuditReport:
    """Declared against observed dtypes, a row for every module with parameters of its own; nothing is changed.

    For a Trainer, or a LightningModule attached to one, during or after ``fit``: parameters, gradients and optimizer
    state as they are now, and what a ``PrecisionAudit`` callback of its saw run; declared is what its precision
    plugin declares. Only this process is audited.

    For a bare module: parameters, gradients, and the state of ``optimizer``. With ``batch`` one forward and backward
    pass is made as ``plan`` has it (autocast, or a default dtype) and then undone: gradients, buffers and random
    numbers are as before. The batch goes into ``training_step`` of a LightningModule; else a mapping is unpacked as
    keywords and a tuple or list as arguments, and the loss is ``output.loss``, ``output["loss"]`` or the sum of the
    outputs.

    Args:
        model_or_trainer: what to look at.
        plan: a plan, its policy, one of Lightning's precision plugins, or a precision (``"bf16-mixed"``). What it would
            *change* in the module is not done here: call ``plan.convert_module(module)`` first, as the Trainer does.
        batch: one batch, on the module's device.
        optimizer: one or several, for a bare module.

    Raises:
        PlanError: a Trainer that has no module yet, or one together with ``plan``, ``batch`` or ``optimizer``.
    """
    check_copy(model_or_trainer, "audit")
    alone = plan is None and batch is None and not isinstance(optimizer, Optimizer) and not tuple(optimizer)
    trainer = model_or_trainer if isinstance(model_or_trainer, Trainer) else None
    if trainer is None and alone and isinstance(model_or_trainer, LightningModule):
        trainer = trainer_of(model_or_trainer)
    if trainer is not None:
        return _of_run(trainer, alone)
    module = cast("nn.Module", model_or_trainer)
    modules = modules_of(module)
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    declaration = declared.by_any(plan, modules, device)
    if batch is None:
        seen = unseen(modules)
        note_gradients(seen, modules)
    else:
        seen = one_pass(modules, batch, declaration, device)
    note_parameters(seen, modules, states_of([optimizer] if isinstance(optimizer, Optimizer) else optimizer))
    return build(declaration, [seen], where=device.type, notes=(_NOTHING_RAN,) if batch is None else ())


def _of_run(trainer: Trainer, alone: bool) -> AuditReport:
    module = trainer.strategy.lightning_module
    with Faults("audit") as faults:
        if module is None:
            fix = "call audit(module, plan=...) before fit"
            faults.add("a Trainer without a module", "a Trainer during or after fit", fix)
        if not alone:
            given = "a Trainer with plan=, batch= or optimizer="
            faults.add(given, "the Trainer alone", "remove them, or call audit(module, plan=...)")
    assert module is not None
    modules = modules_of(module)
    declaration, seen = declared.by_trainer(trainer, modules), unseen(modules)
    note_parameters(seen, modules, states_of(trainer.optimizers))
    note_gradients(seen, modules)
    record = next(filter(None, map(_record, cast("Any", trainer).callbacks)), None)
    if record is not None:
        for name in seen.keys() & record.seen.keys():
            now, then = ((one.declared(name), one.stored(name)) for one in (declaration, record.declaration))
            _add_record(seen[name], record.seen[name], same=now == then)
    where = f"{trainer.strategy.root_device.type}, after {trainer.global_step} steps"
    return build(declaration, [seen], where=where, notes=() if record else (_NOTHING_RAN,))


def _record(callback: object) -> Record | None:
    found = getattr(callback, "record", None)
    return found if isinstance(found, Record) else None


def _add_record(seen: Observed, before: Observed, same: bool) -> None:
    """Add what only shows while a step runs; what ran under another declaration (a pin removed since) is past."""
    seen.add(replace(before, trained=set(), frozen=set(), special=set(), grad=seen.grad or before.grad, state=set()))
    if not seen.state:
        seen.state |= before.state
    if not same:
        for past in (seen.ran, seen.grad, seen.state):
            past.clear()
