"""The advice as one HTML page, without scripts: memory by part against the device's line, time against GPU count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from lightning_mp.planner.estimate import Estimate, of_layout
from lightning_mp.planner.memory import usable
from lightning_mp.planner.shape import CONVENTIONS
from lightning_mp.planner.speed import Range

_GIB = 2**30
_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "other")
#: of the width, where the device's line is
_LINE = 96
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root{{color-scheme:light dark;--text:#212529;--soft:#868e96;--line:#dee2e6;--back:#fff;--limit:#e03131;
--parameters:#4263eb;--gradients:#0ca678;--optimizer_state:#9c36b5;--activations:#f08c00;--other:#adb5bd}}
@media(prefers-color-scheme:dark){{:root{{--text:#e9ecef;--soft:#adb5bd;--line:#373a40;--back:#141517;--limit:#ff6b6b;
--parameters:#748ffc;--gradients:#38d9a9;--optimizer_state:#da77f2;--activations:#ffa94d;--other:#868e96}}}}
body{{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:1.5rem auto;padding:0 1rem;color:var(--text);
background:var(--back)}}
h1{{font-size:1.5rem}}h2{{font-size:1.15rem;margin:2rem 0 .6rem}}
.wide{{overflow-x:auto}}table{{border-collapse:collapse;font-size:.87em;width:100%}}
th,td{{padding:.3rem .6rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}}
td:nth-child(2){{white-space:nowrap}}.n{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}td.why{{min-width:16rem}}
.key span{{white-space:nowrap;margin-right:1rem}}
.key i{{display:inline-block;width:.8em;height:.8em;margin-right:.35em}}
.key .limit,.key .dash{{width:0}}
.row{{display:grid;grid-template:"name bar size"/13rem 1fr 11rem;gap:.2rem .8rem;align-items:center;margin:.5rem 0;
font-size:.87em}}.row>:last-child{{grid-area:size}}
.bar{{grid-area:bar;position:relative;display:flex;height:1.2rem}}.bar b{{height:100%}}
.bar u{{position:absolute;top:-.25rem;bottom:-.25rem}}
.limit{{border-left:2px solid var(--limit)}}.dash{{border-left:2px dashed var(--limit)}}
.range{{position:absolute;background:var(--parameters);opacity:.45}}
.mid{{position:absolute;width:3px;background:var(--parameters)}}
@media(max-width:40rem){{.row{{grid-template:"name size" "bar bar"/1fr max-content}}}}
</style><h1>{title}</h1>
"""


def write(
    title: str, about: str, choices: Sequence[Estimate], reasons: Iterable[str], lost: Iterable[str], tokens: float
) -> str:
    """The page; ``choices`` best first, ``tokens`` the budget whose time is drawn; ``about`` stands above all."""
    words = {**dict.fromkeys(_PARTS, ""), "optimizer_state": "optimizer state"}
    legend = "".join(
        f'<span><i style="background:var(--{part})"></i>{word or part}</span>' for part, word in words.items()
    )
    first = choices[0].layout
    legend += f'<span><i class="limit"></i>{first.gpu.word}: {first.gpu.memory / _GIB:.1f} GiB</span>'
    legend += '<span><i class="dash"></i>what is planned with</span>'
    parts = [
        _HEAD.format(title=escape(title)),
        f'<p>{escape(about)}.</p><div class="wide">{_table(choices, reasons)}</div>',
        f'<h2>Memory on the fullest GPU</h2><p class="key">{legend}</p>{_bars(choices)}',
        f"<h2>Days for {tokens / 1e9:,.0f}B tokens, by the number of GPUs</h2>",
        f"<p>More replicas of choice 1; a bar is the range, its mark the middle.</p>{_days(choices[0], tokens)}",
        f"<h2>What lost</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lost)}</ul></html>\n",
    ]
    return "\n".join(parts)


def _name(each: Estimate) -> str:
    layout = each.layout
    return f"{layout.strategy}, {layout.data} x {layout.tensor} x {layout.pipeline}"


def _table(choices: Sequence[Estimate], reasons: Iterable[str]) -> str:
    convention = choices[0].convention
    heads = ("", "strategy, data x tensor x pipeline", "recomputed", "batch x accumulated", "tokens/s a GPU")
    mfu = f"MFU ({escape(convention)}: {escape(CONVENTIONS[convention])})"
    lines = ["".join(f"<th>{head}</th>" for head in (*heads, mfu, "why"))]
    for rank, (each, why) in enumerate(zip(choices, reasons, strict=True), start=1):
        low, mid, high = each.tokens_per_s
        known = "" if each.measured else ", no published run"
        speed = f"{mid:,.0f} ({low:,.0f} to {high:,.0f}{known})"
        batch = f"{each.layout.micro_batch} x {each.layout.accumulate}"
        cells = (rank, _name(each), each.layout.checkpointing, batch, speed, f"{each.mfu:.1%}")
        plain = "".join(f"<td{' class=n' if at > 2 else ''}>{escape(str(cell))}</td>" for at, cell in enumerate(cells))
        lines.append(f'{plain}<td class="why">{escape(why)}</td>')
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _bars(choices: Sequence[Estimate]) -> str:
    """A row for each choice: its name, its parts against the device's line and what of it is planned with, its size."""
    rows: list[str] = []
    for rank, each in enumerate(choices, start=1):
        memory = each.layout.gpu.memory
        drawn = "".join(
            f'<b style="width:{_LINE * size / memory:.2f}%;background:var(--{part})" '
            f'title="{part}: {size / _GIB:.1f} GiB"></b>'
            for part, size in each.parts.items()
        )
        drawn += f'<u class="limit" style="left:{_LINE}%"></u>'
        drawn += f'<u class="dash" style="left:{_LINE * usable(each.layout) / memory:.2f}%"></u>'
        size = f"{each.memory_bytes / _GIB:.1f} GiB"
        rows.append(_row(f"{rank}: {_name(each)}", drawn, size))
    return "".join(rows)


def _days(best: Estimate, tokens: float) -> str:
    """A bar from the low to the high end for each count of GPUs, more replicas of the best layout."""
    layout = best.layout
    more = [replace(layout, gpus=layout.gpus * times, data=layout.data * times) for times in (1, 2, 4, 8, 16)]
    # what a calibration made of the best one holds of its replicas
    plain = of_layout(best.shape, layout).tokens_per_s
    factors = [ours / theirs for ours, theirs in zip(best.tokens_per_s, plain, strict=True)]
    spans: list[tuple[int, tuple[float, float, float]]] = []
    for each in more:
        found = of_layout(best.shape, each)
        speed = Range(*(rate * factor for rate, factor in zip(found.tokens_per_s, factors, strict=True)))
        spans.append((each.gpus, replace(found, tokens_per_s=speed).days(tokens)))
    longest = max(high for _, (_, _, high) in spans)
    rows: list[str] = []
    for gpus, (low, mid, high) in spans:
        begin, middle, width = (100 * days / longest for days in (low, mid, high - low))
        drawn = f'<b class="range" style="left:{begin:.2f}%;width:{width:.2f}%"></b>'
        drawn += f'<b class="mid" style="left:{middle:.2f}%"></b>'
        said = f"{mid:,.3g} ({low:,.3g} to {high:,.3g})"
        rows.append(_row(f"{gpus} GPUs", drawn, said))
    return "".join(rows)


def _row(name: str, drawn: str, size: str) -> str:
    return f'<div class="row"><span>{escape(name)}</span><div class="bar">{drawn}</div><span>{size}</span></div>\n'
