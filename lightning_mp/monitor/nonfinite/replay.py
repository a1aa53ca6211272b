"""Runs a batch again, forward and backward, to find the rank and the module where a non-finite value first appeared."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    DummyLogger,
    LightningModule,
    Strategy,
    Trainer,
    begins_window,
    draws_batches_itself,
    step_inputs,
)
from lightning_mp.compat.torch_sharding import unsummed_gradients
from lightning_mp.engines.diagnosis import Found, first_bad_rank
from lightning_mp.modules import fp8
from lightning_mp.modules.patterns import plain_name
from lightning_mp.monitor.side_run import loss_of, shadow, untouched
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.dtypes import map_tensors
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.numerics.rng import RngState, rng_state, set_rng_state


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where a non-finite value came from; the same on every rank.

    ``rank`` is the one whose own loss or gradients were bad, before they were summed over ranks; ``origin`` the module
    and parameter on it; ``bad_loss`` whether its loss was non-finite already; ``batch_idx`` the batch, under gradient
    accumulation the first bad one of the window. Each is ``None`` where it is not known; ``note`` says why.
    """

    rank: int | None = None
    origin: Origin | None = None
    bad_loss: bool = False
    batch_idx: int | None = None
    note: str | None = None

    @property
    def module(self) -> str | None:
        """The origin's module."""
        return None if self.origin is None else self.origin.module

    @property
    def parameter(self) -> str | None:
        """The origin's parameter."""
        return None if self.origin is None else self.origin.parameter


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A batch as ``training_step`` got it, with everything else that decides its result.

    ``scale`` is the loss scale of its backward pass, a device scalar, ``None`` without loss scaling; ``parts`` are the
    micro-batches that its loss is divided by; ``numbers`` are the LightningModule's own (counters), ``lengths`` those
    of its lists; ``devices`` tells where tensors that were moved to the host came from, by their ``id`` there.
    """

    batch: Any
    batch_idx: int
    parts: int
    step: int
    rng: RngState
    scale: Tensor | None
    numbers: dict[str, Any]
    lengths: dict[str, int]
    devices: dict[int, torch.device] = field(default_factory=dict[int, torch.device])

    def on_host(self) -> KeptBatch:
        """The same in host memory; from a CUDA device the copy does not wait for it."""
        devices: dict[int, torch.device] = {}

        def moved(tensor: Tensor) -> Tensor:
            if tensor.device.type == "cpu":
                return tensor
            copied = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)  # pinned then
            devices[id(copied)] = tensor.device
            return copied

        return replace(self, batch=map_tensors(self.batch, moved), devices=self.devices | devices)

    def on_device(self) -> Any:
        """The batch, with every tensor where ``training_step`` got it."""
        return map_tensors(self.batch, lambda tensor: tensor.to(self.devices.get(id(tensor), tensor.device)))


class Replayer:
    """Keeps the micro-batches of the open accumulation window, and runs them again when asked what went wrong.

    The one at hand is kept by reference: what ``training_step`` changes in it in place stays changed. The window's
    earlier ones wait in host memory, so that no more than one stays on the device.
    """

    def __init__(self) -> None:
        self._window: list[KeptBatch] = []

    def remember(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Keep what is needed to run this batch again; call it in ``on_train_batch_start``.

        It costs a few small copies on the host, and never synchronises with the device.
        """
        module = trainer.lightning_module
        if not module.automatic_optimization or begins_window(trainer, batch_idx):
            self._window.clear()
        if draws_batches_itself(trainer):
            return  # a batch cannot be drawn twice
        device = trainer.strategy.root_device
        attributes = vars(module).items()
        if self._window:
            self._window[-1] = self._window[-1].on_host()
        self._window.append(
            KeptBatch(
                apply_to_collection(batch, Tensor, lambda tensor: tensor),
                batch_idx,
                trainer.accumulate_grad_batches if module.automatic_optimization else 1,
                trainer.global_step,
                rng_state(device),
                _scale(trainer, device),
                {name: value for name, value in attributes if type(value) in (int, float)},
                {name: len(value) for name, value in attributes if type(value) is list},
            )
        )

    def forget(self) -> None:
        """Drop the batches."""
        self._window.clear()

    def kept(self, batch_idx: int | None) -> KeptBatch | None:
        """The batch of that index, if it is still kept; the last one for ``None``."""
        found = [kept for kept in self._window if batch_idx in (None, kept.batch_idx)]
        return found[-1] if found else None

    def locate(self, trainer: Trainer, pl_module: LightningModule, at_hand: Origin | None = None) -> Diagnosis:
        """Run the batches of the window again, one after the other, until one is bad; every rank has to call it.

        Call it between the backward pass and the next batch; under manual optimization outside of ``training_step``.
        Nothing is left behind: generators, buffers, gradients and attributes of modules are as before, and nothing is
        logged. ``at_hand`` is what gradients said before they were dropped. Under ZeRO-3 only the forward is replayed,
        since backward belongs to DeepSpeed's engine. Where weights are non-finite already because the bad step was
        applied, the first module with such a weight is named.
        """
        distributed = trainer.world_size > 1
        notes = ["under ZeRO-3 only the forward is run again"] if _forward_only(trainer.strategy) else []
        for kept in self._window:
            mine = _replayed(trainer, pl_module, kept, notes)
            rank, (origin, bad_loss) = first_bad_rank(mine, distributed=distributed)
            if origin is not None or bad_loss:
                return Diagnosis(rank, origin, bad_loss, kept.batch_idx)
        return _without_replay(pl_module, at_hand, self._window, notes, distributed=distributed)

    def __getstate__(self) -> dict[str, Any]:
        return {"_window": []}


