"""``lightning-mp doctor``: the run that a config describes, examined instead of trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_mp.cli.training import build, one_run, primary
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import Faults, nearest, one_line
from lightning_mp.modules import checkpointing, pins
from lightning_mp.monitor.doctor import examine as examine_case
from lightning_mp.monitor.doctor.case import case_of
from lightning_mp.monitor.findings import Finding
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.hardware import Device

if TYPE_CHECKING:
    from omegaconf import DictConfig

SUBJECT = "doctor"
#: the sections that a run is examined by; the others are left alone
_SECTIONS = ("plan", "model", "strategy", "trainer", "run_dir")


def examine(
    arguments: Sequence[str], *, config_dirs: Sequence[Path] = (), device: Device | None = None
) -> list[Finding]:
    """What :func:`lightning_mp.doctor` finds for the run that ``[CONFIG] key=value …`` describes.

    It is composed as ``lightning-mp train`` does. The model may be any ``torch.nn.Module``. Without a plan the run is
    one of Lightning's own precisions: ``trainer.precision``. Where the memory of ``device`` is known, by default that
    of this machine, it is held against what a batch of the data takes; data that give none are told on stderr.

    Raises:
        PlanError: what cannot be composed, no model, a part that cannot be built, a pattern that matches nothing on
            this model; every fault at once.
        MissingExtraError: Hydra is not installed.
    """
    faults = Faults(SUBJECT)
    one_run.some(arguments, SUBJECT, "nothing to examine", faults)
    faults.raise_if_any()
    with one_run.composed(arguments, faults, config_dirs) as job:
        _take_out_plan(job.config)
        sections, needed = list(_SECTIONS), ["model"]
        if not job.config.get("plan"):
            if nearest("plan", {str(key) for key in job.config} - {*primary.SECTIONS}):
                needed.append("plan")  # misspelt, and no run of Lightning's own
            if build.is_ours(job.config.get("strategy")):
                sections.remove("strategy")  # the package's choice, for a plan
        config = one_run.checked(job, SUBJECT, faults, needed=needed, only=sections)
        missing = Faults(SUBJECT)
        config |= one_run.checked(job, SUBJECT, missing, needed=(), only=("data",))
        regime = build.regime(config, job.places, faults) if config.get("plan") else None
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
    config: dict[str, Any], regime: build.Regime | None, faults: Faults, missing: Faults, device: Device | None
) -> list[Finding]:
    model = build.instantiated(config["model"], "model", faults)
    plan: Any = None
    if regime is not None:
        plan = regime.plan
        _check_patterns(model, plan.policy, faults)
        trainer, strategy = regime.trainer, regime.trainer["strategy"]
    else:
        trainer, strategy = build.trainer_arguments(config, faults), config.get("strategy")
        if not build.is_ours(strategy):
            strategy = build.instantiated(strategy, "strategy", faults)
    faults.raise_if_any()
    case = case_of(model, plan, strategy, trainer, target=device)
    if regime is not None and case.device.memory is not None and isinstance(model, LightningModule):
        case = replace(case, rows=_batch(config, model, missing))
    return examine_case(case)


def _batch(config: dict[str, Any], model: LightningModule, faults: Faults) -> Any:
    """The first batch of the data; ``None`` where there is none, which is told."""
    try:
        loaders = {} if faults.found else build.data(config, faults)
        faults.raise_if_any()
        return next(iter(build.training_batches(loaders, model)))
    except Exception as error:  # of the user's data
        said = f"no batch, memory is looked at without activations: {type(error).__name__}: {one_line(error)}"
        sys.stderr.write(f"lightning-mp doctor: {said}\n")
        return None


def _check_patterns(model: object, policy: PrecisionPolicy, faults: Faults) -> None:
    """Patterns that match nothing: the run would be refused. What has a code of its own is the doctor's to say."""
    if not isinstance(model, nn.Module):
        return
    unmatched = Faults(SUBJECT)
    pins.resolve(model, policy.pins, unmatched)
    if policy.checkpointing is not None:
        checkpointing.select(model, policy.checkpointing, unmatched)
    faults.extend(fault for fault in unmatched.found if "tied weights" not in fault.given)
