"""Why a module, a plan or a Trainer cannot run in stages: everything that is known before the first batch."""

from __future__ import annotations

from typing import Any

from lightning_mp.compat.lightning import (
    LightningModule,
    Trainer,
    TrainerFn,
    is_compiled,
    is_overridden,
    trainer_of,
    validates,
)
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules.remote import is_remote
from lightning_mp.strategies import unfit
from lightning_mp.strategies.pipeline.schedules import SCHEDULES, Layout
from lightning_mp.strategies.pipeline.stages import Cut, cut, units_of

_HOOKS = "move it to on_before_backward or on_after_backward: the schedule runs backward for each micro-batch"
_BATCH = "define pipeline_batch(self, batch), which returns (inputs, target)"
_LOSS = "define pipeline_loss(self, output, target), which returns a scalar"
_MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def arguments(
    stages: int | None, schedule: str, microbatches: int | None, replicas: int | str, virtual_stages: int
) -> None:
    """Raise where an argument is out of its range."""
    with Faults("make_strategy") as faults:
        if schedule not in SCHEDULES:
            faults.unknown("schedule", schedule, SCHEDULES)
        if stages is not None:
            faults.whole("stages", stages, 2, "use 2 or more, or strategy='mp_ddp'")
        if microbatches is not None:
            faults.whole("microbatches", microbatches, 1, "use a multiple of the stages")
        if replicas != "auto":
            faults.whole("data_parallel_size", replicas, 1, "use 1, or leave it out")
        faults.whole("virtual_stages", virtual_stages, 2, "use 2, or schedule='1f1b'")


def module(
    model: LightningModule,
    engine: StepEngine,
    layout: Layout,
    faults: Faults,
    *,
    known: Cut | None,
    shards: bool,
    syncs_batch_norm: bool,
) -> Cut | None:
    """Note why ``model`` cannot be run in stages; else how it is cut, which is ``known`` where a run before did."""
    unfit.refuse(model, "stages", faults)
    name, policy = type(model).__name__, engine.policy
    if policy.precision not in _MODES:
        faults.add(f"precision={policy.precision!r} under pipeline parallelism", ", ".join(_MODES), "use 'bf16-mixed'")
    for holds, given, fix in (
        (not model.automatic_optimization, "manual optimization", "leave out automatic_optimization=False"),
        (is_overridden("backward", model, LightningModule), "LightningModule.backward overridden", _HOOKS),
        (syncs_batch_norm, "sync_batchnorm=True", "leave it out: batch norms see a micro-batch"),
        (is_compiled(model), "a compiled LightningModule", "leave out torch.compile"),
        (not callable(getattr(model, "pipeline_batch", None)), f"{name} without pipeline_batch", _BATCH),
        (not callable(getattr(model, "pipeline_loss", None)), f"{name} without pipeline_loss", _LOSS),
    ):
        if holds:
            faults.add(f"{given} cannot run in pipeline stages", f"{fix}, or use strategy='mp_ddp'")
    if known is None and any(map(is_remote, model.parameters())):
        faults.add(
            f"the other stages of {name} are on the ranks of an earlier run",
            "make the module anew and load the checkpoint (ckpt_path=...)",
        )
    if faults.found or known is not None:
        return known
    found = cut(model, layout.count, faults)
    if found is not None and not faults.found and shards:
        for index in range(found.count):
            units_of(found.make(index, found.count), engine, faults)
    return found


def loader(trainer: Trainer) -> None:
    """Raise where the last batch of the training loader is a smaller one."""
    given: Any = trainer.train_dataloader
    try:
        left = len(given.sampler) % given.batch_size
        reached = trainer.num_training_batches >= len(given)
    except (AttributeError, TypeError):  # an iterable data set; each batch is looked at when it comes
        return
    if left and reached and not given.drop_last:
        given = f"a last batch of {left} rows after batches of {given.batch_size} does not fit the pipeline's buffers"
        raise PlanError.of(given, "use DataLoader(drop_last=True)", "strategy")


def _never(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the schedule runs instead of this step")


def install_steps(model: LightningModule) -> None:
    """Lightning asks for the steps that are not called here; a module without them gets some for the run."""
    trainer = trainer_of(model)
    if trainer is None or not callable(getattr(model, "pipeline_loss", None)):
        return
    # Lightning warns of a validation_step without data
    left_out = "validation_step" if trainer.state.fn == TrainerFn.FITTING and not validates(trainer) else ""
    for name in ("training_step", "validation_step", "test_step"):
        if name != left_out and not is_overridden(name, model):
            model.__dict__[name] = _never


def remove_steps(model: LightningModule | None) -> None:
    """Remove what :func:`install_steps` installed."""
    own = {} if model is None else model.__dict__
    for name in [name for name, value in own.items() if value is _never]:
        del own[name]
