"""``lightning_mp.compare``: plans side by side on one module and its data, seed by seed."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch

from lightning_mp.comparison.results import Comparison, PlanResult, RunResult, compare_losses, write
from lightning_mp.comparison.run import OWN, Runs, quiet
from lightning_mp.compat.lightning import LightningModule, Strategy, rank_zero_only
from lightning_mp.errors import Fault, Faults, PlanError, counted, is_number, one_line
from lightning_mp.monitor.run_log import machine, versions
from lightning_mp.numerics.rng import process_kept
from lightning_mp.policy import PRECISIONS, PrecisionPolicy, precision_word
from lightning_mp.policy.presets import PRESETS, preset
from lightning_mp.policy.words import precision_fix
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.registry import trainer_arguments

SUBJECT = "compare"
T = TypeVar("T")
#: the share of the steps that the final loss is the mean of
_LAST = 10
#: a precision's word or a preset's name, a file of a plan, or a plan
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
    named = read_plans(plans, faults)
    check_numbers(seeds, steps, margin, faults)
    _check(module, trainer, out, faults)
    faults.raise_if_any()
    runs = Runs(module, data, strategy, trainer, steps, max(1, steps // _LAST))
    with process_kept(torch.device("cuda" if torch.cuda.is_available() else "cpu")), quiet():
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on the console
        warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
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
    """Note what no comparison can be of."""
    faults.whole("seeds", seeds, 1, "write 8: the interval narrows with every seed")
    faults.whole("steps", steps, 1, "write 100")
    if margin is not None and (not is_number(margin) or margin < 0):
        faults.add(f"margin={margin!r}", "a finite number >= 0, in units of the loss", "leave it out for 0.5 %")


def _check(module: Any, trainer: Mapping[str, Any], out: Any, faults: Faults) -> None:
    if not isinstance(module, LightningModule) and (not callable(module) or isinstance(module, torch.nn.Module)):
        faults.add(f"module, a {type(module).__name__}", "a LightningModule, or a function that makes one", "give one")
    for name in (name for name in OWN if name in trainer):
        faults.add(f"{name}={trainer[name]!r}, which compare sets itself", "remove it, or write steps=")
    known = [*(name for name in signature(compare).parameters if name != "trainer"), *trainer_arguments()]
    for name in trainer.keys() - set(known):
        faults.unknown("keyword", name, known)
    if out is not None:
        from lightning_mp.monitor.report.page import plotly_script

        plotly_script()
        if Path(out).exists() and not Path(out).is_dir():
            faults.add(f"out={str(out)!r} is a file", "name a folder, new or not")


# ---------------------------------------------------------------------- the runs


def _first_steps(runs: Runs, named: Mapping[str, PrecisionPolicy]) -> dict[str, int | Exception | None]:
    """The trial of every plan in seed 0; what refuses any of them is raised together."""
    refused: dict[Fault, list[str]] = {}

    def tried(name: str, policy: PrecisionPolicy) -> int | Exception | None:
        try:
            return _attempt(partial(runs.trial, policy, 0))
        except PlanError as error:
            for fault in error.faults:
                refused.setdefault(fault, []).append(name)

    peaks = {name: tried(name, policy) for name, policy in named.items()}
    with Faults(SUBJECT) as faults:
        for fault, names in refused.items():
            whose = "" if len(names) == len(named) else f"{', '.join(names)}: "
            faults.extend([replace(fault, given=f"{whose}{fault.given}")])
    first, *others = peaks.values()
    if isinstance(first, Exception) and all(isinstance(other, Exception) for other in others):
        raise first  # the user's own, with its traceback
    return peaks


def _run_all(
    runs: Runs, named: Mapping[str, PrecisionPolicy], seeds: int, say: Callable[[str], object]
) -> dict[str, list[RunResult]]:
    """The results of every plan, by seed."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        say(f"{counted(len(named), 'plan')}, two steps of each first ...")
    peaks, names = _first_steps(runs, named), list(named)
    results = {name: list[RunResult]() for name in named}
    for seed in range(seeds):
        turn = seed % len(names)
        for name in names[turn:] + names[:turn]:
            peak = peaks[name] if seed == 0 else _attempt(partial(runs.trial, named[name], seed))
            outcome = peak if isinstance(peak, Exception) else _attempt(partial(runs.run, named[name], seed))
            if isinstance(outcome, Exception):
                outcome = RunResult(seed, error=f"{type(outcome).__name__}: {one_line(outcome)}")
            elif isinstance(peak, int):
                outcome = replace(outcome, peak_bytes=peak)
            results[name].append(outcome)
            if runs.is_global_zero:
                say(f"seed {seed + 1} of {seeds}, {name}: {_in_words(outcome)}")
    return results


def _attempt(call: Callable[[], T]) -> T | Exception:
    """What ``call`` returns, or its error; a refusal is raised."""
    try:
        return call()
    except PlanError:
        raise
    except Exception as error:  # whatever a user's code, or a device that is full, raises
        return error


def _in_words(run: RunResult) -> str:
    if run.error or run.final_loss is None:
        return f"failed: {run.error}"
    loss = f"final loss {run.final_loss:.4f}" if math.isfinite(run.final_loss) else "diverged"
    return loss if run.rate is None else f"{loss}, {run.rate:,.0f} {run.unit}/s"


# ---------------------------------------------------------------------- the plans


def read_plans(plans: Plans | str, faults: Faults) -> dict[str, PrecisionPolicy]:
    """The policies by name, in their order; what cannot be one is noted in ``faults``.

    A string is several, with commas between. A word is called as it was written, a file by its stem; a name that comes
    again gets a number.
    """
    if isinstance(plans, str):
        plans = [part.strip() for part in plans.split(",") if part.strip()]
    given = plans.items() if isinstance(plans, Mapping) else [(_name(plan), plan) for plan in plans]
    found: dict[str, PrecisionPolicy] = {}
    for name, plan in given:
        policy = _policy(plan, faults)
        if policy is not None:
            number = sum(other == name or other.startswith(f"{name} (") for other in found)
            found[f"{name} ({number + 1})" if number else name] = policy
    if len(plans) < 2:
        faults.add(counted(len(plans), "plan"), "two or more", "write bf16-mixed,fp8-mixed")
    return found


def _name(plan: PlanLike) -> str:
    if isinstance(plan, (PrecisionPolicy, MixedPrecisionPlan)):
        return str(getattr(plan, "policy", plan).precision)
    if isinstance(plan, Mapping):
        return str(plan.get("precision", "plan"))
    return Path(plan).stem if _is_file(plan) else str(plan)


def _is_file(plan: object) -> TypeGuard[str | PathLike[str]]:
    return isinstance(plan, PathLike) or (isinstance(plan, str) and (plan.endswith((".yaml", ".yml")) or "/" in plan))


def _policy(plan: PlanLike, faults: Faults) -> PrecisionPolicy | None:
    if isinstance(plan, (PrecisionPolicy, MixedPrecisionPlan)):
        return plan if isinstance(plan, PrecisionPolicy) else plan.policy
    try:
        if isinstance(plan, Mapping) or _is_file(plan):
            return MixedPrecisionPlan.from_config(plan).policy
        if plan in PRESETS:
            return preset(str(plan))
        if precision_word(plan) is not None:
            return PrecisionPolicy(precision=str(plan))
    except PlanError as error:
        faults.extend(error.faults)
        return None
    faults.add(f"plan {plan!r}", ", ".join([*PRECISIONS, *PRESETS, "a YAML file"]), precision_fix(plan, (), PRESETS))
    return None
