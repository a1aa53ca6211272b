"""``lightning-mp pins``: which modules of the run that a config describes to pin to fp32, measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_mp.cli.output import refusals
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults

if TYPE_CHECKING:
    from lightning_mp.pin_advice import PinAdvice


def pins(
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option("--steps", help="How many batches are looked at.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print pins and rows as one JSON object.")] = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Compare the gradients of what `train` would run with fp32's, and show the fewest pins that bring them near.

    Example: lightning-mp pins experiment=llama_tiny plan=bf16
    """
    with refusals("pins"):
        advice = _measured(arguments or [], steps, config_dir or [])
    typer.echo(json.dumps(advice.to_dict(), indent=2) if as_json else str(advice))


def _measured(arguments: Sequence[str], steps: int, config_dirs: Sequence[Path]) -> PinAdvice:
    from lightning_mp.cli import parts
    from lightning_mp.cli.config import checked, composed
    from lightning_mp.comparison.run import quiet
    from lightning_mp.pin_advice import suggest_pins

    faults = Faults("pins")
    if not arguments:
        faults.add("nothing to measure", "a YAML file, key=value", "lightning-mp pins run.yaml, or experiment=NAME")
    faults.raise_if_any()
    with composed(arguments, "pins", faults, config_dirs) as (job,):
        config = checked(job, faults)
        plan = parts.plan_of(config["plan"], job.places, faults)
        faults.raise_if_any()
        with parts.running(Path(config["run_dir"]), faults), quiet():
            model, loaders = parts.parts(config, faults)
            return suggest_pins(model, parts.training_batches(loaders, model), faults.sound(plan), steps=steps)
