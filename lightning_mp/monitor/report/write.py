"""One HTML file from the folders of one or several runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.monitor.report.compared import add_differences
from lightning_mp.monitor.report.load import Run, is_run, load
from lightning_mp.monitor.report.page import render
from lightning_mp.monitor.run_folder import REPORT

RunDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def write_report(
    run_dirs: RunDirs,
    output: str | os.PathLike[str] | None = None,
    *,
    title: Sequence[str] = (),
    not_run: Mapping[str, str] | None = None,
) -> Path:
    """Write one HTML file on a run, or on several compared, and return where it is.

    ``output=None`` is ``report.html`` in the run's folder, with several in the folder that holds them all. The file
    opens without a network and is there whole or not at all. For several runs, ``title`` is the heading and a line
    below it, and ``not_run`` names those that are missing, with the reason.

    Raises:
        PlanError: a folder holds no run, or ``output`` is a folder.
        MissingExtraError: plotly is not installed.
        OSError: the file cannot be written.
    """
    folders = find_runs(run_dirs)
    target = Path(output) if output is not None else Path(os.path.commonpath([*folders])) / REPORT
    if target.is_dir():
        fault = Fault(f"output={str(target)!r}, a folder", "the name of a file", f"write {str(target / REPORT)!r}")
        raise PlanError([fault], "report")
    put(target, render(load_runs(folders), title=title, not_run=not_run))
    return target


def put(target: Path, page: str) -> None:
    """Write a page, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    beside = target.with_name(f".{target.name}.tmp")
    try:
        # A file may hold half a character; the page is then written with a question mark in its place.
        beside.write_bytes(page.encode("utf-8", errors="replace"))
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error


def find_runs(run_dirs: RunDirs) -> list[Path]:
    """The folders, resolved, each once.

    Raises:
        PlanError: no folder is given, or one holds no run; names the runs below it where there are any.
    """
    given = [run_dirs] if isinstance(run_dirs, (str, os.PathLike)) else run_dirs
    with Faults("report") as faults:
        if not given:
            faults.add("no folder", "the folder of a run, or several", "name one")
        for folder in (Path(item) for item in given if not is_run(Path(item))):
            allowed = "the folder of a run, with its metrics.jsonl"
            faults.add(f"{str(folder)!r}, {_lack(folder)}", allowed, _advice(folder))
    return list(dict.fromkeys(Path(item).resolve() for item in given))


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every folder; a run is named by as much of the end of its path as distinguishes it from the others."""
    runs = [load(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    add_differences(runs)
    return runs


def _lack(folder: Path) -> str:
    if folder.is_dir():
        return "which holds no run"
    return "which is a file" if folder.exists() else "which does not exist"


def _advice(folder: Path) -> str:
    below = sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
    if below:
        return f"name the runs in it: {' '.join(map(str, below[:6]))}{' …' if len(below) > 6 else ''}"
    return "name the run_dir of a monitor (by default TrainingHealth writes to the logger's folder)"


def _names(folders: Sequence[Path], parts: int = 1) -> list[str]:
    """The last part of each path, and more parts where two would be called the same."""
    names = ["/".join(folder.parts[-parts:]) for folder in folders]
    # Different paths differ in some part, so this ends.
    return names if len(set(names)) == len(names) else _names(folders, parts + 1)
