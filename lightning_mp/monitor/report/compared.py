"""What only compared runs have: how each stands to the first, and which dtypes each computed in."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.markup import Html, join, tag

#: derived here: the loss minus the first run's at the same step, smoothed
LOSS_DIFFERENCE = "compared/loss_difference"
_SMOOTHING = 0.85
_MINUS = "\N{MINUS SIGN}"


def smooth(values: Sequence[float]) -> list[float]:
    """An exponential mean that starts unbiased; what is not finite is left out of it and stays a gap."""
    result: list[float] = []
    total = weight = 0.0
    for value in values:
        if math.isfinite(value):
            total = _SMOOTHING * total + (1 - _SMOOTHING) * value
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(total / weight if math.isfinite(value) else math.nan)
    return result


def add_differences(runs: Sequence[Run]) -> None:
    """Give every run but the first its ``LOSS_DIFFERENCE``, over the steps that both have a finite loss of."""
    first = _losses(runs[0])
    for run in runs[1:]:
        pairs = [(step, loss - first[step]) for step, loss in _losses(run).items() if step in first]
        if pairs:
            # below a millionth it is rounding, for which an axis would have labels as long as the chart is wide
            values = [round(value, 6) for value in smooth([gap for _, gap in pairs])]
            run.series[LOSS_DIFFERENCE] = Series([step for step, _ in pairs], list[float | None](values))


def difference(run: Run) -> Html:
    """The mean of the loss difference over the second half of the steps, and the band that it kept to there."""
    found = run.series.get(LOSS_DIFFERENCE)
    if found is None:
        return Html("-")
    late = found.finite[len(found.finite) // 2 :]
    band = f"{_signed(min(late))} to {_signed(max(late))}"
    return join([_signed(statistics.fmean(late)), tag("span", band, class_="pair quiet")])


def speed_up(run: Run, first: Run) -> str:
    """The ratio of the median throughputs."""
    for name in (metric_names.TOKENS_PER_S, metric_names.SAMPLES_PER_S):
        ours, base = (one.series[name].finite if name in one.series else [] for one in (run, first))
        if ours and base and statistics.median(base):
            return f"{statistics.median(ours) / statistics.median(base):.2f}x"
    return "-"


def coverage(runs: Sequence[Run]) -> Html:
    """A bar a run: its modules by the dtype that the audit saw them compute in."""
    counts = {run.name: _computed(run) for run in runs if run.audit is not None}
    if not any(counts.values()):
        return Html("")
    bars = [
        tag("div", tag("span", name, class_="name"), tag("div", *map(_part, found.items()), class_="cover"))
        for name, found in counts.items()
    ]
    note = "Modules by the dtype that they computed in, as the audit of the first steps saw it."
    return join(
        [tag("h2", "What each plan covers"), tag("div", *bars, class_="covers"), tag("p", note, class_="quiet")]
    )


def _part(item: tuple[str, int]) -> Html:
    dtype, count = item
    text = f"{dtype} {count}"
    return tag("span", text, class_=f"dtype {dtype.split()[0]}", style=f"flex: {count}", title=text)


def _computed(run: Run) -> dict[str, int]:
    rows = (run.audit or {}).get("rows", [])
    dtypes = [str(row["compute"]) for row in rows if row.get("compute")]
    return dict(sorted(Counter(dtypes).items()))


def _losses(run: Run) -> dict[int, float]:
    found = run.series.get(metric_names.LOSS)
    pairs = zip(found.steps, found.values, strict=True) if found is not None else []
    return {step: value for step, value in pairs if value is not None}


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", _MINUS) if abs(value) >= 5e-4 else "0.000"
