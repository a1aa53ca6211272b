"""``lightning-mp demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import console, refusals


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
    """Train one small GPT-2 on real text in every precision mode, and compare speed, memory and loss.

    Example: lightning-mp demo --modes fp32,bf16 --steps 50
    """
    from lightning_mp.demo.inputs import InputError
    from lightning_mp.demo.ladder import Options, run_demo

    with refusals("demo", InputError, stopped=f"stopped; what was measured so far is in {out}"):
        report = run_demo(Options(text=text, modes=modes, steps=steps, out=out), console())
    raise typer.Exit(0 if report.ok else 1)