# ---------------------------------------------------------------------- one replay


def _replayed(trainer: Trainer, module: LightningModule, kept: KeptBatch, notes: list[str]) -> Found:
    backward = not _forward_only(trainer.strategy)
    losses: list[Tensor] = []

    def run() -> Tensor | None:
        _step(trainer, module, kept, losses, backward=backward)
        return torch.stack([loss.detach().float().sum() for loss in losses]) if losses else None

    try:
        with _aside(trainer, module, kept), torch.set_grad_enabled(backward):
            locate = partial(nonfinite.locate, module, run, backward=backward)
            own = not isinstance(trainer.strategy, DeepSpeedStrategy) or not backward
            origin = fp8.with_role(module, locate() if own else _on_fresh_parameters(module, locate))
    except Exception as error:  # a diagnosis must not end a run that would have gone on
        notes.append(f"the replay of batch {kept.batch_idx} failed: {type(error).__name__}: {error}")
        return None, False
    bad_loss = not all(bool(torch.isfinite(loss).all()) for loss in losses)
    return (None if origin is None else _plainly_named(origin)), bad_loss


def _step(trainer: Trainer, module: LightningModule, kept: KeptBatch, losses: list[Tensor], *, backward: bool) -> None:
    """``training_step`` and the backward pass of its loss; every loss goes to ``losses``."""
    strategy, whole = trainer.strategy, _holds_whole_weights(trainer.strategy)

    def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        losses.append(loss.detach())
        if not backward:
            return loss
        if not whole:
            strategy.pre_backward(loss)
        scaled = loss if kept.scale is None else loss.float() * kept.scale
        with torch.autocast(strategy.root_device.type, enabled=False):  # manual optimization calls it in training_step
            module.backward(scaled, *args, **kwargs)
        return loss

    inputs = step_inputs(trainer, kept.on_device(), kept.batch_idx)
    with ExitStack() as stack:
        if not module.automatic_optimization:
            _hold_steps(trainer, stack, run_backward)
        if whole:  # past the wrapper, which would sum over ranks
            stack.enter_context(trainer.precision_plugin.forward_context())
            output = module.training_step(*inputs)
        else:
            output = strategy.training_step(*inputs)
    if module.automatic_optimization:
        loss = loss_of(output)
        if loss is not None:
            run_backward(loss / kept.parts)


def _holds_whole_weights(strategy: Strategy) -> bool:
    """Whether ``training_step`` can be called as it is, without the wrapper that holds or gathers weights for it."""
    if isinstance(strategy, DeepSpeedStrategy):
        return not strategy.zero_stage_3
    return isinstance(strategy.model, DistributedDataParallel)


