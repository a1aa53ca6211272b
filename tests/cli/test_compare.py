"""``lightning-mp compare`` and ``demo``: a table and two files, and what is refused before anything is built."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from support.launching import environment
from support.training import PLAIN, Net, write

FP8 = "precision: fp8-mixed\nfp8: {recipe: tensorwise, small: convert, emulate: true}\n"


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments])


def test_a_table_and_two_files(tmp_path: Path) -> None:
    narrow, out = write(tmp_path, FP8, "narrow.yaml"), tmp_path / "out"
    wide = PLAIN.replace("width: 4", "width: 16").replace("Net", "Wide").replace("rows: 12", "rows: 12\n  width: 16")
    config = write(tmp_path, wide)
    result = _compare(config, "--plans", f"bf16-mixed,{narrow}", "--seeds", "2", "--out", str(out))
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
    given = ("--plans", "bf17-mixed,no.yaml", "--seeds", "0", "--steps", "0", "ckpt_path=x", "model.wdth=3")
    result = _compare(write(tmp_path, PLAIN), *given)
    assert result.exit_code == 2
    assert Net.built == built
    said = ("6 errors", "'bf17-mixed'", "'no.yaml', which is", "seeds=0", "steps=0", "ckpt_path: ", "model.wdth, ")
    assert [text for text in said if text not in result.stderr] == []
    assert not Path("runs").exists()


RAN = ("fp32", "bf16", "bf16-ckpt", "fp16")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-m", "lightning_mp", "demo", "--steps", "3", "--out", str(out)]
    root = Path(__file__).parents[2]
    given = environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH=root)
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, out


@pytest.mark.slow
@pytest.mark.whole
def test_plans_train_the_same_model_in_less_memory(demo: tuple[str, Path]) -> None:
    plans = {plan["name"]: plan for plan in json.loads((demo[1] / "compare.json").read_text())["plans"]}
    first = [plan["runs"][0]["losses"][0] for plan in plans.values()]
    assert first == pytest.approx([first[0]] * len(RAN), abs=0.01)
    peak = {name: plan["peak_bytes"]["mean"] for name, plan in plans.items()}
    assert peak["bf16-ckpt"] < peak["bf16"] < peak["fp32"]
    assert peak["fp16"] == pytest.approx(peak["bf16"], rel=0.02)
    assert all(run["error"] is None for plan in plans.values() for run in plan["runs"])


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_a_missing_package_names_its_extra(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning.pytorch")  # whose metrics look for transformers when they are imported
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say: not importable
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert f"needs {package}. Install it: pip install '" in result.stderr
    assert not (tmp_path / "out").exists()
