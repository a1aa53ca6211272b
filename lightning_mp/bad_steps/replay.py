"""``Replayer``, which runs batches again to find the rank and the module of a non-finite value."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    DummyLogger,
    FSDPStrategy,
    LightningModule,
    Trainer,
    begins_window,
    draws_batches_itself,
    rank_zero_warn,
    step_inputs,
)
from lightning_mp.compat.torch_sharding import unsummed_gradients
from lightning_mp.health.scale_sources import scale_source
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.contents import Contents, RestoredParameters, restore_data
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.numerics.rng import RngState, rng_state, set_rng_state
from lightning_mp.plan.diagnosis import Diagnosis, first_bad_rank, named
from lightning_mp.plan.side_run import loss_of, untouched


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A batch as ``training_step`` got it, with the state (except weights) to run it again.

    Attributes:
        batch: by reference, so later changes in place are in it.
        batch_idx: its index in the epoch.
        parts: the micro-batches of a step, by which the loss is divided.
        step: ``trainer.global_step`` at its forward.
        rng: the random generators before its forward.
        scale: the loss scale of its backward pass as a tensor; ``None`` without loss scaling.
        numbers: the int and float attributes of the LightningModule, such as counters.
    """

    batch: Any
    batch_idx: int
    parts: int
    step: int
    rng: RngState
    scale: Tensor | None
    numbers: dict[str, Any]


