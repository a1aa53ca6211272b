"""``lightning-mp init``."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Optional

import typer

from lightning_mp.cli.output import refusals

EXPERIMENT = "experiment"
#: where a group's file is copied to
FOLDER = Path("configs")


def init(
    name: Annotated[
        Optional[str],  # noqa: UP045  typer reads this at run time, on 3.10 too
        typer.Argument(help="An experiment, or GROUP/NAME; without one all are listed.", show_default=False),
    ] = None,
) -> None:
    """List the package's configs, or copy one here to edit.

    Example: lightning-mp init llama_tiny && lightning-mp train llama_tiny.yaml plan=bf16
    """
    if name is None:
        for group, options in shipped().items():
            typer.echo(f"{group}:")
            for option, path in options.items():
                typer.echo(f"  {option:26} {_summary(path)}".rstrip())
        return
    with refusals("init", OSError):
        written, how = copy(name)
    typer.echo(f"written: {written}; run it: {how}")


def shipped() -> dict[str, dict[str, Path]]:
    """The configs that come with the package, by group and name; experiments first."""
    root = Path(str(files("lightning_mp.configs")))
    groups = {path.parent.name for path in root.glob("*/*.yaml")}
    ordered = [EXPERIMENT, *sorted(groups - {EXPERIMENT})]
    return {group: {path.stem: path for path in sorted((root / group).glob("*.yaml"))} for group in ordered}


def copy(name: str) -> tuple[Path, str]:
    """Write the config ``name`` into the present folder; its path, and the command that runs it.

    Raises:
        PlanError: no such config, or a file of that name is there already.
    """
    from lightning_mp.errors import Faults, did_you_mean

    group, _, option = name.rpartition("/")
    known = shipped()
    faults = Faults("init")
    found = known.get(group or EXPERIMENT, {}).get(option)
    if found is None:
        names = [*known[EXPERIMENT], *(f"{one}/{other}" for one, options in known.items() for other in options)]
        faults.add(
            f"{name}, which is no config of the package",
            "an experiment, or GROUP/NAME",
            f"{did_you_mean(name, names)} 'lightning-mp init' lists them",
        )
    found = faults.sound(found)
    experiment = group in ("", EXPERIMENT)
    target = Path(f"{option}.yaml") if experiment else FOLDER / group / f"{option}.yaml"
    if target.exists():
        faults.add(f"{target}, which exists", "a new file", "rename it, or go to another folder")
        faults.raise_if_any()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(found.read_text(encoding="utf-8"), encoding="utf-8")
    how = str(target) if experiment else f"--config-dir {FOLDER} {group}={option}"
    return target, f"lightning-mp train {how}"


def _summary(path: Path) -> str:
    """The first sentence of the file, as far as its first line goes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
    return re.split(r"[.;](?: |$)|:$", first)[0]
