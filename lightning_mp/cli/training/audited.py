"""``lightning-mp audit``: the first steps of the run that a config describes, and which dtypes they really ran in."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.cli.training import application, build, one_run
from lightning_mp.demo.quiet import quiet
from lightning_mp.errors import Faults
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
    faults = Faults(SUBJECT)
    faults.whole("--steps", steps, 1, "leave it out to audit the first step")
    one_run.some(arguments, SUBJECT, "nothing to audit", faults)
    faults.raise_if_any()
    with one_run.composed(arguments, faults, config_dirs) as job:
        config = one_run.checked(job, SUBJECT, faults)
        regime = faults.sound(build.regime(config, job.places, faults))
        folder = Path(config["run_dir"])
        audit = PrecisionAudit(steps, run_dir=folder)
        alone = {**BARE, "callbacks": [audit], "max_steps": steps, "logger": False}
        build.seed(config)
        with application.run_folder(folder), quiet():
            warnings.filterwarnings("ignore", message="PrecisionAudit: ")  # the report says it
            trainer = build.trainer({**regime.trainer, **alone}, faults)
            model, data = build.parts(config, faults)
            with build.running(faults):
                trainer.fit(model, **data)
    if audit.report is None:
        faults.add("a run without a step", "data for a batch at least", "look at the data section")
    return faults.sound(audit.report), folder
