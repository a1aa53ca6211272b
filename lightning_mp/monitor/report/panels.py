"""Which charts a report has, and which readings each of them shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.compared import LOSS_DIFFERENCE
from lightning_mp.monitor.report.load import Run, Series

Scale = Literal["linear", "log", "log2", "share"]

#: Lines of one run that a chart can hold and still be read.
MAX_LINES = 10
#: Charts of readings that the report knows nothing about.
MAX_OTHERS = 12


@dataclass(frozen=True, slots=True)
class Line:
    """One reading on a chart. ``alone`` is the title of the chart it has to itself where runs are compared."""

    name: str
    label: str
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over steps.

    ``unit`` is the vertical axis's title; ``scale`` its kind; ``stepped`` holds a value until the next reading;
    ``grouped`` adds every reading whose name goes on after the first line's (``health/grad_norm/encoder``);
    ``from_zero`` keeps the axis honest about differences; ``expected`` panels are named in the page where they have no
    reading; ``overflows`` marks ordinary overflows too.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    scale: Scale = "linear"
    stepped: bool = False
    grouped: bool = False
    from_zero: bool = False
    expected: bool = True
    overflows: bool = False


KNOWN: tuple[Panel, ...] = (
    Panel(
        "loss",
        "Loss",
        "loss",
        (Line(metric_names.LOSS, "training"), Line(metric_names.VAL_LOSS, "validation", "Validation loss")),
    ),
    Panel(
        "loss_difference",
        "Loss minus the first run's, smoothed",
        "loss",
        (Line(LOSS_DIFFERENCE, "difference"),),
        expected=False,
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "L2 norm",
        (Line(metric_names.GRAD_NORM, "all parameters"),),
        scale="log",
        grouped=True,
    ),
    Panel("param_norm", "Parameter norm", "L2 norm", (Line(metric_names.PARAM_NORM, "all parameters"),), grouped=True),
    Panel(
        "update_ratio",
        "Update-to-weight ratio",
        "update / weights (L2)",
        (Line(metric_names.UPDATE_RATIO, "all parameters"),),
        scale="log",
        grouped=True,
    ),
    Panel(
        "lost_updates",
        "Lost updates",
        "share of updates rounded away",
        (Line(metric_names.LOST_UPDATES, "half-precision weights"),),
        scale="share",
        from_zero=True,
        expected=False,
    ),
    Panel(
        "fp8_flushed",
        "FP8: values flushed to zero",
        "share of values",
        (Line(metric_names.FP8_FLUSHED, "largest of all layers"),),
        scale="share",
        grouped=True,
        from_zero=True,
        expected=False,
    ),
    Panel(
        "fp8_amax",
        "FP8: largest magnitudes",
        "amax",
        (Line(metric_names.FP8_AMAX, "all layers"),),
        scale="log",
        grouped=True,
        expected=False,
    ),
    Panel(
        "fp8_scale",
        "FP8: scales",
        "factor on the operand",
        (Line(metric_names.FP8_SCALE, "all layers"),),
        scale="log2",
        stepped=True,
        grouped=True,
        expected=False,
    ),
    Panel(
        "loss_scale",
        "Loss scale",
        "factor on the loss",
        (Line(metric_names.LOSS_SCALE, "loss scale"),),
        scale="log2",
        stepped=True,
        grouped=True,
        overflows=True,
    ),
    Panel(
        "skips",
        "Skipped steps",
        "steps",
        (Line(metric_names.SKIPPED_STEPS, "in total"), Line(metric_names.SKIPPED_IN_A_ROW, "in a row")),
        stepped=True,
        overflows=True,
    ),
    Panel("lr", "Learning rate", "learning rate", (Line(metric_names.LR, "learning rate"),), grouped=True),
    Panel("tokens", "Tokens per second", "tokens / s", (Line(metric_names.TOKENS_PER_S, "tokens"),), from_zero=True),
    Panel(
        "samples", "Samples per second", "samples / s", (Line(metric_names.SAMPLES_PER_S, "samples"),), from_zero=True
    ),
    Panel(
        "mfu",
        "Model FLOPs utilisation",
        "share of the device's peak",
        (Line(metric_names.MFU, "MFU"),),
        scale="share",
        from_zero=True,
    ),
    Panel(
        "memory",
        "Memory",
        "GiB",
        (
            Line(metric_names.MEMORY_PEAK, "peak", "Peak memory"),
            Line(metric_names.MEMORY_ALLOCATED, "allocated", "Allocated memory"),
            Line(metric_names.MEMORY_RESERVED, "reserved", "Reserved memory"),
        ),
        from_zero=True,
    ),
    Panel(
        "growth",
        "Growth counter of the loss scale",
        "clean steps in a row",
        (Line(metric_names.GROWTH_TRACKER, "growth counter"),),
        stepped=True,
        expected=False,
    ),
    Panel(
        "hysteresis",
        "Hysteresis of the loss scale",
        "overflows left before it falls",
        (Line(metric_names.HYSTERESIS, "hysteresis"),),
        stepped=True,
        expected=False,
    ),
    Panel(
        "skip_rate",
        "Skip rate",
        "share of steps",
        (Line(metric_names.SKIP_RATE, "skip rate"),),
        scale="share",
        from_zero=True,
        expected=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The charts to draw, and a sentence each on what is not drawn."""

    panels: tuple[Panel, ...]
    left_out: tuple[str, ...]


