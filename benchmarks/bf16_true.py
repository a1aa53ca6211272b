"""What ``bf16-true`` loses, and what keeps it: losses and lost updates of three ways to store weights.

The same model, text of the demo, data order and seeds with weights in bf16 rounded to the nearest, in bf16 rounded
stochastically (torchao), and in fp32 (``bf16-mixed``). Writes the table into ``docs/how-to/bf16-true.md`` and the
picture beside it.
``python -m benchmarks.bf16_true [--steps 300] [--seeds 2] [--rates 1e-4 1e-3]``
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from benchmarks.fit import fit
from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.demo.text_windows import TextWindows
from lightning_mp.monitor import metric_names

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "how-to" / "bf16-true.md", DOCS / "images" / "bf16-true.svg"
TABLE = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)
VOCAB, CONTEXT = 1024, 64
CONFIG = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_layer": 3, "n_embd": 128, "n_head": 4}
CONFIG |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
#: curves that coincide stay visible
DASHES = {"fp32 masters": (2, 2)}
COLORS = {"nearest": "#D55E00", "stochastic": "#009E73", "fp32 masters": "#0072B2"}


@dataclass(frozen=True)
class Way:
    """How weights are stored and rounded."""

    precision: str
    optimizer: Callable[..., Any]
    words: str


def _nearest(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options, fused=True)


def _stochastic(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import _AdamW

    return _AdamW(parameters, **options, bf16_stochastic_round=True)


WAYS = {
    "nearest": Way("bf16-true", _nearest, "`bf16-true`, `torch.optim.AdamW`"),
    "stochastic": Way("bf16-true", _stochastic, "`bf16-true`, torchao's `_AdamW(bf16_stochastic_round=True)`"),
    "fp32 masters": Way("bf16-mixed", _nearest, "`bf16-mixed`, `torch.optim.AdamW`"),
}


class Model(CausalLM):
    """A small GPT-2 with the way's optimizer; it keeps every loss."""

    def __init__(self, way: Way, rate: float, steps: int) -> None:
        super().__init__("gpt2", CONFIG, lr=rate, warmup_steps=steps // 5)
        self._way, self.losses = way, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        made = self._way.optimizer(self.parameters(), lr=self._lr, betas=self._betas, weight_decay=self._weight_decay)
        schedule = self.make_schedule(made, max(1, self._warmup_steps))
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Measured:
    """Of one way at one rate, over seeds."""

    losses: list[list[float]] = field(default_factory=list[list[float]])
    lost: list[list[float]] = field(default_factory=list[list[float]])
    final: list[float] = field(default_factory=list[float])


def run(way: Way, rate: float, steps: int, seed: int, into: Measured) -> None:
    """One short fit and its validation loss."""
    seed_everything(seed, verbose=False)
    data = TextWindows(vocab=VOCAB, context=CONTEXT, batch_size=4, val_batches=12)
    data.setup("fit")
    module = Model(way, rate, steps)
    with tempfile.TemporaryDirectory() as folder:
        health = TrainingHealth(folder, 5, report=False)
        plan = MixedPrecisionPlan(way.precision)
        # torchao compiles its step, which would take longer than the fit
        with torch.compiler.set_stance("force_eager"):
            trainer = fit(module, data.train_dataloader(), plan, steps, callbacks=[health])
        into.final.append(trainer.validate(module, data.val_dataloader(), verbose=False)[0][metric_names.VAL_LOSS])
    into.losses.append(module.losses)
    shares = [row[metric_names.LOST_UPDATES] for row in health.rows]
    into.lost.append([share for share in shares if share is not None])


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential mean."""
    found: list[float] = []
    for value in values:
        found.append(value if not found else weight * found[-1] + (1 - weight) * value)
    return found


def mean(curves: Sequence[Sequence[float]]) -> list[float]:
    """Step by step, over seeds."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def table(found: dict[tuple[float, str], Measured], rates: Sequence[float]) -> str:
    """A row a way and rate: the loss on held-out text, its distance from fp32 masters', the updates lost."""
    lines = ["| learning rate | weights | validation loss | more than fp32 masters, by seed | updates lost |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for rate in rates:
        best = found[rate, "fp32 masters"].final
        for name, way in WAYS.items():
            mine = found[rate, name]
            apart = [value - other for value, other in zip(mine.final, best, strict=True)]
            gap = (
                ""
                if name == "fp32 masters"
                else f"{statistics.fmean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
            )
            lost = f"{statistics.fmean(map(statistics.fmean, mine.lost)):.0%}" if mine.lost[0] else ""
            lines.append(f"| {rate:g} | {way.words} | {statistics.fmean(mine.final):.3f} | {gap} | {lost} |")
    return "\n".join(lines)


def draw(found: dict[tuple[float, str], Measured], rates: Sequence[float], path: Path) -> None:
    """A column a rate: smoothed training losses above, the share of updates lost below."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "bf16-true"
    figure: Any = Figure(figsize=(4.6 * len(rates), 5.6), layout="constrained")
    axes = figure.subplots(2, len(rates), squeeze=False, height_ratios=[2, 1], sharex=True)
    for column, rate in enumerate(rates):
        above, below = axes[0][column], axes[1][column]
        for name in WAYS:
            mine = found[rate, name]
            how = {"color": COLORS[name], "linewidth": 1.8, "dashes": DASHES.get(name, (1, 0))}
            above.plot(smooth(mean(mine.losses)), label=name, **how)
            if mine.lost[0]:
                shares = mean(mine.lost)
                below.plot(range(0, 5 * len(shares), 5), shares, color=COLORS[name], linewidth=1.8)
        above.set_title(f"learning rate {rate:g}", loc="left", fontsize=10)
        below.set_ylim(0, 1)
        below.set_xlabel("step")
        if not column:
            above.set_ylabel("training loss, nats per token")
            below.set_ylabel("updates lost")
            above.legend(frameon=False)
        for axis in (above, below):
            axis.grid(True, color="#e5e5e5", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[tuple[float, str], Measured] = {}
    for rate in options.rates:
        for name, way in WAYS.items():
            mine = found.setdefault((rate, name), Measured())
            for seed in range(options.seeds):
                run(way, rate, options.steps, seed, mine)
            print(f"{rate:g} {name}: {mine.final}", flush=True)
    written = table(found, options.rates)
    print(written)
    draw(found, options.rates, PICTURE)
    PAGE.write_text(TABLE.sub(lambda place: f"{place[1]}\n{written}\n\n{place[2]}", PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
