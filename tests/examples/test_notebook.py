"""The notebook runs from its first cell to its last, and shows what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.examples import FOLDER
from support.launching import environment

pytestmark = pytest.mark.slow

NOTEBOOK = FOLDER / "plan_to_report.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells after a run in an empty folder, by the interpreter of the tests."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = folder / NOTEBOOK.name
    shutil.copy(NOTEBOOK, notebook)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", str(notebook)]
    run = subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    assert (folder / "run" / "report.html").stat().st_size > 1_000_000
    return _code_cells(notebook)


def _code_cells(path: Path) -> list[Any]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def _printed(cell: Any, name: str = "stdout") -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == name)


def _html(cell: Any) -> str:
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in cell["outputs"])


def test_a_plan_shows_its_table(cells: list[Any]) -> None:
    assert "<table" in _html(cells[0])
    assert "*ln_*" in _html(cells[0])


def test_it_tells_what_the_plan_means_for_the_model(cells: list[Any]) -> None:
    assert re.search(r"\*ln_\*.*5 modules", _printed(cells[1]))


def test_the_doctor_finds_nothing(cells: list[Any]) -> None:
    assert _printed(cells[2]).strip() == "Nothing found."


def test_it_trains_in_fp16_and_skips_the_steps_that_overflow(cells: list[Any]) -> None:
    found = re.search(r"loss (\S+), (\d+) steps skipped, scale", _printed(cells[3]))
    assert found is not None, _printed(cells[3], "stderr")
    assert float(found[1]) < 5.8  # 6.24 is chance
    assert int(found[2]) >= 1


def test_all_ran_as_declared_and_the_report_is_shown(cells: list[Any]) -> None:
    assert "all as declared" in _printed(cells[4])
    assert "run/report.html" in _html(cells[5])


def test_it_is_kept_without_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in _code_cells(NOTEBOOK))
    assert Path(NOTEBOOK).stat().st_size < 10_000
