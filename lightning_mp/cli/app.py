"""The command line. Nothing heavier than typer is imported before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

import lightning_mp

if TYPE_CHECKING:
    from rich.console import Console

# What a line of a table needs; a pipe or a file has no width of its own.
_PLAIN_WIDTH = 110
_USAGE_ERROR = 2
_INTERRUPTED = 130

app = typer.Typer(name="lightning-mp", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


_Arguments = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this at run time, on 3.10 too
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file, then what to change: plan=bf16, experiment=llama_tiny, trainer.max_steps=100, "
        "ckpt_path=runs/x/checkpoints/last.ckpt, run_dir=runs/x.",
        show_default=False,
    ),
]
_ConfigDirs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--config-dir", help="A folder with groups of your own; may be given several times."),
]


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
    """Mixed precision for PyTorch Lightning: say once which numbers live in which format, and that is what runs."""


@app.command()
def demo(
    text: Annotated[
        Optional[Path],  # noqa: UP045  typer reads this at run time, on 3.10 too
        typer.Option(help="A text file or a folder to train on.", show_default="Python's own standard library"),
    ] = None,
    modes: Annotated[str, typer.Option(help="What to run, with commas between.")] = "fp32,tf32,fp16,bf16,bf16-ckpt",
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Training steps a mode.", show_default="150 on a CPU, 300 with CUDA"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where results are written.")] = Path("lightning_mp_demo"),
) -> None:
    """Train one small GPT-2 on real text in every precision mode, and compare speed, memory and loss."""
    from lightning_mp.demo.inputs import InputError
    from lightning_mp.demo.ladder import Options, run_demo
    from lightning_mp.errors import MissingExtraError

    try:
        report = run_demo(Options(text=text, modes=modes, steps=steps, out=out), _console())
    except (InputError, MissingExtraError) as error:
        _refuse("demo", str(error))
    except KeyboardInterrupt:
        typer.echo(f"\nlightning-mp demo: stopped; what was measured so far is in {out}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def consolidate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .ckpt file, a folder of shards, or a DeepSpeed folder.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Argument(help="What to write: .pt, .pth, .bin, .ckpt or .safetensors.", show_default=False)
    ],
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Cast floating tensors to fp32, bf16 or fp16.", show_default="as stored"),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Write what is under this name only, and without it: 'model.' for transformers.")
    ] = "",
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle objects too, from a .ckpt file whose origin you trust.")
    ] = False,
) -> None:
    """Write the weights of any checkpoint, sharded or DeepSpeed's too, as one plain state dict."""
    from lightning_mp.checkpoints.consolidate_file import write_consolidated
    from lightning_mp.checkpoints.formats import CheckpointFormatError
    from lightning_mp.errors import MissingExtraError, PlanError

    try:
        written = write_consolidated(checkpoint, output, dtype, prefix=prefix, weights_only=False if trust else None)
    except PlanError as error:
        _refuse("consolidate", "; ".join(map(str, error.faults)))
    except (CheckpointFormatError, MissingExtraError, OSError) as error:
        _refuse("consolidate", str(error))
    if written.left_out:
        typer.echo(f"left out, since they are no tensors: {', '.join(written.left_out)}", err=True)
    unit, name = (2**20, "MiB") if written.size >= 2**20 else (2**10, "KiB")
    size = f"{written.size / unit:.1f} {name}"
    typer.echo(f"{written.path}: {written.tensors} tensors, {size}, {', '.join(written.dtypes)}")


@app.command()
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
    """Write what a run did, or how several compare, as one HTML file that opens without a network."""
    from lightning_mp.errors import MissingExtraError, PlanError
    from lightning_mp.monitor.report import write_report
    from lightning_mp.monitor.report.serve import serve as serve_report

    if serve and output is not None:
        _refuse("report", "given --serve and --output; allowed: one of them; do: leave --output out to serve")
    try:
        if serve:
            serve_report(run_dirs, port, lambda url: typer.echo(f"{url}  (Ctrl-C ends it)"))
        else:
            typer.echo(write_report(run_dirs, output))
    except PlanError as error:
        _refuse("report", "; ".join(map(str, error.faults)))
    except (MissingExtraError, OSError) as error:
        _refuse("report", str(error))


@app.command()
def doctor(
    arguments: _Arguments = None,
    config_dir: _ConfigDirs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead.")] = False,
) -> None:
    """Say what will go wrong in what `train` would run, before it does; exit status 1 with warnings, 2 with errors."""
    from lightning_mp.cli.training.examine import examine
    from lightning_mp.errors import MissingExtraError, PlanError
    from lightning_mp.monitor.doctor import cli_output

    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints is no part of the answer
            findings = examine(arguments or [], config_dirs=config_dir or [])
    except PlanError as error:
        _refuse("doctor", "; ".join(map(str, error.faults)))
    except (MissingExtraError, OSError) as error:
        _refuse("doctor", str(error))
    if as_json:
        typer.echo(cli_output.as_json(findings))
    else:
        cli_output.show(findings, _console())
    raise typer.Exit(cli_output.exit_status(findings))


@app.command()
def train(
    arguments: _Arguments = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run every combination of plan=fp32,bf16, and compare them.")
    ] = False,
    config_dir: _ConfigDirs = None,
    show: Annotated[bool, typer.Option("--show", help="Print the config that would run, and leave.")] = False,
) -> None:
    """Train what a YAML file describes: any LightningModule, under a plan and a strategy; Hydra composes the parts."""

    def start() -> int:
        from lightning_mp.cli.training.application import train as run

        return run(arguments or [], typer.echo, multirun=multirun, config_dirs=config_dir or [], only_show=show)

    _train("train", start)


@app.command(
    "cli",
    # all of it is LightningCLI's to read, its help too
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
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
    """Train what a LightningCLI file describes under a plan: the same run as `train`, from class_path and init_args."""

    def start() -> int:
        from lightning_mp.cli.training.lightning_cli import run

        return run(arguments or ["--help"], typer.echo)

    _train("cli", start)


def _train(command: str, start: Callable[[], int]) -> NoReturn:
    """Leave with the status of the run, or with what it was refused for."""
    from lightning_mp.errors import MissingExtraError, NonFiniteError, PlanError

    try:
        status = start()
    except PlanError as error:
        _refuse(command, error.listed())
    except (MissingExtraError, NonFiniteError, OSError) as error:
        _refuse(command, str(error))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(status)


def _refuse(command: str, message: str) -> NoReturn:
    typer.echo(f"lightning-mp {command}: {message}", err=True)
    raise typer.Exit(_USAGE_ERROR) from None


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _PLAIN_WIDTH))
    return console


def main() -> None:
    """The ``lightning-mp`` command."""
    sys.exit(app())
