"""``lightning-mp compare`` and ``demo``: train a config's run, or a small GPT-2, under several plans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lightning_mp.cli.output import File, Json, Number, Whole, console, load_parts, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults

if TYPE_CHECKING:
    from lightning_mp.comparison.results import Comparison

_STEPS = 100
T = TypeVar("T")


def compare(
    arguments: Arguments = None,
    plans: Annotated[
        str, typer.Option(help="Words or YAML files, with commas between; each is held against the first.")
    ] = "bf16-mixed,fp8-mixed",
    seeds: Annotated[int, typer.Option(help="How many pairs of runs; a standard error needs two.")] = 8,
    steps: Annotated[Whole, typer.Option(help="Optimizer steps a run: trainer.max_steps, else 100.")] = None,
    margin: Annotated[Number, typer.Option(help="A smaller difference of the loss is none; 0.5 % of the loss.")] = None,
    out: Annotated[File, typer.Option(help="The folder of compare.json and .html: a new one below runs/.")] = None,
    as_json: Json = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Compare what `train` would run under several plans.

    Speed, memory, and the paired difference of losses: within a seed every plan begins from the same weights and sees
    the same batches. Exit status 1 if a run failed.

    Example: lightning-mp compare experiment=neox_wide --plans bf16-mixed,fp8-mixed --seeds 8
    """
    asked = {"seeds": seeds, "steps": steps, "margin": margin, "out": out}
    with refusals("compare"), redirect_stdout(sys.stderr) if as_json else nullcontext():
        result, folder = _compared(arguments or [], plans, config_dir or [], asked)
    show(result, folder, as_json=as_json)


def show(result: Comparison, folder: Path, *, as_json: bool = False) -> None:
    """Print the table and the page's path on rank 0. Leave with status 1 if a run failed, else with 0."""
    from lightning_mp.compat.lightning import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) == 0:
        table = (folder / "compare.json").read_text("utf-8") if as_json else result.to_text(console().width)
        typer.echo(table.rstrip())
        typer.echo(f"written: {folder / 'compare.html'}, {folder / 'compare.json'}", err=as_json)
    raise typer.Exit(1 if any(plan.failed for plan in result.plans) else 0)


def _compared(
    arguments: list[str], plans: str, config_dirs: list[Path], asked: dict[str, Any]
) -> tuple[Comparison, Path]:
    """Return the comparison and its folder. The config's own plan and callbacks are left out.

    Raises:
        PlanError: an option, a plan or a part of the config is refused.
    """
    parts = load_parts()
    from lightning_mp.cli.config import composed
    from lightning_mp.comparison.compare import OWN, check_numbers, compare, read_plans

    faults = Faults("compare")
    read_plans(plans, faults)
    check_numbers(asked["seeds"], _STEPS if asked["steps"] is None else asked["steps"], asked["margin"], faults)
    # a section may refer to the plan, as ${plan.precision}: give it a plan that is compared
    replaced: dict[str, Any] = {"plan": {"precision": "bf16-mixed"}, "callbacks": None}
    with composed(arguments, "compare", faults, config_dirs, **replaced) as (config, _):
        if config.get("ckpt_path"):
            faults.add("ckpt_path: compared runs begin with the module's own weights", fix="have the module load them")
        trainer = parts.trainer_arguments(config, faults)
        faults.raise_if_any()
        folder = asked["out"] or Path(config["run_dir"])
        longest = trainer.pop("max_steps", None) or 0
        steps = asked["steps"] or (longest if longest > 0 else _STEPS)
        with parts.running(folder, faults):
            result = compare(
                partial(_made, parts.instantiated, config["model"], "model", kind=parts.LightningModule),
                partial(_made, parts.data, config),
                plans,
                **{**asked, "steps": steps, "out": folder},
                strategy=partial(_made, parts.strategy_of, config.get("strategy")),
                say=typer.echo,
                **{name: value for name, value in trainer.items() if name not in OWN},
            )
    return result, folder


def _made(make: Callable[..., T], *given: Any, **options: Any) -> T:
    with Faults("compare") as faults:
        return make(*given, faults=faults, **options)


# ---------------------------------------------------------------------- demo

#: the plans of the demo; each is compared with the first
PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "tf32": {"precision": "32-true", "tf32": "high"},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-ckpt": {"precision": "bf16-mixed", "checkpointing": "*.h.*"},
    "fp16": {"precision": "16-mixed"},
}
_SEEDS = 3


def demo(
    steps: Annotated[Whole, typer.Option(help="Training steps a run: 40 on a CPU, 100 with CUDA.")] = None,
    out: Annotated[Path, typer.Option(help="Where the page and its numbers are written.")] = Path("lightning_mp_demo"),
) -> None:
    """Compare five plans on one small GPT-2 and built-in text.

    It is `lightning-mp compare` of speed, memory and loss, on Python's own sources, with three seeds.

    Example: lightning-mp demo --steps 20
    """
    with refusals("demo", OSError):
        result = _demo(steps, out)
    show(result, out)


def _demo(steps: int | None, out: Path) -> Comparison:
    """Train the demo's plans on this machine and return the comparison.

    The plan with TF32 is left out if the device has no TF32.
    """
    import torch

    from lightning_mp.comparison.compare import compare
    from lightning_mp.compat import torch as compat
    from lightning_mp.demo.language_model import CausalLM
    from lightning_mp.demo.text_windows import TextWindows
    from lightning_mp.numerics.dtypes import describe

    cuda = torch.cuda.is_available()
    device = describe(torch.device("cuda" if cuda else "cpu"))
    # GPT-2 small on a GPU; the smallest model on a CPU that only emulates fp16
    layers, width, context, rows = (12, 768, 1024, 8) if cuda else (4, 128, 128, 8)
    if not cuda and not compat.cpu_has(torch.float16):
        layers, width, context, rows = 2, 64, 64, 4
    steps = steps if steps is not None else 100 if cuda else 40
    vocab = 8192 if cuda else 1024
    config = {"vocab_size": vocab, "n_positions": context, "n_layer": layers, "n_embd": width, "n_head": width // 32}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    plans = {name: plan for name, plan in PLANS.items() if device.tf32 or "tf32" not in plan}
    typer.echo(f"GPT-2 of {layers} layers and width {width} on Python's own sources, {rows} x {context} tokens a step.")
    typer.echo(f"{len(plans)} plans, {_SEEDS} seeds, {steps} steps a run, on {device.name}.")
    for name in PLANS.keys() - plans.keys():
        typer.echo(f"{name}: left out, since this {device.name} has no TF32.")
    return compare(
        lambda: CausalLM("gpt2", config, lr=1e-3, warmup_steps=max(1, steps // 5)),
        lambda: TextWindows(vocab=vocab, context=context, batch_size=rows),
        plans,
        seeds=_SEEDS,
        steps=steps,
        out=out,
        say=typer.echo,
        accelerator="cuda" if cuda else "cpu",
        gradient_clip_val=1.0,
    )
