"""The report: what is read, which charts there are, and the file: one, whole, complete in itself, and safe."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from lightning_mp.errors import PlanError
from lightning_mp.record import report
from lightning_mp.record.events import Event
from lightning_mp.record.report import summaries, write_report
from lightning_mp.record.report.charts import downsample, draw, lay_out
from lightning_mp.record.report.load import Run, Series, load
from lightning_mp.record.run_folder import RunFolder
from record.report.runs import COLLAPSE, LINES, OVERFLOWS, SPIKE, about, metrics, values, write_run

SCRIPT = (Path(report.__file__).parent / "plotly-basic.min.js").read_text(encoding="utf-8")
HOSTILE = '</script><img src=x onerror="window.hurt=1"><b>&\''


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._in):
            self.text += f" {data}"


def _page(*folders: Path) -> str:
    return write_report(list(folders)).read_text(encoding="utf-8")


def _text(*folders: Path) -> str:
    return re.sub(r"\s+", " ", _Elements(_page(*folders)).text)


def _charts(*runs: Run) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for chart in (draw(panel, runs) for panel in lay_out(runs))}


def _curves(chart: dict[str, Any]) -> dict[str, list[float | None]]:
    return {line["name"]: line["y"] for line in chart["lines"]}


def test_a_whole_run_is_read_whole(tmp_path: Path) -> None:
    run = load(write_run(tmp_path), "run")
    assert run.faults == []
    assert set(run.series) == {name for row in metrics(tmp_path) for name in row} - {"step"}
    for name, series in run.series.items():
        assert series.values == values(tmp_path, name)
    assert run.series["val/loss"].steps == [10, 20, 30]
    assert [event.step for event in run.events] == [*OVERFLOWS, SPIKE, COLLAPSE]
    assert [event.step for event in run.alerts] == [SPIKE, COLLAPSE]
    assert run.about["status"] == "finished"
    assert run.audit is not None
    assert len(run.audit) == 2
    assert run.last_step == 30


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "run.json", "audit.json"])
def test_a_file_that_is_cut_off_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-5])
    (fault,) = load(tmp_path, "run").faults
    assert fault.startswith(f"{name} is damaged")
    assert fault in _text(tmp_path)


def test_a_run_has_a_chart_for_everything_it_recorded(tmp_path: Path) -> None:
    charts = _charts(load(write_run(tmp_path), "run"))
    assert {title: list(_curves(chart)) for title, chart in charts.items()} == {k: list(v) for k, v in LINES.items()}
    assert _curves(charts["Loss"])["training"] == values(tmp_path, "train/loss")


def test_alerts_are_marked_on_every_chart_and_overflows_on_none(tmp_path: Path) -> None:
    for chart in _charts(load(write_run(tmp_path), "run")).values():
        marks = {mark["severity"]: mark for mark in chart["marks"]}
        assert {severity: mark["x"] for severity, mark in marks.items()} == {"error": [COLLAPSE], "warning": [SPIKE]}
        assert "step 12: grad norm spike in rank 1, module &#39;net.3&#39; (ratio 101.5)" in marks["warning"]["text"]
        assert chart["unit"]


def test_compared_runs_have_a_line_each_with_a_colour_and_a_dash(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path / name, shift=shift), name) for name, shift in (("one", 0.0), ("two", 0.5))]
    charts = _charts(*runs)
    for chart in charts.values():
        curves = chart["lines"]
        assert [curve["name"] for curve in curves] == ["one", "two"]
        assert [curve["run"] for curve in curves] == [0, 1]
        assert [curve["colour"] for curve in curves] == ["run-0", "run-1"]
        assert curves[0]["dash"] != curves[1]["dash"]
    assert {"Loss, training", "Loss, validation", "Memory, peak", "Memory, allocated"} <= set(charts)
    assert {"Gradient norm", "Learning rate"} <= set(charts)
    assert _curves(charts["Loss, validation"])["two"] == values(tmp_path / "two", "val/loss")


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400), st.integers(8, 60)
)
def test_thinning_keeps_extremes_ends_gaps_and_the_order(values: list[float | None], limit: int) -> None:
    series = Series(list(range(len(values))), values)
    thinned = downsample(series, limit)
    assert len(thinned.values) <= limit
    assert thinned.steps == sorted({0, *thinned.steps, len(values) - 1})
    assert thinned.values == [values[step] for step in thinned.steps]
    for choose in (min, max):
        assert choose(thinned.finite, default=None) == choose(series.finite, default=None)
    assert (None in thinned.values) == (None in values)


NAN = {"train/loss": math.nan, "health/grad_norm": math.inf}
HEAD = "under half precision run 'head' in fp32: pins={'head': 'fp32'}, before any other pin"
#: readings of the steps from 0 on, events, what run.json says, and the verdict
VERDICTS: dict[str, tuple[list[dict[str, float]], list[Event], dict[str, Any], str]] = {
    "fell": ([{"train/loss": 3.0}, {"train/loss": 2.0}], [], {}, "The loss fell from 3 to 2; no alerts."),
    "rose": ([{"train/loss": 2.0}, {"train/loss": 3.0}], [], {}, "The loss rose from 2 to 3; no alerts."),
    "once": ([{"train/loss": 2.0}], [], {}, "The loss was 2; no alerts."),
    "lost": (
        [{"train/loss": 3.0}, {"train/loss": 2.0}, NAN],
        [],
        {},
        "The loss fell from 3 to 2, then it was not finite; no alerts.",
    ),
    "never": ([NAN, NAN], [], {}, "No loss was finite; no alerts."),
    "skipped": (
        [{**NAN, "health/skipped_steps": 1}, {**NAN, "health/skipped_steps": 2}],
        [
            Event(step=0, kind="nonfinite_loss", severity="warning", module="head", cause="too big", advice=HEAD),
            Event(step=1, kind="scale_collapse", severity="error"),
        ],
        {},
        "It trained nothing: all of its 2 steps were skipped. First sign, at step 0: nonfinite loss in head, too big.",
    ),
    "failed": ([{"train/loss": 2.0}], [], {"status": "failed"}, "It failed at step 0; no alerts."),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_it_says_first_what_to_conclude(name: str, tmp_path: Path) -> None:
    readings, events, changes, said = VERDICTS[name]
    folder = RunFolder.open(tmp_path, writer="test", owner=object())
    for step, reading in enumerate(readings):
        folder.metrics(step, reading)
    for event in events:
        folder.event(event)
    folder.write("run.json", about(**changes))
    folder.close("test")
    (found,) = summaries(tmp_path)
    assert found["verdict"] == said
    assert said in re.sub(r"\s+", " ", _Elements(_page(tmp_path)).text)[:700]
    if name == "skipped":
        assert (found["suggested_pins"], found["skipped_steps"]) == ("pins={'head': 'fp32'}", 2)
        charts = {panel.title: draw(panel, [load(tmp_path, "run")]) for panel in lay_out([load(tmp_path, "run")])}
        assert [charts[title]["lines"][0]["y"] for title in ("Loss", "Gradient norm")] == [[None, None]] * 2


def test_it_is_one_file_in_the_runs_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert write_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    assert write_report(str(folder), tmp_path / "mine.html") == tmp_path / "mine.html"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine.html"}


def test_several_are_compared_in_the_folder_that_holds_them_all(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert write_report([one, two, one]) == tmp_path / "report.html"
    text = _text(one, two)
    assert "2 runs compared" in text
    assert "a/run" in text
    assert "b/run" in text


def test_nothing_in_it_comes_from_elsewhere(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    assert SCRIPT in page
    own = page.replace(SCRIPT, "")
    assert "http:" not in own
    assert "https:" not in own
    for name, attributes in _Elements(page).found:
        assert name not in ("iframe", "object", "embed", "base", "img")
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    (policy,) = [a["content"] for _, a in _Elements(page).found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'none'" in policy


def test_figures_events_audit_machine_and_plan_are_in_it(tmp_path: Path) -> None:
    text = _text(write_run(tmp_path))
    for part in (
        "final loss 1.278 step 30",
        "best val loss 2.7 step 30",
        "median throughput 1,003 tokens/s",
        "peak memory 2.5 GiB",
        "skipped steps 3 in total",
        "alerts 2 1 error",
        "grad norm spike rank 1 net. 3 ratio 101.5",
        "activations overflow pin the module stop",
        "1 module of 2 not as declared",
        "NVIDIA H200",
        "memory 141.0 GiB",
        "torch 2.13.0",
        "DDPStrategy",
        '"*norm*": "fp32"',
        "ended 2 Jan 2026 03:04 UTC",
    ):
        assert part in text, part


def test_markup_from_files_is_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "plain", module=HOSTILE, error=HOSTILE, status="failed", strategy=HOSTILE)
    (folder / "run.json").write_text(json.dumps(about(machine={HOSTILE: HOSTILE}, plan={HOSTILE: HOSTILE}, at=HOSTILE)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, f"health/{HOSTILE}": 2.0}) + "\n")
    elements = _Elements(_page(folder))
    assert not any(name in ("img", "b") or "onerror" in attributes for name, attributes in elements.found)
    assert elements.text.count("onerror") >= 5
    assert sum(name == "script" for name, _ in elements.found) == 3


def test_folders_that_hold_no_run_are_refused_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs" / "one")
    with pytest.raises(PlanError) as caught:
        write_report([tmp_path / "empty", tmp_path / "gone", tmp_path / "file", tmp_path / "runs"])
    given = [fault.problem for fault in caught.value.faults]
    for text, reason in zip(given, ("holds no run", "does not exist", "holds no run", "holds no run"), strict=True):
        assert reason in text
    assert caught.value.faults[3].fix == f"name the runs in it: {tmp_path / 'runs' / 'one'}"
    assert not list(tmp_path.rglob("*.html"))


def _command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_prints_figures_and_writes_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (found,) = json.loads(_command(folder, "--json").output)
    assert found["skipped_steps"] == len(OVERFLOWS)
    assert found["final_loss"] == pytest.approx(values(folder, "train/loss")[-1])
    assert not (folder / "report.html").exists()


def test_the_command_says_where_the_file_is(tmp_path: Path) -> None:
    result = _command(write_run(tmp_path / "run"))
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'run' / 'report.html'}\n")
    result = _command(tmp_path / "run", write_run(tmp_path / "other"), "--output", tmp_path / "both.html")
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'both.html'}\n")
