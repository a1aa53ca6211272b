"""``lightning_mp.compare``: train a module under several plans in several seeds, and compare the losses."""

import copy
import math
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import groupby
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_mp.comparison.results import Comparison, PlanResult, RunResult, compare_losses, write
from lightning_mp.compat import quietly
from lightning_mp.compat.lightning import (
    Callback,
    LightningDataModule,
    LightningModule,
    Strategy,
    Trainer,
    rank_zero_only,
    seed_everything,
)
from lightning_mp.errors import Fault, Faults, NonFiniteError, PlanError, counted, is_number, one_line
from lightning_mp.health.throughput import default_tokens, samples_in
from lightning_mp.numerics.dtypes import tensors_in
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.numerics.rng import process_kept
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.plan.side_run import BARE, loss_of
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.precision_policy import preset, preset_names
from lightning_mp.record.run_log import machine, versions
from lightning_mp.strategies.factory import trainer_kwargs
from lightning_mp.strategies.registry import trainer_arguments

#: optimizer steps of an untimed trial; optimizer state exists from the second on
TRIAL_STEPS = 2
#: the largest number of untimed steps at the beginning of a run
WARM_UP_STEPS = 5
#: Trainer arguments that switch off loggers, checkpoints and progress bars
_ALONE: Mapping[str, Any] = {**BARE, "logger": False}
#: Trainer arguments that the comparison owns
OWN = (*_ALONE, "max_steps", "precision", "min_steps", "max_time", "fast_dev_run")

_WARNINGS = (
    ".*does not have many workers.*",
    "You defined a `validation_step` but have no.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*GPU available but not used.*",
    # a run may be a step long, on which fp16 looks for its scale; the table has the count of skips
    "The run applied 0 of its .*",
)


@contextmanager
def quiet() -> Generator[None]:
    """Within, hide notices of libraries, such as tips and "GPU available: False". Errors are still shown."""
    with quietly(), warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


class _Noting(MixedPrecisionPlan):
    """A plan that records a checksum of every batch before it casts the batch."""

    batches: list[int]

    def convert_input(self, data: Any) -> Any:
        self.batches.append(_checksum(tensors_in(data)))
        return super().convert_input(data)


