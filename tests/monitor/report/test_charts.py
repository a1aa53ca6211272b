"""Which charts there are, what is on them, and what is said about what is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.monitor.report.charts import MAX_LINES, MAX_OTHERS, draw, lay_out, thin
from lightning_mp.monitor.report.load import Run, Series, load
from monitor.report.runs import COLLAPSE, OVERFLOWS, SPIKE, values, write_run

Values = Mapping[str, list[float | None]]


def _run(found: Values, name: str = "run") -> Run:
    run = Run(Path(name), name)
    run.series = {key: Series(list(range(1, len(row) + 1)), row) for key, row in found.items()}
    return run


def _charts(*runs: Run) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for chart in (draw(panel, runs) for panel in lay_out(runs)[0])}


def _traces(chart: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [trace for trace in chart["data"] if trace["meta"]["role"] == role]


def _curves(chart: dict[str, Any]) -> dict[str, list[float | None]]:
    return {trace["name"]: trace["y"] for trace in _traces(chart, "curve")}


def test_a_run_has_a_chart_for_everything_it_recorded(tmp_path: Path) -> None:
    charts = _charts(load(write_run(tmp_path), "run"))
    lines = {title: list(_curves(chart)) for title, chart in charts.items()}
    assert lines == {
        "Loss": ["training", "validation"],
        "Gradient norm": ["all parameters", "head"],
        "Parameter norm": ["all parameters"],
        "Update-to-weight ratio": ["all parameters"],
        "Loss scale": ["loss scale"],
        "Skipped steps": ["in total", "in a row"],
        "Learning rate": ["learning rate"],
        "Tokens per second": ["tokens"],
        "Samples per second": ["samples"],
        "Model FLOPs utilisation": ["MFU"],
        "Memory": ["peak", "allocated", "reserved"],
        "Growth counter of the loss scale": ["growth counter"],
    }
    assert _curves(charts["Loss"])["training"] == values(tmp_path, "train/loss")
    assert charts["Loss"]["latest"] == "last 1.278"
    assert charts["Loss scale"]["latest"] == "last 2¹⁷"
    assert charts["Model FLOPs utilisation"]["latest"] == "last 31.0%"


def test_axes_say_what_they_measure_and_the_scale_counts_in_powers_of_two(tmp_path: Path) -> None:
    charts = _charts(load(write_run(tmp_path), "run"))
    for chart in charts.values():
        assert chart["layout"]["xaxis"]["title"]["text"] == "step"
        assert chart["layout"]["yaxis"]["title"]["text"] == chart["unit"] != ""
    assert charts["Memory"]["unit"] == "GiB"
    scale = charts["Loss scale"]["layout"]["yaxis"]
    assert scale["type"] == "log"
    assert 2.0**17 in scale["tickvals"]
    assert scale["ticktext"][scale["tickvals"].index(2.0**17)] == "2<sup>17</sup>"
    assert charts["Gradient norm"]["layout"]["yaxis"]["type"] == "log"
    assert charts["Memory"]["layout"]["yaxis"]["rangemode"] == "tozero"


def test_alerts_are_marked_on_every_chart_and_overflows_where_they_belong(tmp_path: Path) -> None:
    for title, chart in _charts(load(write_run(tmp_path), "run")).items():
        (warning,) = [trace for trace in _traces(chart, "warning") if trace["mode"] == "markers"]
        (error,) = [trace for trace in _traces(chart, "error") if trace["mode"] == "markers"]
        assert (warning["x"], error["x"]) == ([SPIKE], [COLLAPSE])
        assert "step 12: grad norm spike in rank 1, module &#39;net.3&#39; (ratio 101.5)" in warning["text"]
        assert warning["marker"]["symbol"] != error["marker"]["symbol"]
        infos = [trace["x"] for trace in _traces(chart, "info")]
        assert infos == ([list(OVERFLOWS)] if title in ("Loss scale", "Skipped steps") else [])


def test_a_reading_that_is_not_finite_is_a_gap_with_a_cross(tmp_path: Path) -> None:
    charts = _charts(load(write_run(tmp_path), "run"))
    (gap,) = _traces(charts["Loss"], "gap")
    assert gap["x"] == list(OVERFLOWS)
    assert gap["marker"]["symbol"] == "x-thin"
    assert all(not trace["connectgaps"] for trace in _traces(charts["Loss"], "curve"))
    assert len(_traces(charts["Update-to-weight ratio"], "gap")[0]["x"]) == 3  # 0 has no place on a logarithmic axis


def test_a_logarithmic_axis_gives_way_where_nothing_is_positive() -> None:
    chart = _charts(_run({"health/grad_norm": [0.0, 0.0]}))["Gradient norm"]
    assert "type" not in chart["layout"]["yaxis"]
    assert _curves(chart) == {"all parameters": [0.0, 0.0]}


def test_a_reading_between_two_gaps_is_a_dot() -> None:
    found = [1.0, None, 2.0, None, *[3.0] * 100]
    (trace,) = _traces(_charts(_run({"train/loss": found}))["Loss"], "curve")
    assert [index for index, size in enumerate(trace["marker"]["size"]) if size] == [0, 2]


def test_the_line_breaks_where_the_steps_go_back() -> None:
    run = Run(Path("run"), "run", series={"train/loss": Series([1, 2, 3, 2, 3], [5.0, 4.0, 9.0, 4.0, 3.0])})
    chart = _charts(run)["Loss"]
    assert _traces(chart, "curve")[0]["x"] == [1, 2, 3, None, 2, 3]


def test_unknown_readings_have_charts_of_their_own_names_of_one_family_share_one() -> None:
    charts = _charts(_run({"my/accuracy": [0.1], "fp8/scale/a": [1.0], "fp8/scale/b": [2.0]}))
    assert {title: list(_curves(chart)) for title, chart in charts.items()} == {
        "my/accuracy": ["my/accuracy"],
        "fp8/scale": ["a", "b"],
    }


def test_there_are_not_more_charts_or_lines_than_one_can_read_and_the_rest_is_counted() -> None:
    many: Values = {f"reading{number}": [1.0] for number in range(MAX_OTHERS + 3)}
    panels, notes = lay_out(
        [_run({**many, **{f"health/grad_norm/{number}": [1.0] for number in range(MAX_LINES + 2)}})]
    )
    assert len(panels) == MAX_OTHERS + 1
    assert "3 more readings than there is room for: not drawn" in notes
    assert "Gradient norm: 2 more lines than can be told apart" in notes


def test_compared_runs_have_a_line_each_with_a_colour_and_a_dash(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path / name, shift=shift), name) for name, shift in (("one", 0.0), ("two", 0.5))]
    charts = _charts(*runs)
    for chart in charts.values():
        curves = _traces(chart, "curve")
        assert [curve["name"] for curve in curves] == ["one", "two"]
        assert [curve["meta"]["run"] for curve in curves] == [0, 1]
        assert [curve["meta"]["colour"] for curve in curves] == ["run-0", "run-1"]
        assert curves[0]["line"]["dash"] != curves[1]["line"]["dash"]
    assert {"Loss", "Validation loss", "Peak memory", "Allocated memory"} <= set(charts)
    assert _curves(charts["Validation loss"])["two"] == values(tmp_path / "two", "val/loss")
    grouped = "Gradient norm: compared for 'all parameters' only; its other lines are in each run's own report"
    assert grouped in lay_out(runs)[1]


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400), st.integers(8, 60)
)
def test_thinning_keeps_extremes_ends_gaps_and_the_order(values: list[float | None], limit: int) -> None:
    series = Series(list(range(len(values))), values)
    thinned = thin(series, limit)
    assert len(thinned.values) <= limit
    assert thinned.steps == sorted({0, *thinned.steps, len(values) - 1})
    assert thinned.values == [values[step] for step in thinned.steps]
    for choose in (min, max):
        assert choose(thinned.finite, default=None) == choose(series.finite, default=None)
    assert (None in thinned.values) == (None in values)


def test_a_spike_of_one_step_among_a_million_stays() -> None:
    values: list[float | None] = [1.0] * 1_000_000
    values[654_321] = 9.0
    thinned = thin(Series(list(range(len(values))), values))
    assert len(thinned.values) <= 3000
    assert thinned.steps[thinned.values.index(9.0)] == 654_321
