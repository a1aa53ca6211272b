"""``lightning-mp demo``: one small GPT-2 on real text under five plans, compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lightning_mp.cli.compare import show
from lightning_mp.cli.output import refusals

if TYPE_CHECKING:
    from lightning_mp.comparison.results import Comparison

#: what is compared, each held against the first
PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "tf32": {"precision": "32-true", "tf32": "high"},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-ckpt": {"precision": "bf16-mixed", "checkpointing": "*.h.*"},
    "fp16": {"precision": "16-mixed"},
}
_SEEDS = 3


def demo(
    steps: Annotated[
        Optional[int],  # noqa: UP045  typer reads this at run time, on 3.10 too
        typer.Option(help="Training steps a run.", show_default="40 on a CPU, 100 with CUDA"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the page and its numbers are written.")] = Path("lightning_mp_demo"),
) -> None:
    """Compare five plans on one small GPT-2 and built-in text.

    It is `lightning-mp compare` of speed, memory and loss, on Python's own sources, with three seeds.

    Example: lightning-mp demo --steps 20
    """
    with refusals("demo", OSError):
        found = _compared(steps, out)
    show(found, out)


def _compared(steps: int | None, out: Path) -> Comparison:
    import torch

    from lightning_mp.comparison.compare import compare
    from lightning_mp.compat import torch as compat
    from lightning_mp.demo.language_model import CausalLM
    from lightning_mp.demo.text_windows import TextWindows
    from lightning_mp.numerics.device import describe

    cuda = torch.cuda.is_available()
    device = describe(torch.device("cuda" if cuda else "cpu"))
    # GPT-2 small on a GPU; where a CPU has no fp16 kernels, and emulates them, a model that is smaller still
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
