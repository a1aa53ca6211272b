"""``lightning-mp compare``: a table and two files from a config, and what is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from support.training import PLAIN, Net

FP8 = "precision: fp8-mixed\nfp8: {recipe: tensorwise, small: convert, emulate: true}\n"


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments])


def _config(folder: Path, text: str = PLAIN) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def test_a_table_and_two_files(tmp_path: Path) -> None:
    (tmp_path / "narrow.yaml").write_text(FP8)
    config = _config(
        tmp_path,
        PLAIN.replace("width: 4", "width: 16").replace("Net", "Wide").replace("rows: 12", "rows: 12\n  width: 16"),
    )
    out = tmp_path / "out"
    result = _compare(config, "--plans", f"bf16-mixed,{tmp_path / 'narrow.yaml'}", "--seeds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "seed 2 of 2, narrow" in result.stdout
    assert "verdict" in result.stdout
    written = json.loads((out / "compare.json").read_text())
    assert written["steps"] == 3, "trainer.max_steps of the file"
    assert [plan["name"] for plan in written["plans"]] == ["bf16-mixed", "narrow"]
    assert written["plans"][1]["plan"]["fp8"]["recipe"] == "tensorwise"
    assert all(len(run["losses"]) == 3 for plan in written["plans"] for run in plan["runs"])
    assert {path.name for path in out.iterdir()} == {"compare.json", "compare.html"}
    as_json = _compare(config, "--plans", "fp32,bf16-mixed", "--seeds", "1", "--out", str(out), "--json")
    assert json.loads(as_json.stdout)["seeds"] == [0]


def test_every_fault_before_a_model_is_built(tmp_path: Path, own_folder: None) -> None:
    built = Net.built
    result = _compare(
        _config(tmp_path),
        "--plans",
        "bf17-mixed,no.yaml",
        "--seeds",
        "0",
        "--steps",
        "0",
        "ckpt_path=x",
        "model.wdth=3",
    )
    assert result.exit_code == 2
    assert Net.built == built
    for text in (
        "6 errors",
        "'bf17-mixed'",
        "'no.yaml', which is no file",
        "seeds=0",
        "steps=0",
        "ckpt_path: ",
        "model.wdth, which Net does not take",
    ):
        assert text in result.stderr
    assert not Path("runs").exists()
