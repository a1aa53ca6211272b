"""``lightning-mp doctor``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from lightning_mp.cli.output import console, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs


def doctor(
    arguments: Arguments = None,
    config_dir: ConfigDirs = None,
    gpu: Annotated[str, typer.Option(help="The GPU it will run on: t4-16, a100-80, …; else this machine's.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead.")] = False,
) -> None:
    """Say what will go wrong in what `train` would run, before it does; exit status 1 with warnings, 2 with errors.

    Example: lightning-mp doctor experiment=llama_tiny plan=fp16
    """
    from lightning_mp.cli.training.examine import examine
    from lightning_mp.errors import Faults
    from lightning_mp.monitor.doctor import cli_output
    from lightning_mp.policy.gpus import find

    # what the model's own code prints is no part of the answer
    with refusals("doctor"), redirect_stdout(sys.stderr):
        with Faults("doctor") as faults:
            chosen = find(gpu, faults) if gpu else None
        device = None if chosen is None else chosen.device
        findings = examine(arguments or [], config_dirs=config_dir or [], device=device)
    if as_json:
        typer.echo(cli_output.as_json(findings))
    else:
        cli_output.show(findings, console())
    raise typer.Exit(cli_output.exit_status(findings))
