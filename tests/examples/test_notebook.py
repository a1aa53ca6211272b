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

from support.launching import environment

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "plan_to_report.ipynb"


def _code_cells(path: Path) -> list[Any]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def _printed(cell: Any) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def _html(cell: Any) -> str:
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in cell["outputs"])


@pytest.mark.slow
def test_it_shows_the_plan_trains_in_fp16_and_shows_the_report(tmp_path: Path) -> None:
    notebook = tmp_path / NOTEBOOK.name
    shutil.copy(NOTEBOOK, notebook)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", str(notebook)]
    run = subprocess.run(command, env=environment(), capture_output=True, encoding="utf-8", check=False, timeout=150)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000
    cells = _code_cells(notebook)
    assert "<table" in _html(cells[0])
    assert re.search(r"\*ln_\*.*5 modules", _printed(cells[1]))
    assert _printed(cells[2]).strip() == "Nothing found."
    found = re.search(r"loss (\S+), (\d+) steps skipped, scale", _printed(cells[3]))
    assert found is not None
    assert float(found[1]) < 5.8  # 6.24 is chance
    assert int(found[2]) >= 1
    assert "all as declared" in _printed(cells[4])
    assert "run/report.html" in _html(cells[5])


def test_it_is_kept_without_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in _code_cells(NOTEBOOK))
