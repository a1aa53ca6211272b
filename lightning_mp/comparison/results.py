"""The results of a comparison: runs, paired differences from the first plan, the table and the files."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_mp.errors import counted, in_bytes, is_number, number
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.record import metric_names
from lightning_mp.record.file_format import stamped
from lightning_mp.record.report.charts import Panel, draw
from lightning_mp.record.report.load import Run, Series
from lightning_mp.record.report.page import document
from lightning_mp.record.run_folder import atomic_write, to_json

Verdict = Literal["same", "better", "worse", "undecided"]

#: the default margin, as a share of the first plan's mean final loss
MARGIN_SHARE = 0.005
#: A mean difference of more standard errors than this decides. Without a true difference, chance gives more in one
#: comparison of 50 with 8 seeds, and in one of 10 with 3 seeds.
ERRORS = 3
NOTHING = "-"
#: the smallest width, in columns, of a table with standard deviations
_WIDE = 100
_DEVIATION = ", mean ± sd"
_PAIRED = ("minus first, mean ± standard error", "verdict")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run. If the run failed, ``error`` is set and the other fields are empty.

    ``losses`` has the training loss of every optimizer step, a mean over its micro-batches. ``final_loss`` is the mean
    of the last ones, NaN if one of them is not finite. ``rate`` is in ``unit`` ("tokens" or "samples") a second.
    ``peak_bytes`` is the largest number of bytes that the allocator had given out.
    """

    seed: int
    losses: tuple[float, ...] = ()
    final_loss: float | None = None
    rate: float | None = None
    unit: str = "samples"
    peak_bytes: int | None = None
    skipped: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds, and the standard deviation; ``None`` with fewer than two values."""

    mean: float
    sd: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The runs of a plan, one per seed, and their spreads. A spread is ``None`` if no run has that number."""

    name: str
    policy: PrecisionPolicy
    runs: tuple[RunResult, ...]

    @property
    def unit(self) -> str:
        """Return ``tokens`` or ``samples``."""
        return next((run.unit for run in self.runs if run.rate), "samples")

    @property
    def rate(self) -> Spread | None:
        """Return the speed, in ``unit`` a second."""
        return _spread(run.rate for run in self.runs)

    @property
    def peak_bytes(self) -> Spread | None:
        """Return the peak of the device's allocator, in bytes."""
        return _spread(run.peak_bytes for run in self.runs)

    @property
    def final_loss(self) -> Spread | None:
        """Return the final loss over the seeds in which it is finite."""
        return _spread(run.final_loss for run in self.runs)

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """Return the runs that raised."""
        return tuple(run for run in self.runs if run.error)

    def to_dict(self) -> dict[str, Any]:
        """Return the runs and spreads as plain values."""
        spreads = {name: getattr(self, name) for name in ("rate", "peak_bytes", "final_loss")}
        return {
            "name": self.name,
            "plan": self.policy.to_dict(),
            "unit": f"{self.unit}/s",
            **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every plan's runs, and the paired difference of each later plan from the first.

    ``final_loss_steps`` is the number of last training losses whose mean is the final loss. ``mean_difference``,
    ``standard_error`` and ``verdict`` are the second plan's.
    """

    plans: tuple[PlanResult, ...]
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    steps: int
    final_loss_steps: int
    about: dict[str, Any]

    @property
    def mean_difference(self) -> float | None:
        """Return the mean of second minus first; ``None`` without a seed in which both are finite."""
        return self.differences[0].mean_difference

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean difference; ``None`` with fewer than two seeds."""
        return self.differences[0].standard_error

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the second plan."""
        return self.differences[0].verdict

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in ``compare.json``."""
        return {
            "mean_difference": self.mean_difference,
            "standard_error": self.standard_error,
            "margin": self.differences[0].margin,
            "verdict": self.verdict,
            "seeds": self.seeds,
            "steps": self.steps,
            "final_loss": f"mean training loss of the last {self.final_loss_steps} optimizer steps",
            "final_loss_steps": self.final_loss_steps,
            "differences": [asdict(difference) for difference in self.differences],
            "plans": [plan.to_dict() for plan in self.plans],
            **self.about,
        }

    def to_text(self, width: int = 110) -> str:
        """Return the conclusion, a table with a row for each plan, and notes, at most ``width`` columns wide."""
        output = io.StringIO()
        console = Console(file=output, width=width)
        console.print(conclusion(self), highlight=False, markup=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        names, cells = heads(self), rows(self)
        if width < _WIDE:  # means alone
            cells = [[cell.partition(" ± ")[0] for cell in row] for row in cells]
            names = [name.partition(" ± ")[0].removesuffix(", mean") for name in names]
        for index, name in enumerate(names):
            # fold: a narrow terminal breaks a number or a verdict instead of cutting it
            table.add_column(name.replace(", ", "\n"), justify="right" if index else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        console.print(table, highlight=False)
        failed = [f"{plan.name}, seed {run.seed}, failed: {run.error}" for plan in self.plans for run in plan.failed]
        for line in [*failed, *verdicts(self)[1:], *notes(self)]:
            console.print(line, highlight=False, markup=False)
        return output.getvalue()

    def __str__(self) -> str:
        return self.to_text()


def _spread(values: Iterable[float | None]) -> Spread | None:
    numbers = tuple(value for value in values if is_number(value))
    sd = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(statistics.fmean(numbers), sd, numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class Difference:
    """The final losses of ``second`` minus the final losses of ``first``, by seed.

    ``mean_difference`` is ``None`` without a seed in which both losses are finite. ``standard_error`` is ``None`` with
    fewer than two such seeds. ``verdict`` is about ``second``, and ``reason`` explains it in a sentence.
    """

    first: str
    second: str
    differences: dict[int, float]
    mean_difference: float | None
    standard_error: float | None
    margin: float
    verdict: Verdict
    reason: str


def compare_losses(
    first: tuple[str, Mapping[int, float | None]], second: tuple[str, Mapping[int, float | None]], margin: float | None
) -> Difference:
    """Return the paired difference of two plans.

    Each plan is (name, final losses by seed). A loss is NaN if the run diverged, ``None`` if it failed. ``margin=None``
    is half a percent of the first plan's mean final loss.
    """
    finite = {seed: loss for seed, loss in first[1].items() if is_number(loss)}
    if margin is None:
        margin = MARGIN_SHARE * abs(statistics.fmean(finite.values())) if finite else 0.0
    pairs = {seed: (loss, its) for seed, loss in finite.items() if (its := second[1].get(seed)) is not None}
    differences = {seed: its - loss for seed, (loss, its) in pairs.items() if is_number(its)}
    diverged = [seed for seed in pairs if seed not in differences]
    mean = statistics.fmean(differences.values()) if differences else None
    error = _standard_error([*differences.values()])
    verdict: Verdict = "undecided"
    if diverged:
        seeds = ", ".join(map(str, diverged))
        verdict, reason = "worse", f"its loss was not finite in seed {seeds}, where the first plan's was"
    elif mean is None or error is None:
        reason = f"{counted(len(differences), 'paired seed')}: a standard error needs two"
    elif abs(mean) + ERRORS * error <= margin:
        verdict, reason = "same", f"the difference and {ERRORS} standard errors are within the margin"
    elif abs(mean) > ERRORS * error:
        verdict = "worse" if mean > 0 else "better"
        reason = f"more than {ERRORS} standard errors from 0, and not within the margin"
    else:
        reason = f"0 is within {ERRORS} standard errors, which reach beyond the margin: more seeds make them smaller"
    return Difference(first[0], second[0], differences, mean, error, margin, verdict, reason)


def _standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; ``None`` with fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


# ---------------------------------------------------------------------- in words

#: the smallest relative difference of speed or memory that is mentioned
_WORTH = 0.05


def conclusion(comparison: Comparison) -> str:
    """Return a sentence that names the plan to use: the fastest one whose loss is not higher than the first's."""
    first, machine = comparison.plans[0], comparison.about.get("machine", {"type": "cpu"})
    here = "this CPU" if machine["type"] == "cpu" else f"this {machine['device']}"
    pairs = list(zip(comparison.plans[1:], comparison.differences, strict=True))
    known = [
        (_gain(plan, first), plan, difference)
        for plan, difference in pairs
        if difference.verdict in ("same", "better") and not plan.failed and plan.rate and first.rate
    ]
    if not known:
        undecided = [each for plan, each in pairs if each.verdict == "undecided" and not plan.failed]
        if undecided:
            return f"Not decided between {first.name} and {undecided[0].second}: {undecided[0].reason}."
        return f"On {here} use {first.name}: no other plan has its loss."
    (speed, saved), best, difference = max(known, key=lambda item: item[0])
    if speed > 1 or (speed == 1 and (saved > _WORTH or difference.verdict == "better")):
        return f"On {here} use {best.name}: {_words(best, difference, first)}, against {first.name}."
    if speed == 1:
        return f"On {here} {first.name} and {best.name} have the same loss, speed and memory."
    return f"On {here} use {first.name}: same loss as {best.name}, {_times(1 / speed)}."


def _gain(plan: PlanResult, first: PlanResult) -> tuple[float, float]:
    """Return the speed relative to the first plan's, 1 if nearly equal, and the share of memory that is saved."""
    speed = _ratio(plan.rate, first.rate) or 0
    return (1 if abs(speed - 1) < _WORTH else speed), 1 - (_ratio(plan.peak_bytes, first.peak_bytes) or 1)


def verdicts(comparison: Comparison) -> list[str]:
    """Return a line for each plan: its loss, speed and memory against the first's, and a reason unless equal."""
    first = comparison.plans[0]
    lines = [f"{first.name}: what the others are compared with"]
    for plan, difference in zip(comparison.plans[1:], comparison.differences, strict=True):
        reason = "" if difference.verdict == "same" else f" ({difference.reason})"
        lines.append(f"{plan.name}: {_words(plan, difference, first)}{reason}")
    return lines


def _words(plan: PlanResult, difference: Difference, first: PlanResult) -> str:
    mean = abs(difference.mean_difference or 0)
    loss = {
        "same": f"same loss within ±{difference.margin:.2g}",
        "better": f"loss lower by {mean:.2g}",
        "worse": f"loss higher by {mean:.2g}" if difference.standard_error is not None else "a loss that is not finite",
        "undecided": "loss not decided",
    }[difference.verdict]
    speed, memory = _ratio(plan.rate, first.rate), _ratio(plan.peak_bytes, first.peak_bytes)
    more = 0.0 if memory is None else memory - 1
    held = f"{abs(more) * 100:.0f} % {'more' if more > 0 else 'less'} memory" if abs(more) >= _WORTH else ""
    return ", ".join(filter(None, [loss, "" if speed is None else _times(speed), held]))


def _ratio(ours: Spread | None, theirs: Spread | None) -> float | None:
    return ours.mean / theirs.mean if ours and theirs and theirs.mean else None


def _times(speed: float) -> str:
    """Return a speed in words: ``2.1 × faster``, ``13 % slower``, ``same speed``."""
    if abs(speed - 1) < _WORTH:
        return "same speed"
    word, factor = ("faster", speed) if speed > 1 else ("slower", 1 / speed)
    return f"{factor:.1f} × {word}" if factor >= 1.5 else f"{abs(speed - 1) * 100:.0f} % {word}"


def heads(comparison: Comparison) -> list[str]:
    """Return the names of the columns. A narrow column breaks at the comma."""
    rate = f"{comparison.plans[0].unit}/s{_DEVIATION}"
    return ["plan", rate, "speed", "peak memory", f"final loss{_DEVIATION}", *_PAIRED]


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells of every plan, the first without a difference."""
    table: list[list[str]] = []
    for plan in comparison.plans:
        speed = _ratio(plan.rate, comparison.plans[0].rate)
        loss = _with_sd(plan.final_loss, "{:.4f}".format)
        peak = NOTHING if plan.peak_bytes is None else in_bytes(plan.peak_bytes.mean)
        table.append([plan.name, _with_sd(plan.rate, number), f"{speed:.2f}x" if speed else NOTHING, peak, loss])
    table[0] += [NOTHING] * len(_PAIRED)
    for cells, difference in zip(table[1:], comparison.differences, strict=True):
        mean, error = difference.mean_difference, difference.standard_error
        said = "" if error is None else f" ± {error:.4f}"
        cells += [NOTHING if mean is None else f"{mean:+.4f}{said}", difference.verdict]
    return table


def _with_sd(spread: Spread | None, form: Callable[[float], str]) -> str:
    if spread is None:
        return NOTHING
    return form(spread.mean) + ("" if spread.sd is None else f" ± {form(spread.sd)}")


def notes(comparison: Comparison) -> list[str]:
    """Return the meaning of the columns, a line each."""
    first, last = comparison.plans[0].name, comparison.final_loss_steps
    margins = dict.fromkeys(f"{each.margin:.4g}" for each in comparison.differences)
    mean = "training loss of the last step" if last == 1 else f"mean training loss of the last {last} steps"
    lines = [
        f"final loss: the {mean} of {comparison.steps}, over {counted(len(comparison.seeds), 'seed')}.",
        f"minus first: this loss minus {first}'s, same seed, weights and batches; the standard error is over seeds.",
        f"same: with {ERRORS} standard errors within ±{', ±'.join(margins)}; worse, better: further from 0 than those.",
    ]
    if any(run.skipped for plan in comparison.plans for run in plan.runs):
        skipped = (f"{plan.name} {sum(run.skipped for run in plan.runs)}" for plan in comparison.plans)
        lines.append(f"steps skipped, over all seeds: {', '.join(skipped)}.")
    return lines


def write(comparison: Comparison, folder: Path) -> None:
    """Write ``compare.json`` and ``compare.html`` into ``folder``, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "compare.json", to_json(stamped(comparison.to_dict()), indent=2) + "\n")
    atomic_write(folder / "compare.html", render(comparison))


def render(comparison: Comparison) -> str:
    """Return the HTML page. Its curves are means, step by step, over the seeds that ran to their end."""
    plans, about = comparison.plans, comparison.about
    curves = [[run.losses for run in plan.runs if run.losses] for plan in plans]
    runs = [_run(plan.name, _mean_curve(of)) for plan, of in zip(plans, curves, strict=True)]
    seeds = f"mean of {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else "one seed"
    charts = [_difference_chart(comparison, seeds)] if any(curves[1:]) and curves[0] else []
    alike = all(difference.verdict == "same" for difference in comparison.differences)
    if any(run.finite(metric_names.LOSS) for run in runs) and not (charts and alike):
        charts.append(draw(Panel(f"Loss, {seeds}", "loss", {metric_names.LOSS: "loss"}), runs))
    return document(
        Path(__file__).with_name("compare.html.j2"),
        title=f"{len(plans)} plans compared",
        conclusion=conclusion(comparison),
        payload={"charts": charts, "steps": [1, comparison.steps]},
        runs=runs,
        words=[about["module"], about["machine"]["device"], seeds, f"{comparison.steps} steps a run"],
        failed=[(plan.name, run) for plan in plans for run in plan.failed],
        verdicts=list(enumerate(verdicts(comparison))),
        bars=[
            (f"Speed, {plans[0].unit} a second", "longer is better", _bars(plan.rate for plan in plans)),
            ("Peak memory", "shorter is better", _bars((plan.peak_bytes for plan in plans), in_bytes)),
        ],
        heads=heads(comparison),
        rows=list(enumerate(rows(comparison))),
        notes=notes(comparison),
        about=about,
        plans=plans,
    )


def _run(name: str, values: Sequence[float]) -> Run:
    """Return a curve over steps for the report. A value that is not finite becomes a gap."""
    finite = [value if math.isfinite(value) else None for value in values]
    return Run(Path(name), name, {metric_names.LOSS: Series(list(range(1, len(finite) + 1)), finite)})


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return list(map(statistics.fmean, zip(*curves, strict=False)))


def _difference_chart(comparison: Comparison, seeds: str) -> dict[str, Any]:
    """Return the chart of each later plan's losses minus the first's: the mean over seeds, with standard errors."""
    first, *others = comparison.plans
    base = {run.seed: run.losses for run in first.runs if run.losses}
    runs, bands = [_run(first.name, [])], list[list[float]]([[]])
    for plan in others:
        pairs = [zip(run.losses, base[run.seed], strict=False) for run in plan.runs if run.losses and run.seed in base]
        curves = [[its - loss for its, loss in pair] for pair in pairs]
        runs.append(_run(plan.name, _mean_curve(curves)))
        steps = [values if all(map(math.isfinite, values)) else () for values in zip(*curves, strict=False)]
        bands.append([ERRORS * (_standard_error(values) or 0.0) for values in steps])
    title = f"Loss minus {first.name}'s, {seeds}" + f" ± {ERRORS} standard errors" * (len(comparison.seeds) > 1)
    chart = draw(Panel(title, "difference of the loss", {metric_names.LOSS: "loss"}), runs)
    for line in chart["lines"]:
        band = bands[line["run"]]
        halves = [None if y is None else band[step - 1] for step, y in zip(line["x"], line["y"], strict=True)]
        line["band"] = halves if any(halves) else []
    margin = comparison.differences[0].margin
    return {**chart, "note": f"dashed: ±{margin:.2g}, the same", "rules": [-margin, 0.0, margin]}


def _bars(spreads: Iterable[Spread | None], form: Callable[[float], str] = number) -> list[tuple[float, str]]:
    """Return the length of each bar in percent of the longest, and its number as text."""
    means = [None if spread is None else spread.mean for spread in spreads]
    longest = max((mean for mean in means if mean), default=1.0)
    return [(0.0, NOTHING) if mean is None else (100 * mean / longest, form(mean)) for mean in means]
