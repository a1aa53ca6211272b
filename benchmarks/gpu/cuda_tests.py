"""The tests that need a GPU, the most important file first, each outcome noted as it comes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.part import Figures

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "gpu"
#: a step's numbers, that nothing waits, sharding, TF32, then what watches; other files come after these
ORDER = ("steps", "waits", "sharded", "tf32", "checkpointing", "nonfinite_guard", "health", "audit", "doctor", "fp8")
#: on a CPU every test skips itself
_QUICK = ("steps",)


class _Outcomes:
    """A pytest plugin that writes down each outcome, so that a run that is ended early has said something."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._files: dict[str, dict[str, int]] = {}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test's call, or its setup where that skipped or failed."""
        if report.when == "call" or report.outcome != "passed":
            self._count(report)

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported as a failure of its own."""
        if report.outcome == "failed":
            self._count(report)

    def _count(self, report: Any) -> None:
        counts = self._files.setdefault(Path(report.nodeid.split("::")[0]).stem, {})
        counts[report.outcome] = counts.get(report.outcome, 0) + 1
        if report.outcome == "failed":
            self._failed.append(f"{report.nodeid.rsplit('/', 1)[-1]}: {_last_line(report.longreprtext)}")
        self._figures.update(files=self._files, failed=self._failed)
        self._figures.write()


def _last_line(text: str) -> str:
    lines = [line[2:] for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.strip().splitlines() or [""])[0].strip()[:200]


def tests(figures: Figures, *, quick: bool) -> int:
    """Run them; pytest's exit status."""
    found = sorted(FOLDER.glob("test_*_gpu.py"), key=_rank)
    files = [file for file in found if not quick or _name(file) in _QUICK]
    # no plugin that happens to be installed may stop the tests; that of the time limit is loaded if it is there
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    timeout = ["-p", "pytest_timeout"] if find_spec("pytest_timeout") else ["-W", "ignore:Unknown config option"]
    options = ["-q", *timeout, "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "--maxfail=40"]
    options.append("--continue-on-collection-errors")
    return int(pytest.main([*options, *map(str, files)], plugins=[_Outcomes(figures)]))


def _name(file: Path) -> str:
    return file.stem.removeprefix("test_").removesuffix("_gpu")


def _rank(file: Path) -> int:
    return ORDER.index(_name(file)) if _name(file) in ORDER else len(ORDER)
