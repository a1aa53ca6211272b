"""``lightning-mp report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals, refuse


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="A run's folder; several are compared.", show_default=False),
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The file to write.", show_default="report.html in RUN_DIR, or in what holds them all"),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it on this machine instead, refreshed while the run goes on.")
    ] = False,
    port: Annotated[int, typer.Option(help="The port for --serve; 0 takes any.", min=0, max=65535)] = 8765,
) -> None:
    """Write what a run did, or how several compare, as HTML.

    One file that opens without a network.

    Example: lightning-mp report runs/a runs/b
    """
    from lightning_mp.errors import Fault
    from lightning_mp.monitor.report import write_report
    from lightning_mp.monitor.report.serve import serve as serve_report

    if serve and output is not None:
        refuse("report", str(Fault("--serve and --output", "one of them", "leave --output out to serve")))
    with refusals("report", OSError):
        if serve:
            serve_report(run_dirs, port, lambda url: typer.echo(f"{url}  (Ctrl-C ends it)"))
        else:
            typer.echo(write_report(run_dirs, output))
