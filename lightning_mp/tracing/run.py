"""Two optimizer steps of the real Trainer, without memory."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import (
    Callback,
    DummyLogger,
    LightningEnvironment,
    LightningModule,
    Trainer,
    rank_zero_only,
)
from lightning_mp.compat.torch_fake import FakeTensorMode, fake_ranks, moved_in_place, resizes_told
from lightning_mp.compat.transformers import fakes_unnoticed
from lightning_mp.engines.optimizer_facts import calls_closure_again
from lightning_mp.errors import PlanError
from lightning_mp.monitor.side_run import BARE
from lightning_mp.numerics.rng import process_kept
from lightning_mp.planner.memory import MemoryPrediction
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import trainer_kwargs
from lightning_mp.tracing.storages import (
    FakeCopies,
    Storages,
    alive,
    fake_batch,
    fake_module,
    known,
    peak,
    strided,
)

STEPS = 2
ALONE: Mapping[str, Any] = {**BARE, "max_steps": STEPS}
#: of a run's Trainer arguments, those that this run decides, and those that write
LEFT_OUT = frozenset(
    ("max_time", "num_nodes", "plugins", "callbacks", "logger", "profiler", "ckpt_path", "default_root_dir")
)


class _Follow(Callback):
    """Tells the storages where the run is, and what tensors are for."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.first: int | None = None
        self.end = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < STEPS:
            self._name(trainer, pl_module)
        if self.first is None:
            self.first = len(self._storages.events)
        self._storages.in_forward = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._storages.in_forward = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._name(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._storages.in_forward = False
        self._name(trainer, pl_module)
        if trainer.global_step == STEPS and not self.end:
            self.end = len(self._storages.events)

    def _name(self, trainer: Trainer, module: LightningModule) -> None:
        name, parameters = self._storages.name, list(module.parameters())
        name(strided(parameters), "parameters")
        name(strided(module.buffers()), "buffers")
        name(strided(parameter.grad for parameter in parameters), "gradients")
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                name(strided(state.values()), "optimizer_state")


class _OneOfMany(LightningEnvironment):
    """The first of so many processes, none of which is started."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._size

    def local_rank(self) -> int:
        return 0


@contextmanager
def _kept() -> Generator[None, None, None]:
    """On exit the process and its rank are as they were; silent within."""
    rank, disabled = getattr(rank_zero_only, "rank", None), logging.root.manager.disable
    try:
        logging.disable(logging.ERROR)
        with process_kept(torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        cast("Any", rank_zero_only).rank = rank


def traced(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, trainer_args: Mapping[str, Any]
) -> MemoryPrediction:
    """Run ``STEPS`` optimizer steps on copies without memory; ``trainer_args`` names strategy and devices.

    Raises:
        Exception: whatever the module, the plan or torch raise on tensors whose numbers are not known.
    """
    device = torch.device("cpu")  # where the module is made; Lightning moves it
    on_cuda = torch.cuda.is_available() and trainer_args.get("accelerator", "auto") in ("auto", "gpu", "cuda")
    storages = Storages("cuda" if on_cuda else "cpu")
    follow = _Follow(storages)
    given = {key: value for key, value in trainer_args.items() if key not in LEFT_OUT}
    device_type = "cuda" if on_cuda else "cpu"  # also for a device that this machine lacks: sizes are the same
    arguments: dict[str, Any] = {**given, "accelerator": device_type, **ALONE, "callbacks": [follow]}
    ranks = arguments.get("devices", 1)
    with ExitStack() as stack:
        stack.enter_context(_kept())
        stack.enter_context(moved_in_place())
        stack.enter_context(fakes_unnoticed())
        stack.enter_context(resizes_told(storages.resized))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if ranks > 1 or arguments.get("strategy", "auto") not in ("auto", "ddp"):
            stack.enter_context(fake_ranks(ranks, known))
            arguments["plugins"] = [_OneOfMany(ranks)]
        mine = MixedPrecisionPlan.from_policy(plan.policy)
        trainer = Trainer(**trainer_kwargs(mine, logger=DummyLogger(), **arguments))
        stack.enter_context(storages)
        stack.enter_context(FakeCopies(device))
        copied = fake_module(module, device)
        # what a user's hooks may write or fetch
        copied.configure_callbacks, copied.prepare_data = list, lambda: None
        trainer.fit(copied, train_dataloaders=repeat(fake_batch(batch, device)))
    events, end = storages.events, follow.end or len(storages.events)
    # the second step's, as a rule: before an optimizer's first one its weights may be kept, as Adafactor's are
    again = [type(one).__name__ for one in trainer.optimizers if calls_closure_again(one)]
    notes = tuple(f"{name} goes on for as long as numbers say that are not known: it needs more" for name in again)
    return MemoryPrediction(*peak(events, follow.first or 0, end), alive(events, end), "traced", notes)


def step_error(module: nn.Module, batch: Any, policy: PrecisionPolicy | None, precision: str) -> Exception | None:
    """What a copy of ``module`` raises when a Trainer makes one step of it with ``batch``, for real and on the CPU.

    ``policy`` is the plan's, or ``None`` where ``precision`` is one of Lightning's own. ``None`` where nothing is
    raised, or a plan refuses to run on this machine.
    """
    copied = cast("Any", copy.deepcopy(module))
    copied.configure_callbacks, copied.prepare_data = list, lambda: None
    regime: dict[str, Any] = {"precision": precision}
    if policy is not None:
        regime = {"plugins": [MixedPrecisionPlan.from_policy(policy)]}
    with _kept():
        alone = {**BARE, "max_epochs": 1, "limit_train_batches": 1, "logger": DummyLogger()}
        trainer = Trainer(accelerator="cpu", devices=1, **alone, **regime)
        try:
            trainer.fit(copied, train_dataloaders=repeat(batch))
        except PlanError:
            return None
        except Exception as error:
            return error
    return None