class Replayer:
    """A store of the open accumulation window's micro-batches, which runs them again on request.

    Batches are kept by reference. So they stay on the device, and in-place changes by
    ``training_step`` remain.
    """

    def __init__(self) -> None:
        self._window: list[KeptBatch] = []

    def remember(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Keep a batch and the state to run it again. Call it in ``on_train_batch_start``.

        The batches of an earlier window are dropped first, under manual optimization all earlier
        ones. A batch that ``training_step`` draws itself (``dataloader_iter``) is not kept. The
        cost is a few small copies on the host, without a device sync.
        """
        module = trainer.lightning_module
        if not module.automatic_optimization or begins_window(trainer, batch_idx):
            self._window.clear()
        if draws_batches_itself(trainer):
            return  # a batch cannot be drawn twice
        device, source = trainer.strategy.root_device, scale_source(trainer)
        scale = None if source is None else source.scale()
        self._window.append(
            KeptBatch(
                apply_to_collection(batch, Tensor, lambda tensor: tensor),
                batch_idx,
                trainer.accumulate_grad_batches if module.automatic_optimization else 1,
                trainer.global_step,
                rng_state(device),
                None if scale is None else torch.as_tensor(scale).clone(),  # a copy: the scale will change
                {name: value for name, value in vars(module).items() if type(value) in (int, float)},
            )
        )

    def forget(self) -> None:
        """Drop all batches."""
        self._window.clear()

    def kept(self, batch_idx: int | None) -> KeptBatch | None:
        """Return the kept batch of that index, or the last one for ``None``.

        ``None`` is returned if that batch is not kept.
        """
        return next((kept for kept in reversed(self._window) if batch_idx in (None, kept.batch_idx)), None)

    def locate(self, trainer: Trainer, from_gradients: Origin | None = None) -> Diagnosis:
        """Run the window's batches again until one is bad, and return the diagnosis.

        Every rank must call it.

        If no batch is bad by itself, the origin comes from the parameters: the first module with a
        non-finite weight. Without such a module it comes from the gradients. The diagnosis has no
        origin if these are finite, too.

        Call it between the backward pass and the next batch. Generators, buffers, gradients and
        attributes of modules are restored, and nothing is logged. A value that cannot be restored
        gives a warning. An error of the replay is not raised, but noted in the diagnosis. Under
        DeepSpeed only the forward is run again, because its engine owns the backward pass. Under
        manual optimization no batch is run again.

        Args:
            trainer: the Trainer of the run.
            from_gradients: the origin guessed from the gradients before they were dropped, or
                ``None``.
        """
        module, distributed = trainer.lightning_module, trainer.world_size > 1
        zero = isinstance(trainer.strategy, DeepSpeedStrategy)
        notes = ["under DeepSpeed only the forward is run again"] if zero else []
        if not module.automatic_optimization:
            notes = ["under manual optimization no batch is run again"]
        for kept in self._window if module.automatic_optimization else ():
            origin, bad_loss = _replayed(trainer, module, kept, notes)
            diagnosis = first_bad_rank(origin, bad_loss, distributed=distributed)
            if diagnosis.origin is not None or diagnosis.bad_loss:
                return replace(diagnosis, batch_idx=kept.batch_idx)
        # Weights and gradients may be bad because of any rank.
        origin = nonfinite.from_parameters(module)
        if origin is None:
            origin = from_gradients or nonfinite.from_gradients(module)
            if self._window and not notes and origin is not None:
                # The window was finite on every rank when it was run again. So a gradient was
                # changed after its backward pass.
                origin = replace(origin, phase="after backward")
        diagnosis = first_bad_rank(named(origin), False, distributed=distributed)
        diagnosis = replace(diagnosis, batch_idx=self._window[0].batch_idx if len(self._window) == 1 else None)
        if diagnosis.origin is not None and diagnosis.origin.phase == "after backward":
            return diagnosis
        note = "; ".join(notes) or "run again, no batch of the window was non-finite by itself"
        return replace(diagnosis, rank=None if distributed else diagnosis.rank, note=note)


def _replayed(
    trainer: Trainer, module: LightningModule, kept: KeptBatch, notes: list[str]
) -> tuple[Origin | None, bool]:
    """Return the origin of a batch's first non-finite value, and True if its loss is non-finite.

    If the replay fails, add a line to ``notes`` and return ``(None, False)``. A value that could
    not be restored gives a warning.
    """
    strategy, backward = trainer.strategy, not isinstance(trainer.strategy, DeepSpeedStrategy)
    whole = isinstance(strategy.model, DistributedDataParallel)
    if isinstance(strategy, DeepSpeedStrategy):
        whole = not strategy.zero_stage_3
    losses: list[Tensor] = []

    def run() -> Tensor | None:
        inputs = step_inputs(trainer, kept.batch, kept.batch_idx)
        if whole:  # without the wrapper, which would reduce over ranks
            with trainer.precision_plugin.forward_context():
                output = module.training_step(*inputs)
        else:
            output = strategy.training_step(*inputs)
        loss: Tensor | None = loss_of(output)
        if loss is None:
            return None
        loss = loss / kept.parts
        losses.append(loss.detach())
        if backward:
            if not whole:
                strategy.pre_backward(loss)
            module.backward(loss if kept.scale is None else loss.float() * kept.scale)
        return losses[0]

    origin: Origin | None = None
    failure: Exception | None = None
    try:
        with _replaying(trainer, module, kept), torch.set_grad_enabled(backward):
            try:
                origin = named(nonfinite.locate(module, run, backward=backward))
            except Exception as error:  # a failed diagnosis must not end the run
                failure = error
    except Exception as error:
        rank_zero_warn(
            f"Running batch {kept.batch_idx} again changed something that could not be undone: {_words(error)}"
        )
    if failure is not None:
        notes.append(f"the replay of batch {kept.batch_idx} failed: {_words(failure)}")
        return None, False
    return origin, not all(bool(torch.isfinite(loss).all()) for loss in losses)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _replaying(trainer: Trainer, module: LightningModule, kept: KeptBatch) -> Generator[None, None, None]:
    """Put ``module`` and ``trainer`` into the state in which ``kept`` ran, without loggers.

    On exit the state is restored, and so are parameters that were overwritten.

    If restoring a value raises, the others are still restored, and the error is raised at the end.
    """
    device, parameters = trainer.strategy.root_device, list(module.parameters())
    contents = Contents()
    with ExitStack() as stack:
        stack.enter_context(untouched(module, device))
        stack.callback(contents.restore)
        if not isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):  # these move parameters
            stack.callback(restore_data(parameters))
        stack.enter_context(RestoredParameters(parameters, contents))
        stack.enter_context(unsummed_gradients(module))
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        done = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        stack.callback(setattr, done, "completed", done.completed)
        done.completed -= trainer.global_step - kept.step
        vars(module).update(kept.numbers, **dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
        set_rng_state(kept.rng, device)
        yield
