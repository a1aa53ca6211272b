"""One plan in one seed: a run like the user's own, of which losses, speed and batches are noted."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_mp.comparison.results import RunResult
from lightning_mp.compat.lightning import (
    COPIES,
    Callback,
    LightningDataModule,
    LightningModule,
    Strategy,
    Trainer,
    seed_everything,
)
from lightning_mp.errors import NonFiniteError, PlanError
from lightning_mp.monitor.health.throughput import default_tokens, samples_in
from lightning_mp.monitor.side_run import BARE, loss_of
from lightning_mp.numerics.dtypes import tensors_in
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import trainer_kwargs

#: optimizer steps of a run that is not timed: the second is the first with optimizer state
TRIAL_STEPS = 2
#: steps that are not timed at the beginning of a run, at most
WARM_UP_STEPS = 5
#: what a run has none of, whatever the user's Trainer has
_ALONE: Mapping[str, Any] = {**BARE, "logger": False}
#: Trainer arguments that the comparison owns
OWN = (*_ALONE, "max_steps", "precision", "min_steps", "max_time", "fast_dev_run")

# Tips, "GPU available: False", "max_steps reached" and the like come as INFO, and a model built from a config makes
# transformers warn of ids that a tokenizer does not have. Errors still come through.
_LOGGERS = ("lightning", *chain.from_iterable(COPIES.items()), "transformers")
_WARNINGS = (
    ".*does not have many workers.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*GPU available but not used.*",
    # a run may be a step long, on which fp16 looks for its scale; the table has the count of skips
    "The run applied 0 of its .*",
)


@contextmanager
def quiet() -> Generator[None]:
    """Hide notices of other libraries; loggers and warning filters are back afterwards, errors or not."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.ERROR))
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Noting(MixedPrecisionPlan):
    """A plan that notes a checksum of every batch as it came from the loader, before the plan casts it."""

    batches: list[int]

    def convert_input(self, data: Any) -> Any:
        self.batches.append(_checksum(tensors_in(data)))
        return super().convert_input(data)


