"""The results of a comparison: runs, each plan's paired difference from the first over seeds, the table, the files."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_mp.errors import counted, is_number
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.charts import Panel, draw
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.page import document, put
from lightning_mp.monitor.run_folder import to_json
from lightning_mp.policy import PrecisionPolicy

Verdict = Literal["same", "better", "worse", "undecided"]

#: the margin where none is given, as a share of the first plan's mean final loss
MARGIN_SHARE = 0.005
_CONFIDENCE = 0.95
NOTHING = "-"
_FEW = 100
_PAIRED = ("minus first, mean", "95 % interval", "verdict")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: ``losses`` is the training loss of every optimizer step (a mean over its micro-batches).

    ``final_loss`` is the mean of the last ones, NaN where one of them is not finite. ``rate`` is in ``unit`` ("tokens"
    or "samples") a second, ``peak_bytes`` the allocator's. Where it failed, ``error`` is set and the rest is empty.
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
    """A mean over seeds and its standard deviation, ``None`` with fewer than two."""

    mean: float
    sd: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One plan's runs, one per seed, and their spreads; a spread is ``None`` where no run has such a number.

    ``rate`` is in ``unit`` a second; ``peak_bytes`` the most that the device's allocator had given out.
    """

    name: str
    policy: PrecisionPolicy
    runs: tuple[RunResult, ...]

    @property
    def unit(self) -> str:
        """``tokens`` or ``samples``."""
        return next((run.unit for run in self.runs if run.rate), "samples")

    @property
    def rate(self) -> Spread | None:
        """Tokens or samples a second."""
        return _spread(run.rate for run in self.runs)

    @property
    def peak_bytes(self) -> Spread | None:
        """Peak memory in bytes."""
        return _spread(run.peak_bytes for run in self.runs)

    @property
    def final_loss(self) -> Spread | None:
        """Over the seeds in which it is finite."""
        return _spread(run.final_loss for run in self.runs)

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """The runs that raised."""
        return tuple(run for run in self.runs if run.error)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
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

    ``final_loss_steps`` is how many of a run's last training losses its final loss is the mean of. ``mean_difference``,
    ``interval`` and ``verdict`` are the second plan's.
    """

    plans: tuple[PlanResult, ...]
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    steps: int
    final_loss_steps: int
    about: dict[str, Any]

    @property
    def mean_difference(self) -> float | None:
        """Second minus first."""
        return self.differences[0].mean_difference

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean difference."""
        return self.differences[0].interval

    @property
    def verdict(self) -> Verdict:
        """The verdict on the second plan."""
        return self.differences[0].verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``compare.json`` has them."""
        return {
            "mean_difference": self.mean_difference,
            "interval_95": self.interval,
            "margin": self.differences[0].margin,
            "verdict": self.verdict,
            "seeds": self.seeds,
            "steps": self.steps,
            "final_loss": f"mean training loss of the last {self.final_loss_steps} optimizer steps",
            "final_loss_steps": self.final_loss_steps,
            "differences": [
                {"interval_95" if key == "interval" else key: value for key, value in asdict(one).items()}
                for one in self.differences
            ],
            "plans": [plan.to_dict() for plan in self.plans],
            **self.about,
        }

    def to_text(self, width: int = 110) -> str:
        """The table, a row a plan, and notes, ``width`` columns wide at most."""
        output = io.StringIO()
        console = Console(file=output, width=width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for index, name in enumerate(heads(self)):
            # in a narrow terminal cells are folded: nothing of a number or a verdict is left out
            table.add_column(name.replace(", ", "\n"), justify="right" if index else "left", overflow="fold")
        for row in rows(self):
            table.add_row(*row)
        console.print(table, highlight=False)
        failed = [f"{plan.name}, seed {run.seed}, failed: {run.error}" for plan in self.plans for run in plan.failed]
        for line in [*failed, *notes(self)]:
            console.print(line, highlight=False, markup=False)
        return output.getvalue()

    def __str__(self) -> str:
        return self.to_text()


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = tuple(value for value in values if is_number(value))
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, found)


# ---------------------------------------------------------------------- the paired difference


@dataclass(frozen=True, slots=True)
class Difference:
    """Final losses of ``second`` minus those of ``first``, seed by seed.

    ``mean_difference`` is ``None`` without a seed in which both ended with a number, ``interval`` (95 %, Student's t)
    with fewer than two of them. ``verdict`` speaks of ``second``; ``reason`` says in a sentence what it rests on.
    """

    first: str
    second: str
    differences: dict[int, float]
    mean_difference: float | None
    interval: tuple[float, float] | None
    margin: float
    verdict: Verdict
    reason: str


def compare_losses(
    first: tuple[str, Mapping[int, float | None]], second: tuple[str, Mapping[int, float | None]], margin: float | None
) -> Difference:
    """The paired difference. Each plan is a name and its final losses by seed: NaN if it diverged, None if it failed.

    ``margin=None`` is half a percent of the first plan's mean final loss.
    """
    (one, losses), (other, theirs) = first, second
    finite = {seed: loss for seed, loss in losses.items() if is_number(loss)}
    if margin is None:
        margin = MARGIN_SHARE * abs(statistics.fmean(finite.values())) if finite else 0.0
    pairs = {seed: (loss, its) for seed, loss in finite.items() if (its := theirs.get(seed)) is not None}
    differences = {seed: its - loss for seed, (loss, its) in pairs.items() if is_number(its)}
    diverged = [seed for seed in pairs if seed not in differences]
    mean = statistics.fmean(differences.values()) if differences else None
    interval = None
    if mean is not None and len(differences) > 1:
        error = statistics.stdev(differences.values()) / math.sqrt(len(differences))
        half = student_t(_CONFIDENCE, len(differences) - 1) * error
        interval = mean - half, mean + half
    verdict, reason = _verdict(interval, margin, diverged, len(differences))
    return Difference(one, other, differences, mean, interval, margin, verdict, reason)


def _verdict(
    interval: tuple[float, float] | None, margin: float, diverged: list[int], count: int
) -> tuple[Verdict, str]:
    if diverged:
        seeds = ", ".join(map(str, diverged))
        return "worse", f"its loss was not finite in seed {seeds}, where the first plan's was"
    if interval is None:
        return "undecided", f"{counted(count, 'paired seed')}: an interval needs two"
    low, high = interval
    if -margin <= low and high <= margin:
        return "same", "the interval lies within the margin"
    if low > 0:
        return "worse", "the interval lies above 0, and not within the margin"
    if high < 0:
        return "better", "the interval lies below 0, and not within the margin"
    return "undecided", "the interval holds 0 and reaches beyond the margin: more seeds narrow it"


def student_t(confidence: float, freedom: int) -> float:
    """The t beyond which, on both sides together, ``1 - confidence`` of Student's distribution lies.

    The share between -t and t is a sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), which is halved down to.
    """
    odd, low, high = freedom % 2, 0.0, 1e4  # enough for 99.99 % at one degree of freedom
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        angle = math.atan(middle / math.sqrt(freedom))
        total, term = 0.0, math.cos(angle) if odd else 1.0
        for index in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * index / (index + 1)
        within = total * math.sin(angle)
        within = 2 / math.pi * (angle + within) if odd else within
        low, high = (middle, high) if within < confidence else (low, middle)
    return high


# ---------------------------------------------------------------------- the table


def heads(comparison: Comparison) -> list[str]:
    """The columns' names; a comma is where a narrow one may break."""
    first = comparison.plans[0]
    peak = f"peak {_memory_unit(first)[0]}, mean ± sd"
    return ["plan", f"{first.unit}/s, mean ± sd", "speed", peak, "final loss, mean ± sd", *_PAIRED]


