"""``lightning-mp consolidate`` and ``report``: what is made of what a run left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals
from lightning_mp.errors import counted, in_bytes


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
    """Write a checkpoint's weights as one plain state dict.

    Of any checkpoint of this package's, sharded or DeepSpeed's too.

    Example: lightning-mp consolidate last.ckpt weights.safetensors --dtype bf16
    """
    from lightning_mp.checkpoints.consolidate_file import write_consolidated
    from lightning_mp.checkpoints.formats import CheckpointFormatError

    with refusals("consolidate", OSError, CheckpointFormatError):
        written = write_consolidated(checkpoint, output, dtype, prefix=prefix, weights_only=False if trust else None)
    if written.left_out:
        typer.echo(f"left out, since they are no tensors: {', '.join(written.left_out)}", err=True)
    size = f"{counted(written.tensors, 'tensor')}, {in_bytes(written.size)}"
    typer.echo(f"{written.path}: {size}, {', '.join(written.dtypes)}")


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
