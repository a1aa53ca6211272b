"""The advice as one HTML page, without scripts: memory by part against the device's line, time against GPU count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape

from lightning_mp.planner.estimate import Estimate, of_layout

_GIB = 2**30
_SHOWN = 8
_COLOURS = {
    "parameters": "#4c6ef5",
    "gradients": "#15aabf",
    "optimizer_state": "#7950f2",
    "activations": "#fab005",
    "other": "#868e96",
}
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#212529}}
svg{{width:100%;height:auto}}text{{font:12px system-ui}}li{{margin:.2rem 0}}i{{display:inline-block;width:.8em;
height:.8em;margin:0 .3em 0 1em}}</style><h1>{title}</h1>
"""


def write(title: str, choices: list[Estimate], reasons: Iterable[str], lost: Iterable[str], tokens: float) -> str:
    """The page; ``choices`` best first, ``tokens`` the budget whose time is drawn."""
    legend = "".join(f'<i style="background:{colour}"></i>{name}' for name, colour in _COLOURS.items())
    said = "".join(f"<li>{escape(f'{each}; {why}')}</li>" for each, why in zip(choices, reasons, strict=False))
    parts = [
        _HEAD.format(title=escape(title)),
        f"<ol>{said}</ol><h2>Memory on the fullest GPU</h2><p>{legend}</p>{_bars(choices[:_SHOWN])}",
        f"<h2>Days for {tokens / 1e9:,.0f}B tokens</h2>{_days(choices[0], tokens)}",
        f"<h2>What lost</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lost)}</ul></html>\n",
    ]
    return "\n".join(parts)


def _bars(choices: list[Estimate]) -> str:
    memory = choices[0].layout.gpu.memory
    shapes: list[str] = []
    for row, each in enumerate(choices):
        left, top = 260.0, 26 * row + 4
        name = f"{row + 1}: {each.layout.strategy}, {each.layout.data} x {each.layout.tensor} x {each.layout.pipeline}"
        shapes.append(f'<text x="0" y="{top + 14}">{escape(name)}</text>')
        for part, size in each.parts.items():
            width, what = 500 * size / memory, f"{part}: {size / _GIB:.1f} GiB"
            rectangle = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="18" fill="{_COLOURS[part]}">'
            shapes.append(f"{rectangle}<title>{what}</title></rect>")
            left += width
    height = 26 * len(choices) + 22
    line = f'<line x1="760" x2="760" y1="0" y2="{height - 18}" stroke="#e03131" stroke-width="2"/>'
    label = f'<text x="760" y="{height - 4}" text-anchor="middle">{memory / _GIB:.1f} GiB</text>'
    return f'<svg viewBox="0 0 800 {height}">{"".join(shapes)}{line}{label}</svg>'


def _days(best: Estimate, tokens: float) -> str:
    """A bar from the low to the high end for each count of GPUs, more replicas of the best layout."""
    layout = best.layout
    more = [replace(layout, gpus=layout.gpus * times, data=layout.data * times) for times in (1, 2, 4, 8, 16)]
    spans = [(each.gpus, of_layout(best.shape, each).days(tokens)) for each in more]
    longest = max(high for _, (_, _, high) in spans)
    shapes: list[str] = []
    for row, (gpus, (low, mid, high)) in enumerate(spans):
        x, top, width = 90 + 550 * low / longest, 26 * row + 4, 550 * (high - low) / longest
        shapes.append(f'<text x="0" y="{top + 14}">{gpus} GPUs</text>')
        shapes.append(f'<rect x="{x:.1f}" y="{top}" width="{max(width, 2):.1f}" height="18" fill="#4c6ef5"/>')
        shapes.append(f'<text x="{x + width + 6:.1f}" y="{top + 14}">{mid:,.3g} ({low:,.3g} to {high:,.3g})</text>')
    return f'<svg viewBox="0 0 800 {26 * len(spans) + 8}">{"".join(shapes)}</svg>'
