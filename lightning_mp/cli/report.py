"""``lightning-mp report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="A run's folder; several are compared.", show_default=False),
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The file to write.", show_default="report.html in RUN_DIR, or in what holds them all"),
    ] = None,
) -> None:
    """Write what a run did, or how several compare, as HTML.

    One file that opens without a network.

    Example: lightning-mp report runs/a runs/b
    """
    from lightning_mp.monitor.report import write_report

    with refusals("report", OSError):
        typer.echo(write_report(run_dirs, output))