@dataclass(eq=False)
class _Watch(Callback):
    """Records losses on the device, and the seconds of the timed steps. It waits for the device twice a run."""

    seed: int
    steps: int
    losses: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])
    work: int = 0
    unit: str = "tokens"
    seconds: float = 0.0
    _step: int = 0
    _start: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the generators, so that data come in the same order, whatever the plan has drawn before."""
        self._seed(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed(1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed(2 + trainer.current_epoch)

    def _seed(self, number: int) -> None:
        seed_everything((self.seed + 1000003 * number) % 2**32, workers=True, verbose=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        if self._start is None and self._step >= min(WARM_UP_STEPS, self.steps // 2):
            self._start = _now(trainer)
        if self._start is not None:
            tokens = default_tokens(batch)
            self.unit = "samples" if tokens is None else "tokens"
            self.work += (samples_in(batch) or 0) if tokens is None else tokens

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
        """Return the loss of every optimizer step, a mean over ranks and micro-batches. Reduces over ranks."""
        if not self.losses:
            return []
        steps, losses = zip(*self.losses, strict=True)
        reduced = trainer.strategy.reduce(torch.stack(losses), reduce_op="mean").tolist()
        of_each = groupby(zip(steps, reduced, strict=True), key=itemgetter(0))
        return [statistics.fmean(loss for _, loss in micro_batches) for _, micro_batches in of_each]


def _now(trainer: Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(eq=False)
class Runs:
    """The runs of a comparison. Those of one seed begin from the same weights and see the same batches.

    ``module`` and ``data`` may be factories, which are called for each run. ``strategy`` is a name for
    ``make_strategy``, or a function from a plan to a strategy. ``trainer_args`` are arguments of the Trainer.
    """

    module: Callable[[], LightningModule] | LightningModule
    data: Any
    strategy: str | Callable[[MixedPrecisionPlan], Strategy]
    trainer_args: Mapping[str, Any]
    steps: int
    #: the number of last losses whose mean is the final loss
    last: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_global_zero: bool = True
    module_name: str = ""
    #: by seed, checksums of the weights and of the batches of its first run
    _weights: dict[int, int] = field(default_factory=dict[int, int])
    _batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    #: by plan, the peak bytes of its trial
    _peaks: dict[PrecisionPolicy, int] = field(default_factory=dict[PrecisionPolicy, int])

    def trial(self, policy: PrecisionPolicy, seed: int) -> None:
        """Make two untimed steps. On a CPU they measure the allocator's peak."""
        data = self._data(seed)  # before memory is measured
        fit = partial(self._fit, policy, seed, min(TRIAL_STEPS, self.steps), data)
        on_cuda = self.trainer_args.get("accelerator", "auto") != "cpu" and torch.cuda.is_available()
        with suppress(NonFiniteError):  # the timed run reports it
            if on_cuda or not self._weights:
                # Memory that a process allocates once, such as data that is kept, is not the first plan's.
                fit()
            if not on_cuda:
                with PeakMemory() as peak:
                    fit()
                self._peaks[policy] = peak.bytes

    def run(self, policy: PrecisionPolicy, seed: int) -> RunResult:
        """Make all steps and time them. The final loss is NaN if the plan ended the run for non-finite values."""
        cuda = self.device.type == "cuda"
        try:
            with PeakMemory("cuda") if cuda else nullcontext() as peak:
                trainer, plan, watch = self._fit(policy, seed, self.steps, self._data(seed))
        except NonFiniteError:
            return RunResult(seed, final_loss=math.nan)
        losses = watch.read(trainer)
        if any(map(int.__ne__, self._batches.setdefault(seed, plan.batches), plan.batches)):
            fix = "give data as a function that makes it, with its generators and iterators"
            raise PlanError.of(f"one plan met other batches than another in seed {seed}", fix, "compare")
        # The ranks of one replica, such as the stages of a pipeline, share its batches.
        replicas: int = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        tail = losses[-self.last :]
        return RunResult(
            seed=seed,
            losses=tuple(losses),
            final_loss=(statistics.fmean(tail) if all(map(math.isfinite, tail)) else math.nan) if tail else None,
            rate=watch.work * replicas / watch.seconds if watch.work and watch.seconds else None,
            unit=watch.unit,
            peak_bytes=self._peaks.get(policy) if peak is None else peak.bytes,
            skipped=int(plan.skipped_steps),
            error=None if tail else "no step with a loss",
        )

    def _data(self, seed: int) -> dict[str, Any]:
        seed_everything(seed, workers=True, verbose=False)
        return fit_arguments(self.data)

    def _fit(
        self, policy: PrecisionPolicy, seed: int, steps: int, data: Mapping[str, Any]
    ) -> tuple[Trainer, _Noting, _Watch]:
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
    """Return ``data`` as arguments of ``Trainer.fit``: a LightningDataModule, a loader, or a factory of one.

    An empty dict for ``None``: the module has its own data.
    """
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


SUBJECT = "compare"
T = TypeVar("T")
#: the final loss is the mean of the last tenth of the steps
_LAST = 10
#: a precision, the name of a preset, the file of a plan, or a plan
PlanLike = str | PathLike[str] | Mapping[str, Any] | PrecisionPolicy | MixedPrecisionPlan
Plans = Sequence[PlanLike] | Mapping[str, PlanLike]


