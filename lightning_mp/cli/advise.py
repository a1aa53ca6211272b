"""``lightning-mp advise``."""

from __future__ import annotations

import json
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lightning_mp.cli.output import File, Json, Number, Whole, console, count, load_parts, progress, refusals, refuse
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults, counted, in_bytes, in_short, one_line

if TYPE_CHECKING:
    from lightning_mp.planner import Advice
    from lightning_mp.planner.memory import MemoryPrediction
    from lightning_mp.planner.predict import Fit

_GIB = 2**30
_SHOWN = 5
#: a terminal of this width has room for every column of the table
_WIDE = 100
#: options that the planner's ``advise`` does not take; it takes the others under the same names
_OWN = {"arguments", "params", "config", "gbps", "price", "out", "as_json", "config_dir"}


def advise(  # noqa: PLR0913, PLR0917  a flag a keyword
    context: typer.Context,
    arguments: Arguments = None,
    params: Annotated[Number, typer.Option(parser=count, metavar="SIZE", help="7b: a Llama of that size.")] = None,
    config: Annotated[File, typer.Option(help="A transformers config.json instead; --out writes that model.")] = None,
    gpu: Annotated[
        str, typer.Option(help="a100-40, a100-80, h100-80, h200-141, v100-32, t4-16, l4-24 and others.")
    ] = "h100-80",
    gpus: Annotated[int, typer.Option(help="How many.")] = 8,
    nvlink: Annotated[str, typer.Option(help="full, pairs or none.")] = "full",
    gbps: Annotated[Number, typer.Option(help="Gbit/s of a node to the others.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    seq_len: Annotated[Whole, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[Whole, typer.Option(help="Sequences an optimizer step.")] = None,
    micro_batch: Annotated[Whole, typer.Option(help="Sequences a micro-batch on each data-parallel rank.")] = None,
    tokens: Annotated[
        Number, typer.Option(parser=count, metavar="COUNT", help="Tokens to train on, as 1.5t; else 20 a parameter.")
    ] = None,
    price: Annotated[Number, typer.Option(help="Price of a GPU for an hour.")] = None,
    precision: Annotated[str, typer.Option(help="A mode; auto follows the GPU. fp8 is used where asked for.")] = "auto",
    offload: Annotated[bool, typer.Option("--offload", help="Consider the CPU's memory too.")] = False,
    out: Annotated[File, typer.Option(help="Write the first choice as YAML for lightning-mp train.")] = None,
    as_json: Json = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Say what fits these GPUs, how fast and at what cost.

    Precision, strategy, degrees, micro-batch; --out writes the YAML that runs it.

    With a CONFIG of `train`: its memory by part, the largest micro-batch on --gpu, and the effect
    of checkpointing. A CONFIG excludes all options but --gpu, --gpus, --json and --config-dir.

    Example: lightning-mp advise --params 7b --gpus 8 --gpu h100-80 --out run.yaml
    """
    if arguments:
        sources = {name: getattr(context.get_parameter_source(name), "name", "") for name in context.params}
        given = {name for name, source in sources.items() if source == "COMMANDLINE"}
        if others := sorted(given - {"arguments", "gpu", "gpus", "as_json", "config_dir"}):
            said = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            refuse("advise", f"{said} next to a CONFIG, which says all but --gpu: set it there, or leave CONFIG out")
        _advise_run(arguments, gpu, gpus if "gpus" in given else None, config_dir or [], as_json=as_json)
        return
    from lightning_mp.planner import advise as ask

    with refusals("advise", ValueError, OSError):
        asked = {name: value for name, value in context.params.items() if name not in _OWN}
        advice = ask(_given(params, config), interconnect_gbps=gbps, **asked)
        if as_json:
            typer.echo(json.dumps(advice.to_dict(), indent=2))
        best = advice.best  # raises PlanError if nothing fits
        money = None if price is None else best.cost(price, tokens)
        if not as_json:
            _show(advice, money)
        if out is not None:
            out.write_text(advice.yaml(), encoding="utf-8")
            typer.echo(f"written: {out}; run it: lightning-mp train {out}", err=as_json)


def _advise_run(arguments: list[str], gpu: str, gpus: int | None, config_dirs: list[Path], *, as_json: bool) -> None:
    """Print the predicted memory of a config's run, and which micro-batches fit the GPU.

    The config's callbacks are left out. ``gpus`` is the number of devices if the config leaves
    it open. With ``None`` the devices of this machine are counted. A fault prints a message and
    leaves with status 2.
    """
    parts = load_parts()
    from lightning_mp.planner.memory import USABLE
    from lightning_mp.planner.predict import LEFT_OUT, MOST_ROWS, fits, predict_memory, rows_of
    from lightning_mp.policy.hardware import find

    faults = Faults("advise")
    ways: list[Fit] = []
    with refusals("advise"), redirect_stdout(sys.stderr):
        device = faults.unwrap(find(gpu, faults))
        with parts.one_run(arguments, faults, "advise", config_dirs, callbacks=None) as (config, regime):
            model, batches = parts.model_and_batches(config, faults)
            batch = next(iter(batches), None)
            if batch is None:
                faults.add("the data hold no batch", fix="look at the data section")
                faults.raise_if_any()
            trainer, rows = regime.trainer, rows_of(batch)
            devices = _count(trainer.get("devices"), gpus, faults) * (trainer.get("num_nodes") or 1)
            written = config.get("strategy") or {}
            name = str(written.get("name", written.get("_target_", "auto")))
            given = {key: value for key, value in trainer.items() if key not in {*LEFT_OUT, "strategy", "devices"}}
            how: dict[str, Any] = {"devices": devices, "trainer_args": given}
            progress("tracing two steps without memory ...")
            prediction = predict_memory(model, batch, regime.plan, strategy=trainer["strategy"], **how)
            if prediction.parts["activations"]:
                make = partial(parts.strategy_of, written, faults=faults)
                for way in fits(model, batch, regime.plan, device.memory * USABLE, make, prediction, **how):
                    progress(f"checkpointing {way.checkpointing}: {counted(way.rows, 'row')}")
                    ways.append(way)
    if as_json:
        plain = {"strategy": name, "devices": devices, "rows": rows, "prediction": asdict(prediction)}
        typer.echo(json.dumps({**plain, "fits": list(map(asdict, ways))}, indent=2))
        return
    where = f"{name} on {counted(devices, 'device')}, {counted(rows, 'row')} a micro-batch"
    _show_memory(prediction, f"Memory of one rank: {where}")
    for each in ways:
        most = counted(each.rows, "row") + " or more" * (each.rows == MOST_ROWS)
        size = in_bytes(each.prediction.peak_bytes)
        typer.echo(f"checkpointing {each.checkpointing}: {size}; up to {most} on {device.word}")
    if not ways:
        typer.echo("the largest micro-batch is not known, since activations were not counted")


def _show_memory(prediction: MemoryPrediction, title: str) -> None:
    """Print the parts of a peak as a table, largest first."""
    from rich.table import Table

    table = Table("part", "size", "share", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, size in (*sorted(prediction.parts.items(), key=lambda part: -part[1]), ("peak", prediction.peak_bytes)):
        table.add_row(name.replace("_", " "), in_bytes(size), f"{size / max(prediction.peak_bytes, 1):.0%}")
    console().print(title, table, sep="\n", highlight=False)
    typer.echo("\n".join([f"By: {prediction.method}", *prediction.notes]))


def _count(given: Any, gpus: int | None, faults: Faults) -> int:
    """Return how many devices ``trainer.devices`` names.

    For ``None``, -1 and "auto" return ``gpus``. If ``gpus`` is ``None`` as well, return the number
    of CUDA devices here, at least 1.

    Raises:
        PlanError: ``given`` is no number of devices, or the config and ``gpus`` both name a number.
    """
    import torch

    if given in (None, "auto", -1, "-1"):
        if gpus is None:
            return max(1, torch.cuda.device_count())
        faults.whole("--gpus", gpus, 1, "write a positive whole number")
        faults.raise_if_any()
        return gpus
    if gpus is not None:
        faults.add(f"--gpus {gpus} next to trainer.devices={given!r}", fix=f"write trainer.devices={gpus}")
        faults.raise_if_any()
    if isinstance(given, str) and "," in given:
        given = [part for part in given.split(",") if part.strip()]
    if isinstance(given, list):
        return len(cast("list[Any]", given))
    given = int(given) if str(given).strip().isdigit() else given
    faults.whole("trainer.devices", given, 1, "write a number, -1 or auto")
    faults.raise_if_any()
    return given


def _given(params: float | None, config: Path | None) -> Any:
    """Return the model to plan for: a Llama shape, or the fields of a transformers config.

    Leave with status 2 if not exactly one of them is given, or the file cannot be read as JSON.
    """
    from lightning_mp.planner import ModelShape

    if (params is None) == (config is None):
        refuse("advise", "give --params 7b, or --config with a transformers config.json")
    if config is None:
        return ModelShape.of_size(cast("float", params))
    try:
        return json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse("advise", f"--config {config}: {one_line(error)}; give a transformers config.json")


def _show(advice: Advice, money: tuple[float, float, float] | None) -> None:
    """Print the best choices as a table, and details of the first. ``money`` is its cost: low, mid, high."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lightning_mp.planner.advise import RANKED

    shape, best, terminal = advice.shape, advice.best, console()

    def say(text: str, first: str = "", rest: str = "") -> None:
        wrap = textwrap.TextWrapper(terminal.width, first, first + rest, break_on_hyphens=False)
        terminal.print(wrap.fill(text), highlight=False, markup=False)

    where = f"{shape.seq_len} tokens a sequence, on {best.layout.gpus} x {advice.gpu.word}"
    say(f"{in_short(shape.params)} parameters, {where}.")
    say(f"Precision: {advice.precision_reason}.")
    terminal.print()
    # a narrow terminal has no room for ranges and MFU; the lines below show the first choice's
    shown = None if terminal.width >= _WIDE else -2
    layout = ["", "strategy", "data x tensor\nx pipeline", "checkpoint", "batch x\naccumulate"]
    heads = [*layout, "GiB", "tokens/s\na GPU", "range", "MFU"]
    table = Table(*heads[:shown], box=SIMPLE_HEAD, pad_edge=False)
    for rank, each in enumerate(advice.choices[:_SHOWN], start=1):
        low, mid, high = each.tokens_per_s
        layout = [str(rank), each.strategy, f"{each.data} x {each.tensor} x {each.pipeline}", each.checkpointing]
        batch = [f"{each.micro_batch} x {each.accumulate}", f"{each.memory_bytes / _GIB:.1f}"]
        speed = [f"{mid:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{each.mfu:.1%}"]
        table.add_row(*[*layout, *batch, *speed][:shown])
    terminal.print(table)
    say(RANKED)
    terminal.print()
    parts = ", ".join(f"{name.replace('_', ' ')} {value / _GIB:.1f}" for name, value in best.parts.items())
    budget = advice.tokens or shape.tokens
    low, mid, high = best.days(budget)
    cost = "" if money is None else f", at a cost of {money[0]:,.0f} to {money[2]:,.0f}"
    say(f"1: {best}", rest="   ")
    reason = best.reason.removeprefix(advice.precision_reason).removeprefix("; ")
    say(f"GiB by part: {parts}.{reason and f' {reason}.'}", "   ")
    say(f"{in_short(budget)} tokens: {_days(mid)} days ({_days(low)} to {_days(high)}){cost}", "   ")
    say(f"{advice.gpu.word}: {advice.gpu.source}.", "   ")
    for line in advice.lost:
        say(f"- {line}", "   ", "  ")


def _days(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.1f}"
