"""``lightning-mp advise``."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lightning_mp.cli.output import console, refusals, refuse
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import one_line

if TYPE_CHECKING:
    from lightning_mp.planner import Advice, ModelShape

_GIB, _MIB = 2**30, 2**20
_SHOWN = 5
# Of a run that calibrates: readings in which allocators and kernels find their pace, and those that are enough.
_WARM_UP, _CALIBRATED = 5, 100
Whole = Optional[int]  # noqa: UP045  typer reads these at run time, on 3.10 too
Number = Optional[float]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


def advise(  # noqa: PLR0913, PLR0917  a flag a keyword
    arguments: Arguments = None,
    params: Annotated[Number, typer.Option(help="Parameters, as 7e9: a Llama of that size.")] = None,
    config: Annotated[File, typer.Option(help="A transformers config.json instead.")] = None,
    gpu: Annotated[str, typer.Option(help="a100-40, a100-80, h100-80, h200-141, v100-32, t4-16, l4-24, …")] = "h100-80",
    gpus: Annotated[int, typer.Option(help="How many.")] = 8,
    nvlink: Annotated[str, typer.Option(help="full, pairs or none.")] = "full",
    gbps: Annotated[Number, typer.Option(help="Gbit/s of a node to the others.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    seq_len: Annotated[Whole, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[Whole, typer.Option(help="Sequences an optimizer step.")] = None,
    micro_batch: Annotated[Whole, typer.Option(help="Sequences a micro-batch on each data-parallel rank.")] = None,
    tokens: Annotated[Number, typer.Option(help="Tokens to train on; by default 20 a parameter.")] = None,
    price: Annotated[Number, typer.Option(help="Price of a GPU for an hour.")] = None,
    precision: Annotated[str, typer.Option(help="A mode; auto follows the GPU. fp8 is used where asked for.")] = "auto",
    offload: Annotated[bool, typer.Option("--offload", help="Consider the CPU's memory too.")] = False,
    calibrate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What the first choice was measured at: tokens/s a GPU, or the folder of its run."),
    ] = None,
    out: Annotated[File, typer.Option(help="Write the first choice as YAML for lightning-mp train.")] = None,
    html: Annotated[File, typer.Option(help="Write one page with pictures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[bool, typer.Option("--check", help="With a CONFIG: run two steps here, measure.")] = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Say what fits these GPUs: precision, strategy, degrees; how fast, at what cost; and write the YAML that runs it.

    With a CONFIG of `train`, its memory by part, the largest micro-batch, and what checkpointing buys on --gpu.

    Example: lightning-mp advise --params 7e9 --gpus 8 --gpu h100-80 --out run.yaml
    """
    if arguments:
        _advise_run(arguments, gpu, config_dir or [], check=check, as_json=as_json)
        return
    from lightning_mp.planner import advise as ask

    keywords: dict[str, Any] = {
        "gpu": gpu,
        "gpus": gpus,
        "nvlink": nvlink,
        "interconnect_gbps": gbps,
        "gpus_per_node": gpus_per_node,
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "tokens": tokens,
        "precision": precision,
        "offload": offload,
    }
    if price is not None and price < 0:
        refuse("advise", f"--price {price:g}: give what a GPU costs for an hour, 0 or more")
    with refusals("advise", ValueError):
        shape = _shape(params, config, seq_len)
        found = ask(shape, **keywords)
        if calibrate is not None:
            found = ask(shape, **keywords, calibration=_measured(calibrate) / found.best.tokens_per_s.mid)
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _show(found, price)
        if html is not None:
            html.write_text(found.html(), encoding="utf-8")
        if out is not None:
            out.write_text(found.yaml(), encoding="utf-8")
            typer.echo(f"written: {out}; run it: lightning-mp train {out}", err=as_json)


