"""Every example runs as its docstring says, and what it prints is true."""

import ast
import difflib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import launching
from support.cells import WHOLE

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
#: how warnings are printed, Lightning's (without a category) and Python's, perhaps behind a progress bar
_WARNING = re.compile(r"\S+\.py:\d+: (?:\w*Warning: )?(.*)$", re.MULTILINE)
_SHORT = ("trainer.max_steps=30", "+trainer.enable_progress_bar=false", "data.val_batches=2")
#: nats a token of a vocabulary that nothing was learned of
BYTES, TOKENS = math.log(256), math.log(512)


def code_of(path: Path) -> tuple[str, list[str]]:
    text = path.read_text()
    first = ast.parse(text).body[0]
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None
    return docstring, text.splitlines()[first.end_lineno :]


def path_of(number: str) -> Path:
    (path,) = (path for path in FILES if path.name.startswith(number))
    return path


def _contents() -> set[Path]:
    return {path for path in FOLDER.rglob("*") if "__pycache__" not in path.parts}


def run(number: str, folder: Path, *arguments: str) -> str:
    """What an example prints that runs to its end in ``folder``; it leaves nothing beside itself."""
    before = _contents()
    ended = launching.run([sys.executable, str(path_of(number)), *arguments], folder / "log", timeout=580)
    assert ended.code == 0, ended.output
    assert _contents() == before
    return ended.output


def test_there_are_ten_and_the_readme_has_them() -> None:
    assert sorted({path.name[:2] for path in FILES}) == [f"{number:02}" for number in range(1, 11)]
    readme = (FOLDER / "README.md").read_text().splitlines()
    for path in FILES:
        docstring, code = code_of(path)
        assert docstring.splitlines()[2].split()[:2] == ["python", f"examples/{path.name}"]
        assert len(path.read_text().splitlines()) <= 60
        assert 'if __name__ == "__main__":' in code
        (row,) = (line for line in readme if line.startswith(f"| {path.name[:2]} |"))
        assert f"`python examples/{path.name[:2]}" in row


def test_02_shows_the_true_diff() -> None:
    _, before = code_of(path_of("02_fp16_before"))
    docstring, after = code_of(path_of("02_fp16_after"))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    changed = [line for line in lines if not line.startswith("@@") and line != "+"]
    assert [line[4:] for line in docstring.splitlines() if re.match(r" {4}[+-]", line)] == changed
    assert len(changed) == 5


@dataclass(frozen=True)
class Claim:
    """Patterns of what an example prints, and what has to hold of the numbers in each."""

    says: dict[str, Callable[..., bool]]
    arguments: tuple[str, ...] = ()
    #: a file that is written below the folder, and how many lines it has
    leaves: dict[str, int] = field(default_factory=dict[str, int])


CLAIMS = {
    "01": Claim({r"validation loss ([\d.]+)": lambda loss: loss < TOKENS - 1}),
    "02_fp16_after": Claim(
        {r"train loss ([\d.]+)": lambda loss: loss < BYTES / 2}, leaves={"runs/next_byte/*/metrics.jsonl": 200}
    ),
    "03": Claim(
        {
            r"rank 0 holds [\d,]+ of [\d,]+ parameters, ([\d.]+)%": lambda share: abs(share - 50) <= 2,
            r"loss after 40 steps: ([\d.]+) on two, ([\d.]+) on one; (\S+) apart": lambda two, one, apart: (
                apart < 5e-3 and abs(two - one) <= apart + 1e-4 and one < BYTES - 1.5
            ),
        }
    ),
    "04": Claim(
        {
            r"32-true: validation loss ([\d.]+) after (\d+) steps": lambda loss, steps: (
                loss < TOKENS - 0.5 and steps == 30
            ),
            r"16-mixed: validation loss ([\d.]+) after \d+ steps, loss scale (\S+),": lambda loss, scale: (
                loss < TOKENS - 0.5 and scale == 2048
            ),
        },
        ("-m", "plan=fp32,careful", "model=gpt2_tiny", *_SHORT),
        {"multirun/**/metrics.jsonl": 30},
    ),
    "05": Claim(
        {
            r"16-mixed: validation loss ([\d.]+); (\d+) steps, (\d+) skipped": lambda loss, applied, skipped: (
                loss < TOKENS - 1 and (applied, skipped) == (60, 0)
            )
        },
        ("fit", "--config", str(FOLDER / "05_lightning_cli.yaml"), "--trainer.limit_train_batches", "60"),
    ),
    "06": Claim(
        {
            r"(?s) 0 steps: recall@1 ([\d.]+), MRR@10 ([\d.]+).* 20 steps: recall@1 ([\d.]+), MRR@10 ([\d.]+)": (
                lambda first, rank, later, better: later > first + 0.1 and better > rank + 0.1 and first > 0.05
            )
        }
    ),
    "07": Claim(
        {
            r"after: (\d+)% of 4,000 samples on a spot, (\d) of 8": lambda share, spots: share > 60 and spots == 8,
            r"loss scale (\d+)": lambda scale: math.log2(scale).is_integer() and 2**10 <= scale <= 2**20,
            r"optimizer steps: (\d+) applied, (\d+) skipped": lambda applied, skipped: (
                applied + skipped == 2 * 8 * 64 and 0 < skipped < 100
            ),
        }
    ),
    "08": Claim(
        {
            r"guard: (\d+) of (\d+) steps skipped": lambda skipped, steps: 0 < skipped < steps / 2,
            r"health: loss ([\d.]+) at first, ([\d.]+) at last": lambda first, last: last < first / 2,
        }
    ),
    "09": Claim({r"fp8: validation loss ([\d.]+)": lambda loss: loss < TOKENS - 0.5}),
    "10": Claim(
        {r"loss after 40 steps: ([\d.]+); weights (\S+) apart": lambda loss, apart: loss < BYTES - 1.5 and apart == 0}
    ),
}
#: of these the rooms' own tests have smaller runs, and the pages of the documentation
LONG = ("03", "05", "06", "07", "08", "10")


@pytest.mark.slow
@pytest.mark.timeout(600)  # a CPU that emulates bf16 fine-tunes the sentence encoder for minutes
@pytest.mark.parametrize("number", [pytest.param(name, marks=WHOLE if name in LONG else []) for name in CLAIMS])
def test_an_example_runs_and_what_it_says_holds(number: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    claim = CLAIMS[number]
    output = run(number, tmp_path, *claim.arguments)
    known = [line.split(":")[1] for line in pytestconfig.getini("filterwarnings") if line.startswith("ignore:")]
    assert [said for said in _WARNING.findall(output) if not any(re.match(text, said) for text in known)] == []
    for pattern, holds in claim.says.items():
        found = re.findall(pattern, output)
        assert found, (pattern, output)
        numbers = found[-1] if isinstance(found[-1], tuple) else found[-1:]
        assert holds(*map(float, numbers)), (pattern, numbers)
    for pattern, count in claim.leaves.items():
        files = list(tmp_path.glob(pattern))
        assert files
        assert all(len([json.loads(line) for line in file.read_text().splitlines()]) == count for file in files)


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
    ended = launching.run(command, tmp_path / "log", timeout=150)
    assert ended.code == 0, ended.output
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
