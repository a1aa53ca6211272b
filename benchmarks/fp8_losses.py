"""The losses of FP8's recipes beside bf16's, paired over seeds: the table and the picture in docs/fp8.md.

    python -m benchmarks.fp8_losses

trains a small GPT-NeoX on the demo's text by ``lightning_mp.compare``, writes ``compare.json`` below
``--out``, then the page; ``--drawn`` writes the page from what is there. On a CPU the products are emulated: its
own take a second a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from lightning_mp import FP8, MixedPrecisionPlan, compare
from lightning_mp.comparison.results import interval_of
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.demo.text_windows import TextWindows

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs/fp8.md", ROOT / "docs/images/fp8_losses.svg"
BEGIN, END = "<!-- written by benchmarks/fp8_losses.py -->", "<!-- end of what it writes -->"
RECIPES = ("tensorwise", "rowwise", "rowwise_gw_hp")
# Every dimension a multiple of 16; so small that 32 runs of 300 steps take ten minutes on one core.
CONTEXT, BATCH, VOCAB = 32, 4, 512
NEOX = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EMULATED = """ It emulates: every operand is rounded to FP8 with its scale, as on a GPU, and the rounded values are
multiplied in fp32. That shows what the rounding does to the loss. It shows nothing of speed (emulation is slower than
bf16), nothing of memory, and nothing of how a GPU's tensor cores add up."""
_COLORS = {"tensorwise": "#D55E00", "rowwise": "#0072B2", "rowwise_gw_hp": "#009E73"}


def measure(seeds: int, steps: int, out: Path) -> None:
    emulate = not torch.cuda.is_available()
    plans: dict[str, Any] = {"bf16-mixed": "bf16-mixed"}
    for recipe in RECIPES:
        plans[recipe] = MixedPrecisionPlan("fp8-mixed", fp8=FP8(recipe=recipe, small="convert", emulate=emulate))
    text = TextWindows(vocab=VOCAB, context=CONTEXT, batch_size=BATCH)
    text.setup("fit")
    found = compare(
        lambda: CausalLM("gpt_neox", NEOX, lr=2e-3, warmup_steps=30),
        text.train_dataloader,
        plans,
        seeds=seeds,
        steps=steps,
        out=out,
        say=lambda line: print(line, flush=True),
        gradient_clip_val=1.0,
    )
    print(found)


def page(found: dict[str, Any]) -> str:
    """The section of docs/fp8.md."""
    machine, versions, last = found["machine"], found["versions"], found["final_loss_steps"]
    first, *others = found["plans"]
    lines = [
        BEGIN,
        "",
        (
            f"A GPT-NeoX of {NEOX['num_hidden_layers']} layers of {NEOX['hidden_size']} on the demo's text, "
            f"{found['steps']} steps of {BATCH} x {CONTEXT} tokens, {len(found['seeds'])} seeds; all linear layers "
            f'converted, the head too (`small="convert"`). Final loss: the mean of the last {last} steps. Within '
            "a seed all four begin from the same weights and see the same batches: each difference is the format's."
        ),
        "",
        "| | final loss, mean ± sd over seeds | minus bf16, paired | 95 % interval | verdict |",
        "| --- | --- | --- | --- | --- |",
        f"| `{first['name']}` | {_spread(first['final_loss'])} | | | |",
    ]
    for plan, one in zip(others, found["differences"], strict=True):
        low, high = one["interval_95"]
        lines.append(
            f"| `{plan['name']}` | {_spread(plan['final_loss'])} | {one['mean_difference']:+.4f} | "
            f"{low:+.4f} to {high:+.4f} | {one['verdict']} |"
        )
    spread = first["final_loss"]["sd"]
    lines += [
        "",
        f"![Loss of bf16, and of each recipe minus bf16's with its interval](images/{PICTURE.name})",
        "",
        (
            f"Margin: ±{found['margin']:.4f}, half a percent of the loss. bf16's own seeds differ by {spread:.4f} (one "
            "standard deviation), which would hide all of these differences: [compare them paired](compare.md)."
        ),
        "",
        f"Measured on {_machine(machine)}, torch {versions['torch']}, torchao {versions['torchao']}, Lightning "
        f"{versions['lightning']}, by `python -m benchmarks.fp8_losses`."
        + (EMULATED.replace("\n", " ") if machine["type"] == "cpu" else ""),
        "",
        END,
    ]
    return "\n".join(lines)


def _machine(machine: dict[str, Any]) -> str:
    return f"one core of a CPU ({machine['name'].partition(',')[0]})" if machine["type"] == "cpu" else machine["name"]


def _spread(values: dict[str, Any]) -> str:
    return f"{values['mean']:.4f} ± {values['sd']:.4f}"


def draw(found: dict[str, Any], path: Path) -> None:
    """bf16's loss, and each recipe's paired difference from it; means of as many steps as the final loss."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    curves = {plan["name"]: [run["losses"] for run in plan["runs"]] for plan in found["plans"]}
    base, last = curves.pop(found["plans"][0]["name"]), found["final_loss_steps"]
    steps = range(last, found["steps"] + 1, 3)
    with mpl.rc_context({"svg.hashsalt": "lightning_mp", "svg.fonttype": "path"}):
        figure: Any = Figure(figsize=(11, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, 1 + len(curves), width_ratios=[1.2, *[1] * len(curves)])
        for losses in base:
            axes[0].plot(steps, [_mean(losses, step, last) for step in steps], color="#444444", linewidth=0.7)
        axes[0].set_title(f"{found['plans'][0]['name']}, every seed", loc="left", fontsize=10)
        axes[0].set_ylabel("nats per token")
        highest = 0.0
        for axis, (name, losses) in zip(axes[1:], curves.items(), strict=True):
            pairs = list(zip(base, losses, strict=True))
            at = [[_mean(b, step, last) - _mean(a, step, last) for a, b in pairs] for step in steps]
            ends = [interval_of(values) or (0.0, 0.0) for values in at]
            axis.axhline(0, color="#444444", linewidth=1)
            lows, highs = zip(*ends, strict=True)
            axis.fill_between(steps, lows, highs, color=_COLORS[name], alpha=0.3)
            axis.plot(steps, [statistics.fmean(values) for values in at], color=_COLORS[name], linewidth=1.6)
            axis.set_title(f"{name} minus bf16", loc="left", fontsize=10)
            highest = max(highest, *map(abs, (*lows, *highs)))
        for axis in axes[1:]:
            axis.set_ylim(-1.1 * highest, 1.1 * highest)
        for axis in axes:
            axis.set_xlabel("step")
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _mean(losses: list[float], step: int, last: int) -> float:
    return statistics.fmean(losses[step - last : step])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_losses"))
    parser.add_argument("--drawn", action="store_true", help="write the page from what --out holds")
    given = parser.parse_args()
    if not given.drawn:
        measure(given.seeds, given.steps, given.out)
    found = json.loads((given.out / "compare.json").read_text(encoding="utf-8"))
    draw(found, PICTURE)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{page(found)}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