def lay_out(runs: Sequence[Run]) -> Layout:
    """The charts for what ``runs`` recorded. Compared runs have one line each in a chart, so panels are split then."""
    names = list(dict.fromkeys(name for run in runs for name, found in run.series.items() if found.finite))
    known = [_with_groups(panel, names) for panel in KNOWN]
    left_out = _absences([panel for panel in known if panel.expected], runs)
    drawn = [replace(panel, lines=tuple(line for line in panel.lines if line.name in names)) for panel in known]
    unknown = [name for name in names if not any(name == line.name for panel in known for line in panel.lines)]
    others, too_many = _others(unknown, together=len(runs) == 1)
    panels = [panel for panel in drawn if panel.lines] + others
    notes = [*left_out, too_many]
    if len(runs) > 1:
        notes += [
            f"{panel.title}: compared for {panel.lines[0].label!r} only; its other lines are in each run's own report"
            for panel in panels
            if any(not line.alone for line in panel.lines[1:])
        ]
        panels = [single for panel in panels for single in _split(panel) if not _told_by_the_table(single, runs)]
    notes += [
        f"{panel.title}: {len(panel.lines) - MAX_LINES} more lines than can be told apart"
        for panel in panels
        if len(panel.lines) > MAX_LINES
    ]
    return Layout(tuple(replace(panel, lines=panel.lines[:MAX_LINES]) for panel in panels), tuple(filter(None, notes)))


def _with_groups(panel: Panel, names: Sequence[str]) -> Panel:
    if not panel.grouped:
        return panel
    start = f"{panel.lines[0].name}/"
    groups = dict.fromkeys(name for name in names if name.startswith(start))
    return replace(panel, lines=(*panel.lines, *(Line(name, name.removeprefix(start)) for name in groups)))


def _others(names: Sequence[str], together: bool) -> tuple[list[Panel], str]:
    """Charts for readings of unknown meaning; ``together``, names that share their first parts share a chart."""
    families: dict[str, list[str]] = {}
    for name in names:
        family, _, _ = name.rpartition("/")
        families.setdefault(family if together and "/" in family else name, []).append(name)
    panels = [
        Panel(
            f"other_{number}",
            family,
            "as logged",
            tuple(Line(name, name.removeprefix(f"{family}/")) for name in members),
            expected=False,
        )
        for number, (family, members) in enumerate(families.items())
    ]
    more = len(panels) - MAX_OTHERS
    return panels[:MAX_OTHERS], f"{more} more readings than there is room for: not drawn" if more > 0 else ""


def _split(panel: Panel) -> list[Panel]:
    first, *rest = panel.lines
    named = [line for line in rest if line.alone]
    return [
        replace(panel, lines=(first,), title=first.alone or panel.title),
        *(replace(panel, key=f"{panel.key}_{line.label}", lines=(line,), title=line.alone) for line in named),
    ]


def _told_by_the_table(panel: Panel, runs: Sequence[Run]) -> bool:
    """Whether each run has one reading of it at most, which the table of runs has too."""
    found = [series for run in runs for line in panel.lines if (series := series_of(run, line))]
    in_table = panel.lines[0].name in (metric_names.VAL_LOSS, metric_names.MEMORY_PEAK)
    return in_table and all(len(series.finite) == 1 for series in found)


def _absences(panels: Sequence[Panel], runs: Sequence[Run]) -> list[str]:
    """In words, which panels have no number in which runs."""
    nowhere: list[str] = []
    somewhere: list[str] = []
    for panel in panels:
        what = f"{panel.title[0].lower()}{panel.title[1:]} ({panel.lines[0].name})"
        without = [
            run.name for run in runs if _ought(run, panel) and not any(series_of(run, line) for line in panel.lines)
        ]
        if len(without) == len(runs):
            nowhere += [what] if len(runs) == 1 else []
        elif without:
            somewhere.append(f"Without a number for {what}: {', '.join(without)}")
    return [f"Without a single number: {', '.join(nowhere)}", *somewhere] if nowhere else somewhere


def _ought(run: Run, panel: Panel) -> bool:
    """Whether a run without the panel's readings lacks them: one whose plan scales no loss has no loss scale."""
    plan = run.about.get("plan")
    return panel.key != "loss_scale" or not isinstance(plan, dict) or plan.get("loss_scaling") is not None


def series_of(run: Run, line: Line) -> Series | None:
    """What ``run`` recorded of ``line``; ``None`` where there is no number among it."""
    found = run.series.get(line.name)
    return found if found is not None and found.finite else None
