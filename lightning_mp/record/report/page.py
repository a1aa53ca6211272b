"""The report's page: what its template shows, and the file it becomes.

The page is ``report.html.j2``. Its head, style, charts and script are ``base.html.j2``, and its tables and marks
``macros.html.j2``: another page of the package (a comparison's) extends and imports them, and is made by
:func:`document`.
"""

from __future__ import annotations

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
from lightning_mp.record.report.charts import dash, draw, figures, lay_out, moment, plain, state
from lightning_mp.record.report.load import Run, is_run, load
from lightning_mp.record.report.verdict import compared, suggested_pins, summary, verdict
from lightning_mp.record.run_folder import REPORT

RunDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_HERE = Path(__file__).parent
_DOTS = re.compile(r"(?<=[a-z])\.|\.(?=[a-z])", re.IGNORECASE)


def write_report(run_dirs: RunDirs, output: str | os.PathLike[str] | None = None) -> Path:
    """Write one HTML file on a run, or on several compared, and return where it is.

    ``output=None`` is ``report.html`` in the run's folder, with several in the folder that holds them all. The file
    opens without a network and is there whole or not at all.

    Raises:
        PlanError: a folder holds no run, or ``output`` is a folder.
        OSError: the file cannot be written.
    """
    folders = find_runs(run_dirs)
    target = Path(output) if output is not None else Path(os.path.commonpath([*folders])) / REPORT
    if target.is_dir():
        raise PlanError.of(f"output={str(target)!r} is a folder", f"write {str(target / REPORT)!r}", "report")
    atomic_write(target, document(_HERE / "report.html.j2", **_content(load_runs(folders))))
    return target


def summaries(run_dirs: RunDirs) -> list[dict[str, Any]]:
    """The verdict and the figures of each run, as plain values.

    Raises:
        PlanError: a folder holds no run.
    """
    return [summary(run) for run in load_runs(find_runs(run_dirs))]


def atomic_write(target: Path, page: str) -> None:
    """Write a page, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    part = target.with_name(f".{target.name}.tmp")
    try:
        # A file may hold half a character; the page is then written with a question mark in its place.
        part.write_bytes(page.encode("utf-8", errors="replace"))
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error


def find_runs(run_dirs: RunDirs) -> list[Path]:
    """The folders, resolved, each once.

    Raises:
        PlanError: no folder is given, or one holds no run; names the runs below it where there are any.
    """
    given = [run_dirs] if isinstance(run_dirs, (str, os.PathLike)) else run_dirs
    with Faults("report") as faults:
        if not given:
            faults.add("no folder was named", fix="name that of a run, or several")
        for folder in (Path(item) for item in given if not is_run(Path(item))):
            below = sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
            fix = f"name the runs in it: {' '.join(map(str, below))}" if below else "name one that has a metrics.jsonl"
            faults.add(f"{str(folder)!r} {'holds no run' if folder.exists() else 'does not exist'}", fix=fix)
    return list(dict.fromkeys(Path(item).resolve() for item in given))


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every folder; a run is named by as much of the end of its path as distinguishes it from the others."""
    parts = 1
    # Different paths differ in some part, so this ends.
    while len({folder.parts[-parts:] for folder in folders}) < len(folders):
        parts += 1
    return [load(folder, "/".join(folder.parts[-parts:])) for folder in folders]


def document(template: Path, *, title: str, payload: Mapping[str, Any], **context: Any) -> str:
    """A page in the report's style that fetches nothing: ``template`` extends ``base.html.j2``.

    ``payload`` is what the page's script draws: ``charts`` (each of :func:`~lightning_mp.record.report.charts.draw`),
    ``steps`` (the first and the last). ``runs`` in ``context`` are objects with a ``name``; several
    have a legend above the charts.
    """
    context = {"runs": (), **context, "title": title, "payload": payload}
    return _template(template).render(context)


@lru_cache
def _template(path: Path) -> Any:
    found: Any = Environment(
        loader=FileSystemLoader([path.parent, _HERE]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False}
    found.filters |= {"plain": plain, "moment": moment, "counted": counted, "dash": dash}
    # a line may break after the dots of a name, and not of a number
    found.filters["dotted"] = lambda text: Markup(_DOTS.sub(".<wbr>", str(escape(plain(text)))))
    found.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    found.globals |= {
        "figures": figures,
        "state": state,
        "verdict": verdict,
        "compared": compared,
        "suggested_pins": suggested_pins,
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "script": (_HERE / "page.js").read_text(encoding="utf-8"),
        # plotly.js-basic-dist-min 4.1.1 of npm as it is, MIT: scatter and bar charts, a quarter of the whole library
        "plotly": (_HERE / "plotly-basic.min.js").read_text(encoding="utf-8"),
    }
    return found.get_template(path.name)


def _content(runs: Sequence[Run]) -> dict[str, Any]:
    steps = [step for run in runs for series in run.series.values() for step in series.steps]
    steps += [event.step for run in runs for event in run.alerts]
    heading = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    events = sorted(
        ((place, event) for place, run in enumerate(runs) for event in run.events), key=lambda item: item[1].step
    )
    return {
        "title": f"{heading} - training report",
        "heading": heading,
        "runs": runs,
        "numbered": list(enumerate(runs)),
        "alerts": [item for item in events if item[1].is_alert],
        "notices": [item for item in events if not item[1].is_alert],
        "payload": {
            "charts": [draw(panel, runs) for panel in lay_out(runs)],
            "steps": [min(steps), max(steps)] if steps else [0, 1],
        },
    }
