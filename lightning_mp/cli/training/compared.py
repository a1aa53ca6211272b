"""``lightning-mp compare``: the run that a config describes, under one plan after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning_mp.cli.training import application, build, one_run
from lightning_mp.cli.training.compose import Composed
from lightning_mp.comparison import plans as reading
from lightning_mp.comparison.compare import SUBJECT, Comparison, check_numbers, compare
from lightning_mp.comparison.run import OWN
from lightning_mp.compat.lightning import LightningModule, Strategy, rank_zero_only
from lightning_mp.errors import Faults
from lightning_mp.precision import MixedPrecisionPlan

_STEPS = 100
T = TypeVar("T")


def compared(
    arguments: Sequence[str],
    plans: str,
    say: application.Say,
    *,
    seeds: int,
    steps: int | None = None,
    margin: float | None = None,
    out: Path | None = None,
    config_dirs: Sequence[Path] = (),
) -> tuple[Comparison, Path | None]:
    """What :func:`lightning_mp.compare` finds for ``[CONFIG] key=value …``, and its folder; ``None`` on other ranks.

    It is composed as ``lightning-mp train`` does. The config's own plan and its callbacks are left out.

    Raises:
        PlanError: what was given cannot run; every fault at once, before a model is built.
        MissingExtraError: an optional package that is needed is not installed.
    """
    faults = Faults(SUBJECT)
    one_run.some(arguments, SUBJECT, "nothing to compare", faults)
    reading.read(plans, faults)
    check_numbers(seeds, _STEPS if steps is None else steps, margin, faults)
    with one_run.composed(arguments, faults, config_dirs) as job:
        config = _config(job, faults)
        if config.get("ckpt_path"):
            given = f"ckpt_path={config['ckpt_path']}"
            faults.add(given, "runs that begin with the module's own weights", "have the module load them")
        trainer = build.trainer_arguments(config, faults)
        faults.raise_if_any()
        folder = Path(config["run_dir"]) if out is None else out
        longest = trainer.pop("max_steps", None) or 0
        with application.run_folder(folder):
            found = compare(
                lambda: cast("LightningModule", _made(lambda faults: build.model(config, faults))),
                lambda: _made(lambda faults: build.data(config, faults)),
                plans,
                seeds=seeds,
                steps=steps or (longest if longest > 0 else _STEPS),
                margin=margin,
                strategy=lambda plan: _strategy(config, plan),
                out=folder,
                say=say,
                **{name: value for name, value in trainer.items() if name not in OWN},
            )
    return found, folder if getattr(rank_zero_only, "rank", 0) == 0 else None


def _config(job: Composed, faults: Faults) -> dict[str, Any]:
    from omegaconf import open_dict

    with open_dict(job.config):
        job.config.plan = {"precision": "bf16-mixed"}  # what stands there refers to is one of those that are compared
        job.config.callbacks = None
    return one_run.checked(job, SUBJECT, faults)


def _made(make: Callable[[Faults], T]) -> T:
    faults = Faults(SUBJECT)
    made = make(faults)
    faults.raise_if_any()
    return made


def _strategy(config: dict[str, Any], plan: MixedPrecisionPlan) -> Strategy:
    return _made(lambda faults: build.strategy_of(config.get("strategy") or "auto", plan, faults))
