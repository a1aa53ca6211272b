"""``lightning-mp audit``: the first steps of the run that a config describes, and which dtypes they really ran in."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.cli.training import application, build, check, compose, targets
from lightning_mp.compat.lightning import MisconfigurationException, seed_everything
from lightning_mp.demo.inputs import InputError
from lightning_mp.demo.quiet import quiet
from lightning_mp.errors import Faults, one_line
from lightning_mp.monitor.audit import AuditReport
from lightning_mp.monitor.side_run import BARE

SUBJECT = "audit"


def audited(arguments: Sequence[str], *, steps: int, config_dirs: Sequence[Path] = ()) -> tuple[AuditReport, Path]:
    """Train ``steps`` optimizer steps of ``[CONFIG] key=value …``; the report, and the folder with ``audit.json``.

    It is composed as ``lightning-mp train`` does. Of the callbacks only the audit runs; nothing is validated, logged or
    saved as a checkpoint.

    Raises:
        PlanError: what was given cannot run; every fault at once, before a model is built.
        MissingExtraError: an optional package that is needed is not installed.
        NonFiniteError: the steps met more non-finite gradients than the plan allows.
    """
    path, overrides = compose.split(arguments)
    faults = Faults(SUBJECT)
    faults.whole("--steps", steps, 1, "leave it out to audit the first step")
    if not arguments:
        faults.add("nothing to audit", "a YAML file, key=value", "lightning-mp audit run.yaml, or experiment=NAME")
    faults.raise_if_any()
    with targets.importable(path):
        (job,) = compose.compose(path, overrides, faults, config_dirs=config_dirs)
        folder = application.run_dir(job, SUBJECT, faults)
        application.set_run_dir(job, folder)
        with job.under_hydra(folder):
            config = check.check(job, faults)
        regime = build.regime(config, job.places, faults)
        faults.raise_if_any()
        assert regime is not None, "else there was a fault"
        audit = PrecisionAudit(steps, run_dir=folder)
        alone = {**BARE, "callbacks": [audit], "max_steps": steps, "logger": False}
        if config.get("seed") is not None:
            seed_everything(config["seed"], workers=True, verbose=False)
        with application.run_folder(folder), quiet():
            warnings.filterwarnings("ignore", message="PrecisionAudit: ")  # the report says it
            trainer = build.trainer({**regime.trainer, **alone}, faults)
            faults.raise_if_any()
            assert trainer is not None, "else there was a fault"
            model, data = build.model(config, faults), build.data(config, faults)
            faults.raise_if_any()
            assert model is not None, "else there was a fault"
            try:
                trainer.fit(model, **data)
            except (InputError, MisconfigurationException) as error:
                faults.add(
                    f"what Lightning cannot run: {one_line(error)}", "parts that fit together", "fix what it names"
                )
                faults.raise_if_any()
    if audit.report is None:
        faults.add("a run without a step", "data for a batch at least", "look at the data section")
        faults.raise_if_any()
    assert audit.report is not None, "else there was a fault"
    return audit.report, folder
