"""One picture of a run: the loss curves, how far each is from fp32's, and the loss scale with its skipped steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mp.demo.records import Reading
from lightning_mp.monitor.report.summary import smooth

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLORS = {"fp32": "#000000", "tf32": "#009E73", "fp16": "#D55E00", "bf16": "#0072B2", "bf16-ckpt": "#CC79A7"}
# Curves that coincide stay visible: the later one is dashed over the earlier.
_DASHES: dict[str, Any] = {"tf32": (0, (6, 2)), "fp16": (0, (4, 2)), "bf16": (0, (2, 2)), "bf16-ckpt": (0, (1, 2))}


def draw(path: Path, histories: Mapping[str, Sequence[Reading]], title: str) -> None:
    """Write a PNG of every mode's readings; modes without any are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = {mode: readings for mode, readings in histories.items() if readings}
    scaled = {mode: readings for mode, readings in drawn.items() if readings[0].scale is not None}
    figure: Any = Figure(figsize=(12, 4.6 if not scaled else 7.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    names = [["loss", "difference"], ["scale", "scale"]] if scaled else [["loss", "difference"]]
    axes = figure.subplot_mosaic(names, height_ratios=[3, 2] if scaled else None, width_ratios=[3, 2])
    _losses(axes["loss"], drawn)
    _differences(axes["difference"], drawn)
    if scaled:
        _scales(axes["scale"], scaled)
    for axis in axes.values():
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(True, color="#e5e5e5", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _losses(axis: Any, histories: Mapping[str, Sequence[Reading]]) -> None:
    axis.set_title("training loss, smoothed (faint: every step)", loc="left", fontsize=11)
    axis.set_ylabel("nats per token")
    for mode, readings in histories.items():
        steps = [reading.step for reading in readings]
        axis.plot(steps, [reading.loss for reading in readings], color=_COLORS[mode], alpha=0.12, linewidth=1)
        axis.plot(steps, smooth([reading.loss for reading in readings]), label=mode, **_style(mode))
    axis.legend(frameon=False, loc="upper right")


def _differences(axis: Any, histories: Mapping[str, Sequence[Reading]]) -> None:
    axis.set_title("training loss minus fp32's, smoothed", loc="left", fontsize=11)
    axis.axhline(0, color=_COLORS["fp32"], linewidth=1.5)
    reference = {reading.step: reading.loss for reading in histories.get("fp32", ())}
    others = {mode: readings for mode, readings in histories.items() if mode != "fp32"}
    if not reference or not others:
        axis.text(
            0.5, 0.5, "needs fp32 and another mode", ha="center", va="bottom", transform=axis.transAxes, color="#777777"
        )
        return
    for mode, readings in others.items():
        pairs = [
            (reading.step, reading.loss - reference[reading.step]) for reading in readings if reading.step in reference
        ]
        axis.plot([step for step, _ in pairs], smooth([gap for _, gap in pairs]), **_style(mode))


def _scales(axis: Any, histories: Mapping[str, Sequence[Reading]]) -> None:
    axis.set_title(
        "loss scale; a cross is a step that was skipped because gradients overflowed", loc="left", fontsize=11
    )
    axis.set_yscale("log", base=2)
    for mode, readings in histories.items():
        steps, scales = [reading.step for reading in readings], [reading.scale for reading in readings]
        axis.step(steps, scales, where="post", label=mode, color=_COLORS[mode], linewidth=1.8)
        skipped = [
            now
            for before, now in zip([None, *readings], readings, strict=False)
            if now.skipped > (before.skipped if before else 0)
        ]
        axis.plot(
            [r.step for r in skipped],
            [r.scale for r in skipped],
            "x",
            color=_COLORS[mode],
            markersize=8,
            markeredgewidth=2,
        )
    axis.margins(y=0.15)
    axis.legend(frameon=False, loc="upper right")


def _style(mode: str) -> dict[str, Any]:
    return {"color": _COLORS[mode], "linewidth": 2.0, "linestyle": _DASHES.get(mode, "solid")}
