"""``lightning-mp audit``."""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_mp.cli.output import console, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs


def audit(
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option("--steps", help="How many optimizer steps are looked at.")] = 1,
    config_dir: ConfigDirs = None,
) -> None:
    """Train the first steps of what `train` would run, and show which dtypes each module was declared and ran in.

    Exit status 0 if all is as declared, 1 if a module is not, 2 for bad input.

    Example: lightning-mp audit experiment=llama_tiny plan=fp16
    """
    from lightning_mp.cli.training.audited import audited

    with refusals("audit"):
        report, folder = audited(arguments or [], steps=steps, config_dirs=config_dir or [])
    typer.echo(report.to_text(console().width))
    if not report.ok:
        typer.echo(report.explanation())
    typer.echo(f"written: {folder / 'audit.md'}, {folder / 'audit.json'}")
    raise typer.Exit(0 if report.ok else 1)
