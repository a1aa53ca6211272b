"""``lightning_mp.compare``: plans side by side on one module and its data, seed by seed."""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_mp.comparison import plans as reading
from lightning_mp.comparison.paired import Difference, Verdict, compare_losses
from lightning_mp.comparison.run import OWN, Recipe, RunResult, Runs, environment_kept, quiet
from lightning_mp.compat.lightning import LightningModule, Strategy
from lightning_mp.demo.shapes import find_device
from lightning_mp.errors import Fault, Faults, PlanError, is_number, one_line
from lightning_mp.monitor.run_log import machine, versions
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.registry import trainer_arguments

SUBJECT = "compare"
T = TypeVar("T")
#: the share of the steps that the final loss is the mean of
_LAST = 10
#: what seeding, a Trainer and the profiler leave in the environment
_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL")


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds and its standard deviation, ``None`` with fewer than two."""

    mean: float
    sd: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One plan's runs, a seed each, and what they come to; a spread is ``None`` where no run has such a number.

    ``rate`` is in ``unit`` a second; ``peak_bytes`` the most that the device's allocator had given out.
    """

    name: str
    policy: PrecisionPolicy
    runs: tuple[RunResult, ...]

    @property
    def unit(self) -> str:
        """``tokens`` or ``samples``."""
        return next((run.unit for run in self.runs if run.rate), "samples")

    @property
    def rate(self) -> Spread | None:
        """Tokens or samples a second."""
        return _spread(run.rate for run in self.runs)

    @property
    def peak_bytes(self) -> Spread | None:
        """Peak memory in bytes."""
        return _spread(run.peak_bytes for run in self.runs)

    @property
    def final_loss(self) -> Spread | None:
        """Over the seeds in which it is finite."""
        return _spread(run.final_loss for run in self.runs)

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """The runs that raised."""
        return tuple(run for run in self.runs if run.error)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        spreads = {name: getattr(self, name) for name in ("rate", "peak_bytes", "final_loss")}
        return {
            "name": self.name,
            "plan": self.policy.to_dict(),
            "unit": f"{self.unit}/s",
            **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every plan's runs, and the paired difference of each later plan from the first.

    ``final_loss_steps`` is how many of a run's last training losses its final loss is the mean of. ``mean_difference``,
    ``interval`` and ``verdict`` are the second plan's.
    """

    plans: tuple[PlanResult, ...]
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    steps: int
    final_loss_steps: int
    about: dict[str, Any]

    @property
    def mean_difference(self) -> float | None:
        """Second minus first."""
        return self.differences[0].mean_difference

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean difference."""
        return self.differences[0].interval

    @property
    def verdict(self) -> Verdict:
        """What the second plan is beside the first."""
        return self.differences[0].verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``compare.json`` has them."""
        return {
            "mean_difference": self.mean_difference,
            "interval_95": self.interval,
            "margin": self.differences[0].margin,
            "verdict": self.verdict,
            "seeds": self.seeds,
            "steps": self.steps,
            "final_loss": f"mean training loss of the last {self.final_loss_steps} optimizer steps",
            "final_loss_steps": self.final_loss_steps,
            "differences": [
                {"interval_95" if key == "interval" else key: value for key, value in asdict(one).items()}
                for one in self.differences
            ],
            "plans": [plan.to_dict() for plan in self.plans],
            **self.about,
        }

    def to_text(self, width: int = 110) -> str:
        """The table, ``width`` columns wide at most."""
        from lightning_mp.comparison.table import to_text

        return to_text(self, width)

    def __str__(self) -> str:
        return self.to_text()


def compare(
    module: Callable[[], LightningModule] | LightningModule,
    data: Any = None,
    plans: reading.Plans | str = ("bf16-mixed", "fp8-mixed"),
    *,
    seeds: int = 8,
    steps: int = 100,
    margin: float | None = None,
    strategy: str | Callable[[MixedPrecisionPlan], Strategy] = "auto",
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] | None = None,
    **trainer: Any,
) -> Comparison:
    """Train ``module`` under every plan in every seed, and hold the losses of each plan against the first one's.

    Within a seed all plans begin from the same weights and see the same batches. The plans take turns, so that a
    machine that slows down slows all of them. The random generators and the process's settings are as before
    afterwards. On a CPU peak memory is taken in two further steps.

    Args:
        module: makes the LightningModule, from torch's generators; or one, which every run begins with a copy of.
        data: a LightningDataModule or a loader of training batches, or a function that makes one; ``None`` where the
            module has its own. Give a function where reading it changes it.
        plans: words (``"bf16-mixed"``, ``"a100"``), YAML files, policies or plans, also as a mapping of names.
        seeds: how many pairs, from seed 0 on; an interval needs two.
        steps: optimizer steps a run.
        margin: differences of the final loss within it are no difference, in units of the loss; ``None`` is half a
            percent of the first plan's mean final loss.
        strategy: a name of ``make_strategy``'s, or a function that makes a strategy for a plan.
        out: a folder for ``compare.json`` and ``compare.html``; ``None`` writes nothing.
        say: gets a line a run.
        trainer: other Trainer arguments, such as ``accelerator``, ``devices`` (1), ``gradient_clip_val``.

    Raises:
        PlanError: what cannot be compared, a plan that cannot run on this model among it; every fault at once.
        MissingExtraError: ``out`` is given and plotly, which draws the page, is not installed.
    """
    faults = Faults(SUBJECT)
    named = reading.read(plans, faults)
    check_numbers(seeds, steps, margin, faults)
    _check(module, trainer, out, faults)
    faults.raise_if_any()
    runs = Runs(Recipe(module, data, strategy, trainer), steps, max(1, steps // _LAST))
    with _as_before(), quiet():
        warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
        results = _run_all(runs, named, seeds, say or (lambda _: None))
        found = _compared(runs, named, results, margin)
    if out is not None and runs.is_global_zero:
        from lightning_mp.comparison.page import write

        write(found, Path(out))
    return found


def check_numbers(seeds: Any, steps: Any, margin: Any, faults: Faults) -> None:
    """Note what no comparison can be of."""
    faults.whole("seeds", seeds, 1, "write 8: the interval narrows with every seed")
    faults.whole("steps", steps, 1, "write 100")
    if margin is not None and (not is_number(margin) or margin < 0):
        faults.add(f"margin={margin!r}", "a finite number >= 0, in units of the loss", "leave it out for 0.5 %")


def _check(module: Any, trainer: Mapping[str, Any], out: Any, faults: Faults) -> None:
    if not isinstance(module, LightningModule) and (not callable(module) or isinstance(module, torch.nn.Module)):
        faults.add(f"module, a {type(module).__name__}", "a LightningModule, or a function that makes one", "give one")
    for name in (name for name in OWN if name in trainer):
        fix = "write steps=" if "steps" in name else "remove it"
        faults.add(f"{name}={trainer[name]!r}", "Trainer arguments that compare has not its own of", fix)
    known = [*(name for name in signature(compare).parameters if name != "trainer"), *trainer_arguments()]
    for name in trainer.keys() - set(known):
        faults.unknown("keyword", name, known)
    if out is not None:
        from lightning_mp.monitor.report.page import plotly_script

        plotly_script()
        if Path(out).exists() and not Path(out).is_dir():
            faults.add(f"out={str(out)!r}, a file", "a folder, new or not", "choose another")


# ---------------------------------------------------------------------- the runs


def _run_all(
    runs: Runs, named: Mapping[str, PrecisionPolicy], seeds: int, say: Callable[[str], object]
) -> dict[str, list[RunResult]]:
    """The results of every plan, by seed."""
    results = {name: list[RunResult]() for name in named}
    _refuse(named, lambda policy: runs.arguments(MixedPrecisionPlan.from_policy(policy)))
    peaks = _refuse(named, lambda policy: _attempt(partial(runs.trial, policy, 0)))
    if all(isinstance(peak, str) for peak in peaks.values()):
        given = f"what fails under every plan: {next(iter(peaks.values()))}"
        raise PlanError([Fault(given, "a module and data that train", "fix what it names")], SUBJECT)
    names = list(named)
    for seed in range(seeds):
        turn = seed % len(names)
        for name in names[turn:] + names[:turn]:
            peak = peaks[name] if seed == 0 else _attempt(partial(runs.trial, named[name], seed))
            outcome = peak if isinstance(peak, str) else _attempt(partial(runs.run, named[name], seed))
            result = _result(seed, peak, outcome)
            results[name].append(result)
            if runs.is_global_zero:
                say(f"seed {seed + 1} of {seeds}, {name}: {_in_words(result)}")
    return results


def _refuse(named: Mapping[str, PrecisionPolicy], call: Callable[[PrecisionPolicy], Any]) -> dict[str, Any]:
    """What ``call`` returns for every plan; what refuses any of them is raised together."""
    said: dict[Fault, list[str]] = {}

    def called(name: str, policy: PrecisionPolicy) -> Any:
        try:
            return call(policy)
        except PlanError as error:
            for fault in error.faults:
                said.setdefault(fault, []).append(name)

    found = {name: called(name, policy) for name, policy in named.items()}
    with Faults(SUBJECT) as faults:
        for fault, names in said.items():
            whose = "" if len(names) == len(named) else f"{', '.join(names)}: "
            faults.add(f"{whose}{fault.given}", fault.allowed, fault.fix)
    return found


def _attempt(call: Callable[[], T]) -> T | str:
    """What ``call`` returns, or its error in a line; a refusal is raised."""
    try:
        return call()
    except PlanError:
        raise
    except Exception as error:  # whatever a user's code, or a device that is full, raises
        return f"{type(error).__name__}: {one_line(error)}"


def _result(seed: int, peak: int | str | None, result: RunResult | str) -> RunResult:
    if isinstance(result, str):
        return RunResult(seed, error=result)
    return result if peak is None else replace(result, peak_bytes=peak)


def _in_words(run: RunResult) -> str:
    if run.error or run.final_loss is None:
        return f"failed: {run.error}"
    loss = f"final loss {run.final_loss:.4f}" if math.isfinite(run.final_loss) else "diverged"
    return loss if run.rate is None else f"{loss}, {run.rate:,.0f} {run.unit}/s"


@contextmanager
def _as_before() -> Generator[None, None, None]:
    """Random generators, torch's switches of determinism, and the environment are afterwards as they were."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = rng_state(device)
    cudnn = torch.backends.cudnn
    switches = cudnn.benchmark, cudnn.deterministic
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with environment_kept(*_VARIABLES):
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on the console
            yield
    finally:
        set_rng_state(state, device)
        cudnn.benchmark, cudnn.deterministic = switches
        torch.use_deterministic_algorithms(strict, warn_only=warns)


# ---------------------------------------------------------------------- what they come to


def _compared(
    runs: Runs,
    named: Mapping[str, PrecisionPolicy],
    results: Mapping[str, list[RunResult]],
    margin: float | None,
) -> Comparison:
    losses = [(name, {run.seed: run.final_loss for run in found}) for name, found in results.items()]
    plans = tuple(PlanResult(name, named[name], tuple(found)) for name, found in results.items())
    return Comparison(
        plans=plans,
        differences=tuple(compare_losses(losses[0], other, margin) for other in losses[1:]),
        seeds=tuple(run.seed for run in plans[0].runs),
        steps=runs.steps,
        final_loss_steps=runs.last,
        about={
            "module": runs.module_name,
            "machine": {**machine(runs.device), "name": str(find_device())},
            "versions": versions(),
        },
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = tuple(value for value in values if is_number(value))
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, found)
