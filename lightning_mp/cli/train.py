"""``lightning-mp train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals

Arguments = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this at run time, on 3.10 too
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file, then what to change: plan=bf16, experiment=llama_tiny, trainer.max_steps=100, "
        "ckpt_path=runs/x/checkpoints/last.ckpt, run_dir=runs/x.",
        show_default=False,
    ),
]
ConfigDirs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--config-dir", help="A folder with groups of your own; may be given several times."),
]


def train(
    context: typer.Context,
    arguments: Arguments = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run every combination of plan=fp32,bf16, and compare them.")
    ] = False,
    config_dir: ConfigDirs = None,
    show: Annotated[bool, typer.Option("--show", help="Print the config that would run, and leave.")] = False,
) -> None:
    """Train what a YAML file describes: any LightningModule, under a plan and a strategy; Hydra composes the parts.

    Example: lightning-mp train experiment=llama_tiny plan=bf16 trainer.max_steps=100
    """
    if not arguments and not show:
        typer.echo(context.get_help())
        raise typer.Exit
    from lightning_mp.cli.training.application import train as run

    with refusals("train"):
        status = run(arguments or [], typer.echo, multirun=multirun, config_dirs=config_dir or [], only_show=show)
    raise typer.Exit(status)