def _forward_only(strategy: Strategy) -> bool:
    """Whether a backward pass is the engine's alone: it frees what the forward gathered, and counts on it."""
    return isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3


def _hold_steps(trainer: Trainer, stack: ExitStack, backward: Any) -> None:
    """Under manual optimization: backward is ours, and neither an optimizer nor a scheduler moves."""
    shadow(stack, trainer.strategy, "backward", lambda loss, _optimizer, *args, **kw: backward(loss, *args, **kw))
    shadow(stack, trainer.strategy, "optimizer_step", lambda _optimizer, closure, *_args, **_kwargs: closure())
    for optimizer in trainer.optimizers:
        shadow(stack, optimizer, "step", lambda closure=None: None if closure is None else closure())
    for config in trainer.lr_scheduler_configs:
        shadow(stack, config.scheduler, "step", lambda *_args, **_kwargs: None)


# ---------------------------------------------------------------------- restoring everything


@contextmanager
def _aside(trainer: Trainer, module: LightningModule, kept: KeptBatch) -> Generator[None, None, None]:
    """Within, ``module`` is in the state in which it ran ``kept``; afterwards everything is as before."""
    device = trainer.strategy.root_device
    with ExitStack() as stack:
        stack.enter_context(untouched(module, device))
        stack.enter_context(unsummed_gradients(module))
        for name in ("log", "log_dict"):
            shadow(stack, module, name, lambda *_args, **_kwargs: None)
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        done = _steps_done(trainer)
        stack.callback(setattr, done, "completed", done.completed)
        done.completed -= trainer.global_step - kept.step
        vars(module).update(kept.numbers)
        for name, length in kept.lengths.items():
            del vars(module)[name][length:]
        set_rng_state(kept.rng, device)
        yield


class _Call(nn.Module):
    """A function of a module as a module's forward."""

    def __init__(self, module: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> Any:
        """Call the function."""
        return self.function()


def _on_fresh_parameters(module: nn.Module, function: Callable[[], Any]) -> Any:
    """``function()`` with the same weights in other parameters: on its own ones DeepSpeed collects gradients."""
    call = _Call(module, function)
    fresh = {
        name: parameter.detach().requires_grad_(parameter.requires_grad) for name, parameter in call.named_parameters()
    }
    return functional_call(call, fresh, (), tie_weights=True)


# ---------------------------------------------------------------------- what is kept, and a diagnosis without a replay


def _steps_done(trainer: Trainer) -> Any:
    """What ``trainer.global_step`` counts with."""
    loop: Any = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def _scale(trainer: Trainer, device: torch.device) -> Tensor | None:
    """A copy of the scale: it has moved on by the time it is asked for."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    if isinstance(scaler, LossScaler):
        return cast("Tensor", scaler.place(device).scale).clone()  # asking for it is not to look like a loss
    return scaler.scale(torch.ones((), dtype=torch.float32, device=device))


def _plainly_named(origin: Origin) -> Origin:
    return replace(
        origin, module=plain_name(origin.module), parameter=origin.parameter and plain_name(origin.parameter)
    )


def _without_replay(
    module: nn.Module, at_hand: Origin | None, window: list[KeptBatch], notes: list[str], *, distributed: bool
) -> Diagnosis:
    """What weights and gradients say, which may have come from any rank.

    Where every rank ran the window again and met nothing, a gradient that is not finite was changed on its own rank.
    """
    batch_idx = window[0].batch_idx if len(window) == 1 else None
    origin = nonfinite.from_parameters(module)
    if origin is None:
        origin = at_hand or nonfinite.from_gradients(module)
        if window and not notes and origin is not None:
            origin = replace(origin, phase="after backward")
    origin = fp8.with_role(module, origin)
    rank, (found, _) = first_bad_rank((origin and _plainly_named(origin), False), distributed=distributed)
    if found is not None and found.phase == "after backward":
        return Diagnosis(rank, found, False, batch_idx)
    note = "; ".join(notes) or "run again, no batch of the window was non-finite by itself"
    return Diagnosis(None if distributed else rank, found, False, batch_idx, note)
