"""``lightning-mp audit``: the first steps of the run that a config describes, and which dtypes they really ran in."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_mp.cli.output import console, progress, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults, counted

if TYPE_CHECKING:
    from lightning_mp.monitor.audit import AuditReport


def audit(
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option("--steps", help="How many optimizer steps are looked at.")] = 1,
    config_dir: ConfigDirs = None,
) -> None:
    """Show which dtypes each module of a run really ran in.

    Trains the first steps of what `train` would run, and holds dtypes against what was declared. Exit status 0 if all
    is as declared, 1 if a module is not, 2 for bad input.

    Example: lightning-mp audit experiment=llama_tiny plan=fp16
    """
    progress(f"auditing {counted(steps, 'step')} ...")
    with refusals("audit"):
        report, folder = _audited(arguments or [], steps, config_dir or [])
    typer.echo(report.to_text(console().width))
    if not report.ok:
        typer.echo(report.explanation())
    typer.echo(f"written: {folder / 'audit.md'}, {folder / 'audit.json'}")
    raise typer.Exit(0 if report.ok else 1)


def _audited(arguments: Sequence[str], steps: int, config_dirs: Sequence[Path]) -> tuple[AuditReport, Path]:
    """Of the callbacks only the audit runs; nothing is validated, logged or saved as a checkpoint."""
    from lightning_mp.callbacks.precision_audit import PrecisionAudit
    from lightning_mp.cli import parts
    from lightning_mp.cli.config import checked, composed
    from lightning_mp.comparison.run import quiet
    from lightning_mp.monitor.side_run import BARE

    faults = Faults("audit")
    faults.whole("--steps", steps, 1, "leave it out to audit the first step")
    if not arguments:
        faults.add("nothing to audit", "a YAML file, key=value", "lightning-mp audit run.yaml, or experiment=NAME")
    faults.raise_if_any()
    with composed(arguments, "audit", faults, config_dirs) as (job,):
        config = checked(job, faults)
        regime = faults.sound(parts.regime(config, job.places, faults))
        folder = Path(config["run_dir"])
        callback = PrecisionAudit(steps, run_dir=folder)
        alone = {**BARE, "callbacks": [callback], "max_steps": steps, "logger": False}
        with parts.running(folder, faults), quiet():
            warnings.filterwarnings("ignore", message="PrecisionAudit: ")  # the report says it
            trainer = parts.trainer({**regime.trainer, **alone}, faults)
            model, data = parts.parts(config, faults)
            trainer.fit(model, **data)
    if callback.report is None:
        faults.add("a run without a step", "data for a batch at least", "look at the data section")
    return faults.sound(callback.report), folder
