"""Render the report's page and write it.

The page's template is ``report.html.j2``. Head, style, charts and script are in ``base.html.j2``,
tables and marks in ``macros.html.j2``. The page of a comparison uses both too, through
:func:`document`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from lightning_mp.errors import Faults, PlanError, counted
from lightning_mp.record.report.charts import dash, draw, lay_out, moment, plain
from lightning_mp.record.report.load import Run, is_run, load
from lightning_mp.record.report.verdict import figures, state, suggested_pins, summary, verdict
from lightning_mp.record.run_folder import REPORT, atomic_write

RunDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_HERE = Path(__file__).parent
_DOTS = re.compile(r"(?<=[a-z])\.|\.(?=[a-z])", re.IGNORECASE)


def write_report(run_dirs: RunDirs, output: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, or of several compared, as one HTML file, and return its path.

    With ``output=None`` the file is ``report.html`` in the run's folder. For several runs it is in
    the closest folder that holds them all. The file opens without a network, and is written whole
    or not at all.

    Raises:
        PlanError: a folder holds no run, or ``output`` is a folder.
        OSError: the file cannot be written.
    """
    runs = load_runs(run_dirs)
    target = Path(output) if output is not None else Path(os.path.commonpath([run.path for run in runs])) / REPORT
    if target.is_dir():
        raise PlanError.of(f"output={str(target)!r} is a folder", f"write {str(target / REPORT)!r}", "report")
    atomic_write(target, document(_HERE / "report.html.j2", **_content(runs)))
    return target


def summaries(run_dirs: RunDirs) -> list[dict[str, Any]]:
    """Return the verdict and the figures of each run, as plain values.

    Raises:
        PlanError: a folder holds no run.
    """
    return [summary(run) for run in load_runs(run_dirs)]


def load_runs(run_dirs: RunDirs) -> list[Run]:
    """Return the runs of the folders. A folder that is given twice is read once.

    A run's name is the end of its path, as long as needed to differ from the other runs.

    Raises:
        PlanError: no folder is given, or a folder holds no run. If runs are below it, the message
            names them.
    """
    given = [run_dirs] if isinstance(run_dirs, (str, os.PathLike)) else run_dirs
    with Faults("report") as faults:
        if not given:
            faults.add("no folder was named", fix="name that of a run, or several")
        for folder in (Path(item) for item in given if not is_run(Path(item))):
            below = sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
            fix = f"name the runs in it: {' '.join(map(str, below))}" if below else "name one that has a metrics.jsonl"
            faults.add(f"{str(folder)!r} {'holds no run' if folder.exists() else 'does not exist'}", fix=fix)
    folders, parts = list(dict.fromkeys(Path(item).resolve() for item in given)), 1
    # this ends, because different paths differ in some part
    while len({folder.parts[-parts:] for folder in folders}) < len(folders):
        parts += 1
    return [load(folder, "/".join(folder.parts[-parts:])) for folder in folders]


def document(template: Path, *, title: str, payload: Mapping[str, Any], **context: Any) -> str:
    """Return the HTML of a page in the report's style, which loads nothing from a network.

    ``template`` extends ``base.html.j2``. ``payload`` has the keys ``charts``, each from
    :func:`~lightning_mp.record.report.charts.draw`, and ``steps``, the first and the last. ``runs``
    in ``context`` are objects with a ``name``. Several runs get a legend above the charts.
    """
    return _template(template).render({"runs": (), **context, "title": title, "payload": payload})


@lru_cache
def _template(path: Path) -> Any:
    """Return the Jinja template at ``path``, with the filters and globals that the pages use."""
    loader = FileSystemLoader([path.parent, _HERE])
    environment: Any = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters |= {
        "plain": plain,
        "moment": moment,
        "counted": counted,
        "dash": dash,
        # a line may break after a dot in a name, but not in a number
        "dotted": lambda text: Markup(_DOTS.sub(".<wbr>", str(escape(plain(text))))),
        "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    environment.globals |= {
        "figures": figures,
        "state": state,
        "verdict": verdict,
        "suggested_pins": suggested_pins,
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "script": (_HERE / "page.js").read_text(encoding="utf-8"),
        # plotly.js-basic-dist-min 4.1.1 of npm as it is, MIT: scatter and bar charts, a quarter of the whole library
        "plotly": (_HERE / "plotly-basic.min.js").read_text(encoding="utf-8"),
    }
    return environment.get_template(path.name)


def _content(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the variables of the report's template."""
    steps = [step for run in runs for series in run.series.values() for step in series.steps]
    steps += [event.step for run in runs for event in run.alerts]
    heading = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    alerts = [(place, event) for place, run in enumerate(runs) for event in run.alerts]
    charts = [draw(panel, runs) for panel in lay_out(runs)]
    return {
        "title": f"{heading} - training report",
        "heading": heading,
        "runs": runs,
        "numbered": list(enumerate(runs)),
        "alerts": sorted(alerts, key=lambda item: item[1].step),
        "payload": {"charts": charts, "steps": [min(steps), max(steps)] if steps else [0, 1]},
    }
