"""The configs are in the wheel, and Hydra finds them there as it does in a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = """
import lightning_mp
from hydra import compose, initialize_config_module
with initialize_config_module("lightning_mp.configs", version_base="1.3"):
    config = compose("train", ["plan=longspec", "strategy=fsdp2", "experiment=llama_tiny"])
print(lightning_mp.__file__, config.plan.loss_scaling.hysteresis, config.strategy.name, config.trainer.max_steps)
"""


def composed(path: Path, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE],
        cwd=cwd,
        env={"PYTHONPATH": str(path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what a checkout holds."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "lightning_mp", folder / "lightning_mp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "configs").symlink_to("lightning_mp/configs")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder / "dist")]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *options, str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_every_config_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.endswith(".yaml")}
    source = ROOT / "lightning_mp"
    assert carried == {f"lightning_mp/{path.relative_to(source)}" for path in source.rglob("*.yaml")}


def test_hydra_finds_them_in_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    home, *values = composed(installed, tmp_path)
    assert Path(home).is_relative_to(installed)
    assert values == ["2", "fsdp2", "200"]


def test_hydra_finds_them_in_a_checkout(tmp_path: Path) -> None:
    home, *values = composed(tmp_path, tmp_path)
    assert Path(home).is_relative_to(ROOT)
    assert values == ["2", "fsdp2", "200"]
