"""``lightning-mp init``, ``consolidate`` and ``report``: write a config, one state dict, or a report."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from lightning_mp.cli.config import GROUPS, ROOT
from lightning_mp.cli.output import File, Text, refusals
from lightning_mp.errors import Faults, counted, did_you_mean, in_bytes

EXPERIMENT = "experiment"
#: the folder that a group's file is copied to
FOLDER = Path("configs")


def consolidate(
    checkpoint: Annotated[
        str, typer.Argument(help="A .ckpt file, a folder of shards, or a DeepSpeed folder.", show_default=False)
    ],
    output: Annotated[
        str, typer.Argument(help="What to write: .pt, .pth, .bin, .ckpt or .safetensors.", show_default=False)
    ],
    dtype: Annotated[Text, typer.Option(help="Cast floating tensors to fp32, bf16 or fp16; else as stored.")] = None,
    prefix: Annotated[
        str, typer.Option(help="Write what is under this name only, and without it: 'model.' for transformers.")
    ] = "",
    cast_all: Annotated[
        bool, typer.Option("--all", help="Cast what the plan pinned, or the model declares, fp32 too.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle objects too, from a .ckpt file whose origin you trust.")
    ] = False,
) -> None:
    """Write a checkpoint's weights as one plain state dict.

    Every checkpoint of this package can be read, also sharded and DeepSpeed ones.

    Example: lightning-mp consolidate last.ckpt weights.safetensors --dtype bf16
    """
    from lightning_mp.checkpoints.formats import CheckpointFormatError
    from lightning_mp.checkpoints.full import write_consolidated
    from lightning_mp.numerics.dtypes import dtype_name

    with refusals("consolidate", OSError, CheckpointFormatError):
        tensors, left_out = write_consolidated(checkpoint, output, dtype, prefix, cast_all, False if trust else None)
    if left_out:
        typer.echo(f"left out, since they are no tensors: {', '.join(left_out)}", err=True)
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors.values()})
    size = f"{counted(len(tensors), 'tensor')}, {in_bytes(sum(tensor.nbytes for tensor in tensors.values()))}"
    typer.echo(f"{output}: {size}, {', '.join(dtypes)}")


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="A run's folder; several are compared.", show_default=False),
    ],
    output: Annotated[File, typer.Option(help="The file: report.html in RUN_DIR, or in what holds them all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts and figures as JSON, write no page.")] = False,
) -> None:
    """Write what a run did, or how several compare, as HTML.

    One file that opens without a network.

    Example: lightning-mp report runs/a runs/b
    """
    from lightning_mp.record.report import summaries, write_report

    with refusals("report", OSError):
        typer.echo(json.dumps(summaries(run_dirs), indent=2) if as_json else write_report(run_dirs, output))


# ---------------------------------------------------------------------- init


def init(
    name: Annotated[Text, typer.Argument(help="An experiment, or GROUP/NAME; else all are listed.")] = None,
) -> None:
    """List the package's configs, or copy one here to edit.

    Example: lightning-mp init llama_tiny && lightning-mp train llama_tiny.yaml plan=bf16
    """
    known = shipped()
    if name is None:
        for group, options in known.items():
            typer.echo(f"{group}:")
            for option, path in options.items():
                typer.echo(f"  {option:26} {_summary(path)}".rstrip())
        return
    group, _, option = name.rpartition("/")
    experiment = group in ("", EXPERIMENT)
    with refusals("init", OSError):
        faults = Faults("init")
        source = known.get(group or EXPERIMENT, {}).get(option)
        target = Path(f"{option}.yaml") if experiment else FOLDER / group / f"{option}.yaml"
        if source is None:
            names = [*known[EXPERIMENT], *(f"{kind}/{stem}" for kind, options in known.items() for stem in options)]
            fix = f"{did_you_mean(name, names)} 'lightning-mp init' lists them"
            faults.add(f"{name!r} is no config of the package", fix=fix)
        elif target.exists():
            faults.add(f"{target} exists", fix="rename it, or go to another folder")
        source = faults.unwrap(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        # so an editor finds the schema, and Hydra the config that an experiment changes
        text = source.read_text(encoding="utf-8").replace("$schema=..", f"$schema={source.parents[1].as_uri()}")
        text = text.replace("defaults:\n", f"defaults:\n  - /{ROOT}\n", 1) if experiment else text
        target.write_text(text, encoding="utf-8")
    how = str(target) if experiment else f"--config-dir {FOLDER} {group}={option}"
    typer.echo(f"written: {target}; run it: lightning-mp train {how}")


def shipped() -> dict[str, dict[str, Path]]:
    """Return the paths of the package's configs, by group and name. Experiments come first."""
    groups = {path.parent.name for path in GROUPS.glob("*/*.yaml")}
    ordered = [EXPERIMENT, *sorted(groups - {EXPERIMENT})]
    return {group: {path.stem: path for path in sorted((GROUPS / group).glob("*.yaml"))} for group in ordered}


def _summary(path: Path) -> str:
    """Return the first sentence of the file's first comment, cut at the end of its line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((line[2:] for line in lines if re.match(r"# (?!@|yaml-language)", line)), "")
    return re.split(r"[.;](?: |$)|:$", first)[0]