def _memory_unit(first: PlanResult) -> tuple[str, int]:
    """The unit of a column, and its bytes: MiB, or KiB for a model that takes less than one."""
    return ("KiB", 2**10) if first.peak_bytes and first.peak_bytes.mean < 2**20 else ("MiB", 2**20)


def rows(comparison: Comparison) -> list[list[str]]:
    """The cells of every plan, the first without a difference."""
    first = comparison.plans[0]
    base, unit = first.rate, _memory_unit(first)[1]
    found = [
        [
            plan.name,
            _with_sd(plan.rate, "{:,.0f}" if plan.rate and plan.rate.mean >= _FEW else "{:.3g}"),
            f"{plan.rate.mean / base.mean:.2f}x" if plan.rate and base else NOTHING,
            _with_sd(plan.peak_bytes, "{:,.1f}", unit),
            _with_sd(plan.final_loss, "{:.4f}"),
        ]
        for plan in comparison.plans
    ]
    found[0] += [NOTHING] * len(_PAIRED)
    for cells, one in zip(found[1:], comparison.differences, strict=True):
        mean = NOTHING if one.mean_difference is None else signed(one.mean_difference)
        cells += [mean, NOTHING if one.interval is None else " .. ".join(map(signed, one.interval)), one.verdict]
    return found