def _advise_run(arguments: list[str], gpu: str, config_dirs: list[Path], *, check: bool, as_json: bool) -> None:
    from lightning_mp.cli.training.advised import advised
    from lightning_mp.errors import Faults
    from lightning_mp.planner.memory import USABLE
    from lightning_mp.policy.gpus import find
    from lightning_mp.tracing.fitting import MOST_ROWS

    with refusals("advise", ValueError):
        faults = Faults("advise")
        device = faults.sound(find(gpu, faults))
        found = advised(arguments, memory=device.memory * USABLE, measure=check, config_dirs=config_dirs)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(f"{found.strategy} on {found.devices}, {found.rows} rows a micro-batch, on one rank:\n")
    typer.echo(found.prediction.to_markdown())
    if found.measured is not None:
        said, true = found.prediction.peak_bytes / _MIB, found.measured / _MIB
        typer.echo(f"two steps here: predicted {said:,.1f} MiB, measured {true:,.1f} MiB ({said / true - 1:+.1%})")
    for each in found.fits:
        size = f"{each.prediction.peak_bytes / _MIB:,.1f} MiB"
        rows = f"{each.rows} rows{' or more' if each.rows == MOST_ROWS else ''}"
        typer.echo(f"checkpointing {each.checkpointing}: {size}; up to {rows} on {device.word}")


def _measured(given: str) -> float:
    """Tokens/s a GPU: the number itself, or the median of the first readings of a run of ``TrainingHealth``'s."""
    with suppress(ValueError):
        return float(given)
    from lightning_mp.errors import Faults
    from lightning_mp.monitor import metric_names
    from lightning_mp.monitor.report.load import load

    run = load(Path(given), given)
    series = run.series.get(metric_names.TOKENS_PER_S)
    rates = series.finite[_WARM_UP:_CALIBRATED] if series is not None else []
    with Faults("advise") as faults:
        if not rates:
            allowed = f"tokens/s a GPU, or a folder with more than {_WARM_UP} readings of {metric_names.TOKENS_PER_S}"
            faults.add(f"--calibrate {given}", allowed, "name the run_dir of a TrainingHealth, or write the number")
    machine: dict[str, Any] = run.about.get("machine") or {}
    return statistics.median(rates) / int(machine.get("processes") or 1)


def _shape(params: float | None, config: Path | None, seq_len: int | None) -> ModelShape:
    from lightning_mp.planner import ModelShape

    if (params is None) == (config is None):
        refuse("advise", "give --params 7e9, or --config with a transformers config.json")
    if config is not None:
        try:
            said = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refuse("advise", f"--config {config}: {one_line(error)}; give a transformers config.json")
        return ModelShape.from_config(said, seq_len=seq_len)
    assert params is not None
    return ModelShape.of_size(params, seq_len=seq_len)


def _show(found: Advice, price: float | None) -> None:
    from rich.table import Table

    shape, best = found.shape, found.best.estimate  # refuses where nothing fits
    typer.echo(f"{shape.params / 1e9:.3g}B parameters, {shape.seq_len} tokens a sequence, on {best.layout.gpus} x")
    typer.echo(f"{found.gpu.word} ({found.gpu.source}). Precision: {found.precision_reason}.\n")
    table = Table("", "strategy", "data x tensor x pipeline", "checkpointing", "batch", "GiB", "tokens/s a GPU", "MFU")
    for rank, each in enumerate(found.choices[:_SHOWN], start=1):
        low, mid, high = each.tokens_per_s
        degrees = f"{each.data} x {each.tensor} x {each.pipeline}"
        batch = f"{each.micro_batch} x {each.accumulate}"
        speed = f"{mid:,.0f} ({low:,.0f} to {high:,.0f})"
        held, mfu = f"{each.memory_bytes / _GIB:.1f}", f"{each.estimate.mfu:.1%}"
        table.add_row(str(rank), each.strategy, degrees, each.checkpointing, batch, held, speed, mfu)
    console().print(table)
    typer.echo(f"\n1: {best}")
    parts = ", ".join(f"{name} {value / _GIB:.1f}" for name, value in best.parts.items())
    typer.echo(f"   GiB by part: {parts}. {found.best.reason}.")
    budget = found.tokens or shape.tokens
    low, mid, high = best.days(budget)
    cost = "" if price is None else ", {0:,.0f} to {2:,.0f} in money".format(*best.cost(price, budget))
    typer.echo(f"   {budget / 1e9:,.0f}B tokens: {mid:,.1f} days ({low:,.1f} to {high:,.1f}){cost}")
    for line in found.lost:
        typer.echo(f"   - {line}")
