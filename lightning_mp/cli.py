"""The command line. Nothing heavier than typer is imported before a command runs."""

from __future__ import annotations

import sys
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
    from lightning_mp.checkpoints.consolidating import write_consolidated
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
