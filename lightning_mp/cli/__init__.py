"""The command line. Before a command runs, no import is heavier than typer."""

import sys
from typing import Annotated

import typer

import lightning_mp
from lightning_mp.cli.advise import advise
from lightning_mp.cli.compare import compare, demo
from lightning_mp.cli.examine import audit, diff, doctor, env, pins
from lightning_mp.cli.files import consolidate, init, report
from lightning_mp.cli.train import train

app = typer.Typer(
    name="lightning-mp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would stretch the help to a wide terminal
    context_settings={"max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightning-mp {lightning_mp.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Mixed precision for PyTorch Lightning: say once which numbers live in which format, and that is what runs.

    Begin with `lightning-mp demo`, or with a config of your own: `lightning-mp init llama_tiny` writes llama_tiny.yaml,
    `lightning-mp train llama_tiny.yaml plan=bf16` runs it. `lightning-mp COMMAND --help` has an example of each.
    """


for _command in (demo, init, train, compare, advise, audit, doctor, pins, diff, report, consolidate, env):
    app.command()(_command)


def main() -> None:
    """Run the ``lightning-mp`` command and exit with its status."""
    sys.exit(app())