@dataclass(eq=False)
class _Watch(Callback):
    """Notes losses on the device, and when the timed steps began and ended; waits for the device twice a run."""

    seed: int
    steps: int
    losses: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])
    tokens: int | None = 0
    samples: int | None = 0
    seconds: float = 0.0
    _step: int = 0
    _start: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Whatever random numbers a plan needed until here, the first order of the data is the same."""
        self._seed(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed(1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """And so is that of every later epoch."""
        self._seed(2 + trainer.current_epoch)

    def _seed(self, number: int) -> None:
        seed_everything((self.seed + 1000003 * number) % 2**32, workers=True, verbose=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        if self._start is None and self._step >= min(WARM_UP_STEPS, self.steps // 2):
            self._start = _now(trainer)
        if self._start is not None:
            count = default_tokens(batch)
            self.tokens = None if count is None or self.tokens is None else self.tokens + count
            count = samples_in(batch)
            self.samples = None if count is None or self.samples is None else self.samples + count

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = loss_of(outputs)
        if isinstance(loss, Tensor):
            # Lightning has divided it by the number of micro-batches, under automatic optimization
            times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append((self._step, loss.detach().float().mean() * times))
        if trainer.global_step >= self.steps and self._start is not None:
            self.seconds = _now(trainer) - self._start

    def read(self, trainer: Trainer) -> list[float]:
        """The loss of every optimizer step, a mean over ranks and micro-batches."""
        if not self.losses:
            return []
        values = torch.stack([loss for _, loss in self.losses])
        reduced = trainer.strategy.reduce(values, reduce_op="mean")
        steps: dict[int, list[float]] = {}
        for (step, _), value in zip(self.losses, reduced.tolist(), strict=True):
            steps.setdefault(step, []).append(value)
        return [statistics.fmean(values) for values in steps.values()]


def _now(trainer: Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(eq=False)
class Runs:
    """The runs of a comparison; within a seed they begin from the same weights and see the same batches.

    ``module`` and ``data`` may be factories, which are called anew for each; ``strategy`` is a name of
    ``make_strategy``'s or makes one for a plan; ``trainer_args`` are the Trainer's.
    """

    module: Callable[[], LightningModule] | LightningModule
    data: Any
    strategy: str | Callable[[MixedPrecisionPlan], Strategy]
    trainer_args: Mapping[str, Any]
    steps: int
    #: how many of the last losses the final loss is the mean of
    last: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_global_zero: bool = True
    module_name: str = ""
    #: of each seed, the weights and the batches of the run that came first
    _weights: dict[int, int] = field(default_factory=dict[int, int])
    _batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def trial(self, policy: PrecisionPolicy, seed: int) -> int | None:
        """Two steps that are not timed; the CPU allocator's peak in bytes, ``None`` on another device.

        Raises:
            Exception: whatever the run raises; a ``PlanError`` where the plan refuses it.
        """

        def fit() -> None:
            with suppress(NonFiniteError):  # the run that is timed will say so
                self._fit(policy, seed, min(TRIAL_STEPS, self.steps))

        if self.trainer_args.get("accelerator", "auto") != "cpu" and torch.cuda.is_available():
            return fit()
        if not self._weights:
            fit()  # what a process makes once, as data that is read and kept, is not the first plan's memory
        with PeakMemory() as peak:
            fit()
        return peak.bytes

    def run(self, policy: PrecisionPolicy, seed: int) -> RunResult:
        """All steps, timed.

        Raises:
            Exception: whatever the run raises, but non-finite values that the plan does not allow.
        """
        cuda = self.device.type == "cuda"
        try:
            with PeakMemory("cuda") if cuda else nullcontext() as peak:
                trainer, plan, watch = self._fit(policy, seed, self.steps)
        except NonFiniteError:
            return RunResult(seed, final_loss=math.nan)
        losses = watch.read(trainer)
        seen = plan.batches
        first = self._batches.setdefault(seed, seen)
        both = min(len(first), len(seen))
        if first[:both] != seen[:both]:
            fix = "give data as a function that makes it, with its generators and iterators"
            raise PlanError.of(f"one plan met other batches than another in seed {seed}", fix, "compare")
        work, unit = (watch.samples, "samples") if watch.tokens is None else (watch.tokens, "tokens")
        # ranks of one replica, as the stages of a pipeline, share its batches
        replicas: int = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        tail = losses[-self.last :]
        return RunResult(
            seed=seed,
            losses=tuple(losses),
            final_loss=(statistics.fmean(tail) if all(map(math.isfinite, tail)) else math.nan) if tail else None,
            rate=work * replicas / watch.seconds if work and watch.seconds else None,
            unit=unit,
            peak_bytes=None if peak is None else peak.bytes,
            skipped=int(plan.skipped_steps),
            error=None if tail else "no step with a loss",
        )

    def _fit(self, policy: PrecisionPolicy, seed: int, steps: int) -> tuple[Trainer, _Noting, _Watch]:
        seed_everything(seed, workers=True, verbose=False)
        data = fit_arguments(self.data)
        seed_everything(seed, workers=True, verbose=False)
        module = copy.deepcopy(self.module) if isinstance(self.module, LightningModule) else self.module()
        self.module_name = type(module).__name__
        weights = _checksum(module.parameters())
        if self._weights.setdefault(seed, weights) != weights:
            fix = "draw its weights from torch's own generator, or give a module instead of a factory"
            raise PlanError.of(f"one plan began with other weights than another in seed {seed}", fix, "compare")
        plan, watch = cast("_Noting", _Noting.from_policy(policy)), _Watch(seed, steps)
        plan.batches = []
        strategy = self.strategy if isinstance(self.strategy, str) else self.strategy(plan)
        callbacks = self.trainer_args.get("callbacks") or []
        callbacks = copy.deepcopy(callbacks if isinstance(callbacks, list) else [callbacks])
        given: dict[str, Any] = {"devices": 1, **self.trainer_args, **_ALONE, "max_steps": steps}
        given["callbacks"] = [*callbacks, watch]
        trainer = Trainer(**trainer_kwargs(plan, strategy=strategy, **given))
        self.device, self.is_global_zero = trainer.strategy.root_device, trainer.is_global_zero
        trainer.fit(module, **data)
        return trainer, plan, watch


def fit_arguments(data: Any) -> dict[str, Any]:
    """``data`` as arguments of ``Trainer.fit``: made where it is a factory, a LightningDataModule, or a loader."""
    made = data() if callable(data) else data
    if made is None:
        return {}  # the module has its own
    if isinstance(made, LightningDataModule):
        return {"datamodule": made}
    if isinstance(made, dict) and made.keys() <= {"train_dataloaders", "val_dataloaders", "datamodule"}:
        return made
    return {"train_dataloaders": made}


def _checksum(tensors: Iterable[Tensor]) -> int:
    value = 0
    for tensor in tensors:
        if not is_lazy(tensor) and not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            value = zlib.crc32(cast("Any", plain.view(torch.uint8).numpy()), value)
    return value