def _with_sd(spread: Spread | None, form: str, unit: float = 1) -> str:
    if spread is None:
        return NOTHING
    mean = form.format(spread.mean / unit)
    return mean if spread.sd is None else f"{mean} ± {form.format(spread.sd / unit)}"


def signed(value: float) -> str:
    """Four decimals; a zero has no sign."""
    text = f"{value:+.4f}"
    return text if float(text) else "0.0000"


def notes(comparison: Comparison) -> list[str]:
    """What the columns mean, and the reason of each verdict, a line each."""
    first, last = comparison.plans[0].name, comparison.final_loss_steps
    margins = dict.fromkeys(f"{one.margin:.4g}" for one in comparison.differences)
    mean = "training loss of the last step" if last == 1 else f"mean training loss of the last {last} steps"
    lines = [
        f"final loss: the {mean} of {comparison.steps}, over {counted(len(comparison.seeds), 'seed')}.",
        f"minus first: {first}'s of the same seed, weights and batches taken away; interval: Student's t over seeds.",
        f"verdict: same with the interval within the margin, ±{', ±'.join(margins)}, else worse or better without 0.",
        *(f"{one.second}: {one.verdict}, {one.reason}." for one in comparison.differences),
    ]
    if any(run.skipped for plan in comparison.plans for run in plan.runs):
        skipped = (f"{plan.name} {sum(run.skipped for run in plan.runs)}" for plan in comparison.plans)
        lines.append(f"steps skipped, over all seeds: {', '.join(skipped)}.")
    return lines


# ---------------------------------------------------------------------- as files


def write(comparison: Comparison, folder: Path) -> None:
    """Write both files into ``folder``.

    Raises:
        MissingExtraError: plotly is not installed.
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "compare.json", to_json(comparison.to_dict(), indent=2) + "\n")
    put(folder / "compare.html", render(comparison))


def render(comparison: Comparison) -> str:
    """The page; its curves are means over the seeds that ran to their end, step by step.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    plans, about = comparison.plans, comparison.about
    runs: list[Run] = []
    for plan in plans:
        losses = zip(*(run.losses for run in plan.runs if run.losses), strict=False)
        means = [mean if math.isfinite(mean) else None for mean in map(statistics.fmean, losses)]
        runs.append(Run(Path(plan.name), plan.name, {metric_names.LOSS: Series(list(range(1, len(means) + 1)), means)}))
    seeds = f"mean of {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else "one seed"
    panel = Panel(f"Loss, {seeds}", "loss", {metric_names.LOSS: "loss"})
    drawn = [draw(panel, runs)] if any(run.finite(metric_names.LOSS) for run in runs) else []
    return document(
        Path(__file__).with_name("compare.html.j2"),
        title=f"{len(plans)} plans compared",
        payload={"charts": drawn, "steps": [1, comparison.steps]},
        runs=runs,
        words=[about["module"], about["machine"]["device"], seeds, f"{comparison.steps} steps a run"],
        failed=[(plan.name, run) for plan in plans for run in plan.failed],
        heads=heads(comparison),
        rows=list(enumerate(rows(comparison))),
        notes=notes(comparison),
        about=about,
        plans=plans,
    )
