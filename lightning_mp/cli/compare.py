"""``lightning-mp compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import console, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs


def compare(
    arguments: Arguments = None,
    plans: Annotated[
        str, typer.Option(help="Words or YAML files, with commas between; each is held against the first.")
    ] = "bf16-mixed,fp8-mixed",
    seeds: Annotated[int, typer.Option(help="How many pairs of runs; an interval needs two.")] = 8,
    steps: Annotated[
        Optional[int],  # noqa: UP045  typer reads this at run time, on 3.10 too
        typer.Option(help="Optimizer steps a run.", show_default="trainer.max_steps, else 100"),
    ] = None,
    margin: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="A difference of the loss that is none.", show_default="0.5 % of the first plan's loss"),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The folder for compare.json and compare.html.", show_default="a new one below runs/"),
    ] = None,
    config_dir: ConfigDirs = None,
) -> None:
    """Train what `train` would run under several plans: speed, memory, and the paired difference of their losses.

    Within a seed every plan begins from the same weights and sees the same batches. Exit status 1 if a run failed.

    Example: lightning-mp compare experiment=neox_wide --plans bf16-mixed,fp8-mixed --seeds 8
    """
    from lightning_mp.cli.training.compared import compared

    with refusals("compare"):
        found, folder = compared(
            arguments or [],
            plans,
            typer.echo,
            seeds=seeds,
            steps=steps,
            margin=margin,
            out=out,
            config_dirs=config_dir or [],
        )
    if folder is not None:
        typer.echo(found.to_text(console().width).rstrip())
        typer.echo(f"written: {folder / 'compare.html'}, {folder / 'compare.json'}")
    raise typer.Exit(1 if any(plan.failed for plan in found.plans) else 0)
