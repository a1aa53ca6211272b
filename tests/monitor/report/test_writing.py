"""The file: one, whole, complete in itself, and safe whatever the run's files hold."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

import lightning_mp.monitor.report
from lightning_mp.errors import MissingExtraError, PlanError
from lightning_mp.monitor.report import write_report
from monitor.report.runs import about, write_run

HOSTILE = '</script><img src=x onerror="window.hurt=1"><b>&\''


class _Elements(HTMLParser):
    """Every element with its attributes, and the text outside of scripts and styles."""

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
    assert get_plotlyjs() in page
    own = page.replace(get_plotlyjs(), "")
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


def test_figures_events_findings_audit_machine_and_plan_are_in_it(tmp_path: Path) -> None:
    text = _text(write_run(tmp_path))
    for part in (
        "final loss 1.278 step 30",
        "best val loss 2.7 step 30",
        "median throughput 1,003 tokens/s",
        "peak memory 2.5 GiB",
        "skipped steps 3 in total",
        "alerts 2 1 error, 3 notices",
        "grad norm spike rank 1 net. 3 ratio 101.5",
        "activations overflow pin the module stop",
        "LMP007 TF32 is off net. 3 slow tf32='high'",
        "1 module of 2 not as declared",
        "NVIDIA H200",
        "memory 141.0 GiB",
        "torch 2.13.0",
        "DDPStrategy",
        '"*norm*": "fp32"',
        "ended 2 Jan 2026 03:04 UTC",
    ):
        assert part in text, part


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_colour_stands_out_from_the_page(mode: str) -> None:
    style = (Path(lightning_mp.monitor.report.__file__).parent / "page.css").read_text()
    blocks = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", style, re.DOTALL), strict=True))
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[mode]))
    for name in (*(f"run-{number}" for number in range(8)), "error", "warning", "info", "good"):
        assert _contrast(colours[name], colours["card"]) >= 3, name  # WCAG 2.2, 1.4.11: graphical objects
    for name in ("text", "quiet", "error", "warning", "info", "good"):
        assert _contrast(colours[name], colours["card"]) >= 4.5, name  # WCAG 2.2, 1.4.3: text


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_fp8_layers_stand_there_with_their_reasons_and_operands(tmp_path: Path) -> None:
    layers = [
        {"name": "net.0", "converted": True, "reason": None, "shape": [64, 32]},
        {"name": "net.1", "converted": False, "reason": "fallback", "shape": [64, 32]},
        {"name": "net.2", "converted": False, "reason": "size", "shape": [16, 32]},
    ]
    folder = write_run(tmp_path / "run", fp8_layers=layers)
    operand = {"flushed": 0.125, "amax": 3.5, "scale": 128.0}
    lines = [{"step": step, "layers": {"net.0": {"input": operand}, "net.1": {"gradient": operand}}} for step in (1, 2)]
    (folder / "fp8.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = " ".join(_text(folder).split()).replace("net. ", "net.")  # where a line may break
    assert "FP8, layer by layer" in text
    assert "net.0 64, 32 fp8 12.50% 3.5 128 - -" in text
    assert "net.1 64, 32 bf16: fallback - - 12.50% 3.5 128" in text
    assert "net.2 16, 32 bf16: size - - -" in text
    assert all(
        title in _page(folder) for title in ("FP8: values flushed to zero", "FP8: largest magnitudes", "FP8: scales")
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "running"}, "running"),
        ({"status": "failed", "error": "NonFiniteError: x < y"}, "The run failed: NonFiniteError: x < y"),
        ({"status": 3}, "unknown"),
    ],
)
def test_how_the_run_stands_is_at_the_top(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in _text(write_run(tmp_path, **changes))


def test_a_comparison_has_a_row_a_run(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", steps=20, shift=0.5, status="failed")
    text = _text(one, two)
    assert "one finished 30 - - 1.278 2.7 1,003 tokens/s 2.5 GiB 3 2" in text
    assert "two failed 20 +0.5 +0.5 to +0.5 1.00x 2.065 3.3 1,003 tokens/s 2.5 GiB 3 2" in text
    assert "two: The run failed" in text


def test_what_could_not_be_read_is_in_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/lo')
    (tmp_path / "audit.json").write_text("{")
    text = _text(tmp_path)
    assert "metrics.jsonl is damaged: 1 of 34 lines cannot be read" in text
    assert "audit.json is damaged and left out" in text


def test_markup_from_files_is_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "plain", module=HOSTILE, error=HOSTILE, status="failed", strategy=HOSTILE)
    (folder / "run.json").write_text(json.dumps(about(machine={HOSTILE: HOSTILE}, plan={HOSTILE: HOSTILE}, at=HOSTILE)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, HOSTILE: 1.0, f"health/grad_norm/{HOSTILE}": 2.0}) + "\n")
    elements = _Elements(_page(folder))
    assert not any(name in ("img", "b") or "onerror" in attributes for name, attributes in elements.found)
    assert elements.text.count("onerror") >= 5
    assert sum(name == "script" for name, _ in elements.found) == 3


def test_half_a_character_in_a_file_costs_that_character(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "run.json").write_text('{"status": "failed", "error": "half \\ud83d of it"}')
    assert "half ? of it" in _text(folder)


def test_folders_that_hold_no_run_are_refused_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs" / "one")
    with pytest.raises(PlanError) as caught:
        write_report([tmp_path / "empty", tmp_path / "gone", tmp_path / "file", tmp_path / "runs"])
    given = [fault.given for fault in caught.value.faults]
    for text, reason in zip(given, ("holds no run", "does not exist", "is a file", "holds no run"), strict=True):
        assert reason in text
    assert caught.value.faults[3].fix == f"name the runs in it: {tmp_path / 'runs' / 'one'}"
    assert not list(tmp_path.rglob("*.html"))


def test_nothing_to_report_on_is_refused() -> None:
    with pytest.raises(PlanError, match="no folder"):
        write_report([])


def test_an_output_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(PlanError, match="a folder"):
        write_report(folder, tmp_path)
    missing = tmp_path / "missing" / "report.html"
    with pytest.raises(OSError, match=re.escape(str(missing))):
        write_report(folder, missing)
    assert not list(tmp_path.rglob("*report.html*"))


def test_without_plotly_the_extra_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"lightning-mp\[report\]"):
        write_report(folder)
    assert not (folder / "report.html").exists()
