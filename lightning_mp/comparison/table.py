"""A comparison as a table in plain text, with what its figures mean below it."""

from __future__ import annotations

import io
from textwrap import wrap
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lightning_mp.comparison.compare import Comparison, PlanResult, Spread
    from lightning_mp.comparison.paired import Difference

NOTHING = "-"
MIB = 2**20
_FEW = 100


def to_text(comparison: Comparison, width: int) -> str:
    """A row a plan, and notes."""
    output = io.StringIO()
    console = Console(file=output, width=width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(heads(comparison)):
        table.add_column(name.replace(", ", "\n"), justify="right" if index else "left", no_wrap=True)
    for row in rows(comparison):
        table.add_row(*row)
    console.print(table, highlight=False)
    lines = [f"{plan.name}, seed {run.seed}, failed: {run.error}" for plan in comparison.plans for run in plan.failed]
    for line in [*lines, *notes(comparison)]:
        console.print("\n".join(wrap(line, width - 1, subsequent_indent="  ")), highlight=False, markup=False)
    return output.getvalue()


def heads(comparison: Comparison) -> list[str]:
    """The columns' names; a comma is where a narrow one may break."""
    unit = comparison.plans[0].unit
    return ["plan", f"{unit}/s, mean ± sd", "speed", "peak MiB, mean ± sd", "final loss, mean ± sd", *_PAIRED]


_PAIRED = ("minus first, mean", "95 % interval", "verdict")


def rows(comparison: Comparison) -> list[list[str]]:
    """The cells of every plan, the first without a difference."""
    first = comparison.plans[0]
    paired = [[NOTHING] * len(_PAIRED), *map(_paired, comparison.differences)]
    return [[*_alone(plan, first), *cells] for plan, cells in zip(comparison.plans, paired, strict=True)]


def _alone(plan: PlanResult, first: PlanResult) -> list[str]:
    rate, base, peak = plan.rate, first.rate, plan.peak_bytes
    return [
        plan.name,
        _with_sd(rate, "{:,.0f}" if rate and rate.mean >= _FEW else "{:.3g}"),
        f"{rate.mean / base.mean:.2f}x" if rate and base else NOTHING,
        _with_sd(peak, "{:,.1f}", MIB),
        _with_sd(plan.final_loss, "{:.4f}"),
    ]


def _with_sd(spread: Spread | None, form: str, unit: float = 1) -> str:
    if spread is None:
        return NOTHING
    mean = form.format(spread.mean / unit)
    return mean if spread.sd is None else f"{mean} ± {form.format(spread.sd / unit)}"


def _paired(difference: Difference) -> list[str]:
    mean, interval = difference.mean_difference, difference.interval
    return [
        NOTHING if mean is None else f"{mean:+.4f}",
        NOTHING if interval is None else f"{interval[0]:+.4f} .. {interval[1]:+.4f}",
        difference.verdict,
    ]


def notes(comparison: Comparison) -> list[str]:
    """What the figures mean, a line each."""
    first, last = comparison.plans[0].name, comparison.final_loss_steps
    count = len(comparison.seeds)
    cpu = comparison.about["machine"]["type"] == "cpu"
    margins = dict.fromkeys(f"{one.margin:.4g}" for one in comparison.differences)
    final = f"final loss: the mean training loss of the last {last} of {comparison.steps} steps"
    lines = [
        f"{final}, over {count} seed{'s' * (count != 1)}.",
        f"minus first: {first}'s of the same seed, weights and batches taken away; interval: Student's t over seeds.",
        f"verdict: same with the interval within the margin, ±{', ±'.join(margins)}, else worse or better without 0.",
        *(f"{one.second}: {one.verdict}, {one.reason}." for one in comparison.differences),
    ]
    if cpu:
        lines.append("peak: what torch's CPU allocator had given out at most, in two steps of their own.")
    if cpu and any(plan.policy.precision == "fp8-mixed" for plan in comparison.plans):
        lines.append("speed: FP8 on a CPU is for numbers; it says nothing of a GPU's.")
    if any(run.skipped for plan in comparison.plans for run in plan.runs):
        skipped = (f"{plan.name} {sum(run.skipped for run in plan.runs)}" for plan in comparison.plans)
        lines.append(f"steps skipped, over all seeds: {', '.join(skipped)}.")
    return lines