def compare(
    module: Callable[[], LightningModule] | LightningModule,
    data: Any = None,
    plans: Plans | str = ("bf16-mixed", "fp8-mixed"),
    *,
    seeds: int = 8,
    steps: int = 100,
    margin: float | None = None,
    strategy: str | Callable[[MixedPrecisionPlan], Strategy] = "auto",
    out: str | PathLike[str] | None = None,
    say: Callable[[str], object] | None = None,
    **trainer: Any,
) -> Comparison:
    """Train ``module`` under every plan in every seed, and compare the losses of each plan with the first one's.

    Within a seed all plans begin from the same weights and see the same batches. The plans take turns, so that a
    machine that slows down slows all of them. The random generators and the settings of the process are restored. On a
    CPU peak memory is measured in two more steps.

    Args:
        module: a function that makes the LightningModule and draws weights from torch's generators, or a
            LightningModule, which every run copies.
        data: a LightningDataModule or a loader of training batches, or a function that makes one. ``None``: the module
            has its own. Give a function if reading the data changes it.
        plans: words (``"bf16-mixed"``, ``"a100"``), YAML files, policies or plans; a sequence, or a mapping from names.
        seeds: the number of seeds, from 0 on. A standard error needs two.
        steps: optimizer steps a run.
        margin: final losses that differ by less count as the same, in units of the loss. ``None``: half a percent of
            the first plan's mean final loss.
        strategy: a name for ``make_strategy``, or a function from a plan to a strategy.
        out: a folder for ``compare.json`` and ``compare.html``; ``None`` writes nothing.
        say: is called with a line of text for each run.
        trainer: other Trainer arguments, such as ``accelerator``, ``devices`` (1), ``gradient_clip_val``.

    Raises:
        PlanError: a bad argument, a plan that cannot run on this model, or runs of one seed that began with other
            weights or saw other batches. Faults of several plans are reported together.
    """
    faults = Faults(SUBJECT)
    named = read_plans(plans, faults)
    check_numbers(seeds, steps, margin, faults)
    _check(module, trainer, out, faults)
    faults.raise_if_any()
    runs = Runs(module, data, strategy, trainer, steps, max(1, steps // _LAST))
    with process_kept(torch.device("cuda" if torch.cuda.is_available() else "cpu")), quiet():
        results = _run_all(runs, named, seeds, say or (lambda _: None))
        losses = [(name, {run.seed: run.final_loss for run in found}) for name, found in results.items()]
        found = Comparison(
            plans=tuple(PlanResult(name, named[name], tuple(found)) for name, found in results.items()),
            differences=tuple(compare_losses(losses[0], other, margin) for other in losses[1:]),
            seeds=tuple(range(seeds)),
            steps=steps,
            final_loss_steps=runs.last,
            about={"module": runs.module_name, "machine": machine(runs.device), "versions": versions()},
        )
    if out is not None and runs.is_global_zero:
        write(found, Path(out))
    return found


def check_numbers(seeds: Any, steps: Any, margin: Any, faults: Faults) -> None:
    """Add a fault for each number that is out of its range."""
    faults.whole("seeds", seeds, 1, "write 8: the standard error shrinks with every seed")
    faults.whole("steps", steps, 1, "write 100")
    if margin is not None and (not is_number(margin) or margin < 0):
        allowed = "a finite number >= 0, in units of the loss"
        faults.add(f"margin={margin!r}", allowed=allowed, fix="leave it out for 0.5 %")


def _check(module: Any, trainer: Mapping[str, Any], out: Any, faults: Faults) -> None:
    if not isinstance(module, LightningModule) and (not callable(module) or isinstance(module, torch.nn.Module)):
        allowed = "a LightningModule, or a function that makes one"
        faults.add(f"module, a {type(module).__name__}", allowed=allowed, fix="give one")
    for name in (name for name in OWN if name in trainer):
        faults.add(f"{name}={trainer[name]!r}, which compare sets itself", fix="remove it, or write steps=")
    for name in trainer.keys() - set(trainer_arguments()):
        faults.unknown("keyword", name, [*signature(compare).parameters, *trainer_arguments()])
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        faults.add(f"out={str(out)!r} is a file", fix="name a folder, new or not")


def _run_all(
    runs: Runs, named: Mapping[str, PrecisionPolicy], seeds: int, say: Callable[[str], object]
) -> dict[str, list[RunResult]]:
    """Return the runs of every plan in the order of seeds.

    Raises:
        PlanError: of any run. Other exceptions end one run, unless the trials of all plans raise.
    """
    if getattr(rank_zero_only, "rank", 0) == 0:
        say(f"{counted(len(named), 'plan')}, two steps of each first ...")
    tried = {name: _attempt(partial(runs.trial, policy, 0)) for name, policy in named.items()}
    _raise_errors({name: error for name, error in tried.items() if error is not None}, len(named))
    names, results = list(named), {name: list[RunResult]() for name in named}
    for seed in range(seeds):
        turn = seed % len(names)
        for name in names[turn:] + names[:turn]:
            outcome = _attempt(partial(runs.run, named[name], seed))
            if isinstance(outcome, PlanError):
                raise outcome
            if isinstance(outcome, Exception):
                outcome = RunResult(seed, error=f"{type(outcome).__name__}: {one_line(outcome)}")
            results[name].append(outcome)
            if runs.is_global_zero:
                say(f"seed {seed + 1} of {seeds}, {name}: {_in_words(outcome)}")
    return results


def _raise_errors(errors: Mapping[str, Exception], plans: int) -> None:
    """Raise the refusals of all plans together, or the user's own error where each of ``plans`` has one."""
    refused: dict[Fault, list[str]] = {}
    for name, error in errors.items():
        for fault in error.faults if isinstance(error, PlanError) else ():
            refused.setdefault(fault, []).append(name)
    with Faults(SUBJECT) as faults:
        for fault, names in refused.items():
            whose = "" if len(names) == plans else f"{', '.join(names)}: "
            faults.extend([replace(fault, problem=f"{whose}{fault.problem}")])
    if len(errors) == plans:
        raise next(iter(errors.values()))


def _attempt(call: Callable[[], T]) -> T | Exception:
    """Return the result of ``call``, or the exception that it raised."""
    try:
        return call()
    except Exception as error:  # of the user's code, or of a device without memory
        return error


def _in_words(run: RunResult) -> str:
    if run.error or run.final_loss is None:
        return f"failed: {run.error}"
    loss = f"final loss {run.final_loss:.4f}" if math.isfinite(run.final_loss) else "diverged"
    return loss if run.rate is None else f"{loss}, {run.rate:,.0f} {run.unit}/s"


def read_plans(plans: Plans | str, faults: Faults) -> dict[str, PrecisionPolicy]:
    """Return the policies by name, in their order. A plan that cannot be read adds a fault and is left out.

    A string has several plans, separated by commas. The name of a word is the word, the name of a file its stem. A
    repeated name gets a number.
    """
    if isinstance(plans, str):
        plans = [part.strip() for part in plans.split(",") if part.strip()]
    policies: dict[str, PrecisionPolicy] = {}
    for given, plan in plans.items() if isinstance(plans, Mapping) else [("", plan) for plan in plans]:
        read = _named_policy(plan, faults)
        if read is not None:
            name, policy = given or read[0], read[1]
            number = sum(other == name or other.startswith(f"{name} (") for other in policies)
            policies[f"{name} ({number + 1})" if number else name] = policy
    if len(plans) < 2:
        faults.add(counted(len(plans), "plan"), allowed="two or more", fix="write bf16-mixed,fp8-mixed")
    return policies


def _named_policy(plan: PlanLike, faults: Faults) -> tuple[str, PrecisionPolicy] | None:
    if isinstance(plan, (PrecisionPolicy, MixedPrecisionPlan)):
        policy = plan if isinstance(plan, PrecisionPolicy) else plan.policy
        return str(policy.precision), policy
    try:
        if plan in preset_names():
            return str(plan), preset(str(plan))
        policy = MixedPrecisionPlan.from_config(plan).policy
        if isinstance(plan, Mapping):
            return str(policy.precision), policy
        return Path(plan).stem if Path(plan).suffix else str(plan), policy
    except PlanError as error:
        faults.extend(error.faults)
    return None
