"""``lightning-mp doctor``: the run that a config describes, examined instead of trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_mp.cli.output import console, progress, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults, nearest, one_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightning_mp.cli.parts import Regime
    from lightning_mp.monitor.findings import Finding
    from lightning_mp.policy import PrecisionPolicy
    from lightning_mp.policy.hardware import Device


def doctor(
    arguments: Arguments = None,
    config_dir: ConfigDirs = None,
    gpu: Annotated[str, typer.Option(help="The GPU it will run on: t4-16, a100-80, …; else this machine's.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead.")] = False,
) -> None:
    """Say what will go wrong in a run, before it does.

    Exit status 1 with warnings, 2 with errors.

    Example: lightning-mp doctor experiment=llama_tiny plan=fp16
    """
    from lightning_mp.monitor.findings import exit_status, show, to_json
    from lightning_mp.policy.hardware import find

    # what the model's own code prints is no part of the answer
    progress("examining ...")
    with refusals("doctor"), redirect_stdout(sys.stderr):
        with Faults("doctor") as faults:
            chosen = find(gpu, faults) if gpu else None
        findings = _examine(arguments or [], config_dir or [], None if chosen is None else chosen.device)
    if as_json:
        typer.echo(to_json(findings))
    else:
        show(findings, console())
    raise typer.Exit(exit_status(findings))


def _examine(arguments: Sequence[str], config_dirs: Sequence[Path], device: Device | None) -> list[Finding]:
    """What :func:`lightning_mp.doctor` finds. The model may be any ``torch.nn.Module``.

    Without a plan the run is one of Lightning's own precisions: ``trainer.precision``. Data that give no batch for a
    step are told on stderr.
    """
    from lightning_mp.cli import parts
    from lightning_mp.cli.config import SECTIONS, checked, composed

    faults = Faults("doctor")
    if not arguments:
        faults.add("nothing to examine", "a YAML file, key=value", "lightning-mp doctor run.yaml, or experiment=NAME")
        faults.raise_if_any()
    with composed(arguments, "doctor", faults, config_dirs) as (job,):
        _take_out_plan(job.config)
        sections, needed = ["plan", "model", "strategy", "trainer", "run_dir"], ["model"]
        if not job.config.get("plan"):
            if nearest("plan", {str(key) for key in job.config} - {*SECTIONS}):
                needed.append("plan")  # misspelt, and no run of Lightning's own
            if parts.is_ours(job.config.get("strategy")):
                sections.remove("strategy")  # the package's choice, for a plan
        config = checked(job, faults, needed=needed, only=sections)
        missing = Faults("doctor")
        config |= checked(job, missing, needed=(), only=("data",))
        regime = parts.regime(config, job.places, faults) if config.get("plan") else None
        faults.raise_if_any()
        return _examined(config, regime, faults, missing, device)


def _take_out_plan(config: DictConfig) -> None:
    """Where the Trainer's plugins are a plan, and others, that is the plan section."""
    from omegaconf import OmegaConf, open_dict

    written = OmegaConf.select(config, "trainer.plugins")
    plugins = list(written) if OmegaConf.is_list(written) else [written]
    plans = [one for one in plugins if OmegaConf.is_dict(one) and "MixedPrecisionPlan" in str(one.get("_target_"))]
    if plans and not config.get("plan"):
        with open_dict(config):
            config.plan = plans[0]
            config.trainer.plugins = [plugin for plugin in plugins if plugin is not plans[0]]


def _examined(
    config: dict[str, Any], regime: Regime | None, faults: Faults, missing: Faults, device: Device | None
) -> list[Finding]:
    from lightning_mp.cli import parts
    from lightning_mp.compat.lightning import LightningModule
    from lightning_mp.monitor.doctor import examine
    from lightning_mp.monitor.doctor.case import case_of

    model = parts.instantiated(config["model"], "model", faults)
    plan: Any = None
    if regime is not None:
        plan = regime.plan
        _check_patterns(model, plan.policy, faults)
        trainer, strategy = regime.trainer, regime.trainer["strategy"]
    else:
        trainer, strategy = parts.trainer_arguments(config, faults), config.get("strategy")
        if not parts.is_ours(strategy):
            strategy = parts.instantiated(strategy, "strategy", faults)
    faults.raise_if_any()
    case = case_of(model, plan, strategy, trainer, target=device)
    if isinstance(model, LightningModule) and not missing.found:
        case = replace(case, rows=_batch(config, model, missing))
    return examine(case)


def _batch(config: dict[str, Any], model: Any, faults: Faults) -> Any:
    """The first batch of the data; ``None`` where there is none, which is told."""
    from lightning_mp.cli import parts

    try:
        loaders = parts.data(config, faults)
        faults.raise_if_any()
        return next(iter(parts.training_batches(loaders, model)))
    except Exception as error:  # of the user's data
        said = f"no batch, no step is tried: {type(error).__name__}: {one_line(error)}"
        typer.echo(f"lightning-mp doctor: {said}", err=True)
        return None


def _check_patterns(model: object, policy: PrecisionPolicy, faults: Faults) -> None:
    """Patterns that match nothing: the run would be refused. What has a code of its own is the doctor's to say."""
    from torch import nn

    from lightning_mp.modules import checkpointing, pins

    if not isinstance(model, nn.Module):
        return
    unmatched = Faults()
    pins.resolve(model, policy.pins, unmatched)
    if policy.checkpointing is not None:
        checkpointing.select(model, policy.checkpointing, unmatched)
    faults.extend(fault for fault in unmatched.found if "tied weights" not in fault.given)
