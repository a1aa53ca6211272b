"""A plan among the Trainer's plugins under Lightning's own LightningCLI: fitted from a file, and refused in it."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_mp import MixedPrecisionPlan
from support.training import Net, loader, losses, write

#: arguments of the plan among ``trainer.plugins``, and the key that the parser names; None: it is right
STOCK: dict[str, tuple[str, str | None]] = {
    "key of a piece": ("loss_scaling: {init_scal: 8}", "init_scal"),
    "key of a pin in a list": ("pins: [{pattern: layer, dtyp: fp32}]", "dtyp"),
    "key of the plan": ("pin: {layer: fp32}", "pin"),
    "a class": ("loss_scaling: {class_path: lightning_mp.LossScaling, init_args: {init_scale: 8}}", None),
    "pins of fields": ("pins: {layer: {dtype: fp32, output: input}}, nonfinite: {action: raise}", None),
    "a list of pins": ("pins: [{pattern: layer, dtype: fp32}], checkpointing: {modules: [layer]}", None),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, about what Lightning calls
FIT = """\
model: {{width: 4}}
trainer:
  accelerator: cpu
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_mp.MixedPrecisionPlan
      init_args: {{precision: 16-mixed, pins: {{layer: fp32}}, loss_scaling: {scaling}}}
  callbacks:
    - class_path: lightning_mp.callbacks.TrainingHealth
      init_args: {{run_dir: {folder}}}
"""


class Fed(Net):
    def train_dataloader(self) -> Any:
        return loader(12)


def cli(path: str, monkeypatch: pytest.MonkeyPatch, *arguments: str, run: bool = False) -> Any:
    monkeypatch.setattr("sys.argv", ["train.py", *["fit"] * run, "--config", path, *arguments])
    options: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": 0, "run": run}
    return LightningCLI(Fed, **options)


@pytest.mark.parametrize("name", STOCK)
def test_a_typo_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, key = STOCK[name]
    plan = f"{{class_path: lightning_mp.MixedPrecisionPlan, init_args: {{precision: 16-mixed, {written}}}}}"
    path = write(tmp_path, f"model: {{width: 4}}\ntrainer: {{accelerator: cpu, logger: false, plugins: [{plan}]}}")
    if key is None:
        assert isinstance(cli(path, monkeypatch).trainer.precision_plugin, MixedPrecisionPlan)
        return
    with pytest.raises((ValueError, SystemExit)) as ended:
        cli(path, monkeypatch)
    assert key in f"{ended.value}{capsys.readouterr().err}"


def test_the_plan_by_its_short_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path, "model: {width: 4}\ntrainer: {accelerator: cpu, logger: false}")
    plugins = ("--trainer.plugins=MixedPrecisionPlan", "--trainer.plugins.precision=16-mixed")
    plan = cli(path, monkeypatch, *plugins).trainer.precision_plugin
    assert isinstance(plan, MixedPrecisionPlan)
    assert plan.precision == "16-mixed"


def test_a_file_is_fitted_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_folder: None) -> None:
    scaling = "{init_scale: 64, growth_interval: 2}"
    path = write(tmp_path, FIT.format(scaling=scaling, folder=tmp_path / "run"))
    fitted = cli(path, monkeypatch, run=True)
    plan = fitted.trainer.precision_plugin
    assert (plan.precision, plan.applied_steps, plan.scaler.get_scale()) == ("16-mixed", 3, 128.0)
    assert plan.policy.pins[0].pattern == "layer"
    assert len(losses(tmp_path / "run")) == 3


def test_values_that_the_plan_refuses_are_all_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = "{growth_factor: 0.5, init_scale: -1}"
    path = write(tmp_path, FIT.format(scaling=scaling, folder=tmp_path / "run"))
    with pytest.raises((ValueError, SystemExit)) as refused:
        cli(path, monkeypatch, run=True)
    said = f"{refused.value}{capsys.readouterr().err}"
    assert "growth_factor=0.5" in said
    assert "init_scale=-1.0" in said
