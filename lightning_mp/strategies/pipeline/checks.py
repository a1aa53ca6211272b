"""Why a module, a plan or a Trainer cannot run in stages: everything that is known before the first batch."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from lightning_mp.compat.lightning import (
    LightningModule,
    Trainer,
    TrainerFn,
    is_compiled,
    is_overridden,
    trainer_of,
    validates,
)
from lightning_mp.compat.torch import is_compiled as is_compiled_module
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Fault, Faults
from lightning_mp.modules.remote import is_remote
from lightning_mp.strategies import unfit
from lightning_mp.strategies.pipeline.batches import rows_that_do_not_divide
from lightning_mp.strategies.pipeline.schedules import SCHEDULES, Layout
from lightning_mp.strategies.pipeline.stages import Cut, cut, units_of

PREDICTS = Fault(
    "trainer.predict under pipeline parallelism",
    "fit, validate and test, whose schedule ends in a loss",
    "load the checkpoint into the plain module and predict with strategy='mp_ddp' or 'mp_fsdp2'",
)
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
    unfit.refuse_with_stages(model, faults)
    policy = engine.policy
    if policy.precision not in _MODES:
        faults.add(f"precision={policy.precision!r} under pipeline parallelism", ", ".join(_MODES), "use 'bf16-mixed'")
    if not model.automatic_optimization:
        faults.add(
            "manual optimization under pipeline parallelism",
            "automatic optimization: the schedule runs forward and backward itself",
            "leave out automatic_optimization=False, or use strategy='mp_ddp'",
        )
    if is_overridden("backward", model, LightningModule):
        faults.add(
            "LightningModule.backward overridden under pipeline parallelism",
            "the backward passes of the schedule, one for each micro-batch",
            "move it to on_before_backward / on_after_backward, or use strategy='mp_ddp'",
        )
    if syncs_batch_norm:
        faults.add(
            "sync_batchnorm=True under pipeline parallelism",
            "batch norms whose statistics are those of a micro-batch",
            "leave it out, or use strategy='mp_ddp'",
        )
    _check_compiled(model, layout.schedule, faults)
    _check_methods(model, faults)
    if known is None and any(map(is_remote, model.parameters())):
        faults.add(
            f"{type(model).__name__}, whose other stages are on the ranks of an earlier run",
            "a module with all its weights, or the Trainer that cut it",
            "make the module anew and load the checkpoint (ckpt_path=...)",
        )
    if faults.found or known is not None:
        return known
    found = cut(model, layout.count, faults)
    if found is not None and not faults.found and shards:
        for index in range(found.count):
            units_of(found.make(index, found.count), engine, faults)
    return found


def _check_compiled(model: LightningModule, schedule: str, faults: Faults) -> None:
    if is_compiled(model):
        faults.add("a compiled LightningModule under pipeline parallelism", "a plain one", "leave out torch.compile")
    if SCHEDULES[schedule].in_two_parts and any(map(_runs_compiled, model.modules())):
        faults.add(
            f"compiled modules with schedule={schedule!r}",
            "modules as they are: torch takes their backward passes apart",
            "leave out torch.compile, or use schedule='interleaved_1f1b'",
        )


def _runs_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or is_compiled_module(module)


def _check_methods(model: LightningModule, faults: Faults) -> None:
    wanted = {
        "pipeline_batch": "pipeline_batch(self, batch), which returns (inputs, target)",
        "pipeline_loss": "pipeline_loss(self, output, target), which returns a scalar",
    }
    for name, what in wanted.items():
        if not callable(getattr(model, name, None)):
            faults.add(
                f"{type(model).__name__} without {name} under pipeline parallelism",
                "a module that says what goes into the first stage and what the last one's output costs",
                f"define {what}",
            )


def loader(trainer: Trainer, microbatches: int) -> None:
    """Raise where the batches of the training loader, the last one included, cannot be cut into micro-batches."""
    given: Any = trainer.train_dataloader
    rows, data = getattr(given, "batch_size", None), getattr(given, "sampler", None)
    if not isinstance(rows, int):
        return
    with Faults("strategy") as faults:
        if rows % microbatches:
            faults.add(*rows_that_do_not_divide(rows, microbatches))
        try:
            left = len(cast("Any", data)) % rows
            reached = trainer.num_training_batches >= len(given)
        except TypeError:  # an iterable data set; each batch is looked at when it comes
            return
        if left and reached and not given.drop_last:
            faults.add(
                f"a last batch of {left} rows after batches of {rows}, under pipeline parallelism",
                "training batches of one shape",
                "use DataLoader(drop_last=True)",
            )


def _never(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the schedule runs instead of this step")


def install_steps(model: LightningModule) -> None:
    """Lightning asks for the steps that are not called here; a module without them gets some for the run."""
    trainer = trainer_of(model)
    if trainer is None or not callable(getattr(model, "pipeline_loss", None)):
        return
    stage = trainer.state.fn
    wanted = {
        "training_step": stage == TrainerFn.FITTING,
        "validation_step": stage == TrainerFn.VALIDATING or (stage == TrainerFn.FITTING and validates(trainer)),
        "test_step": stage == TrainerFn.TESTING,
    }
    for name, needed in wanted.items():
        if needed and not is_overridden(name, model):
            model.__dict__[name] = _never


def remove_steps(model: LightningModule | None) -> None:
    """Remove what :func:`install_steps` installed."""
    own = {} if model is None else model.__dict__
    for name in [name for name, value in own.items() if value is _never]:
        del own[name]
