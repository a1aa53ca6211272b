"""``lightning-mp cli``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals

#: all of it is LightningCLI's to read, its help too
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


def lightning_cli(
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="{fit,validate,test,predict} [--config FILE] [--KEY VALUE]...",
            help="As LightningCLI reads it: fit --config run.yaml --plan.precision 16-mixed; fit --help has every key.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train what a LightningCLI file describes under a plan: the same run as `train`, from class_path and init_args.

    Example: lightning-mp cli fit --config run.yaml --plan.precision 16-mixed
    """
    with refusals("cli"):
        from lightning_mp.cli.training.lightning_cli import run

        status = run(arguments or ["--help"], typer.echo)
    raise typer.Exit(status)
