"""A plan among the Trainer's plugins under Lightning's own LightningCLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_mp import MixedPrecisionPlan
from support.training import Net, write

#: arguments of the plan among ``trainer.plugins``, and the key that the parser names; None: it is right
STOCK: dict[str, tuple[str, str | None]] = {
    "key of the loss scaling": ("loss_scaling: {init_scal: 8}", "init_scal"),
    "key of its constructor": (
        "loss_scaling: {class_path: lightning_mp.LossScaling.deepspeed, init_args: {hysteresi: 2}}",
        "hysteresi",
    ),
    "key of the checkpointing": ("checkpointing: {module: Linear}", "module"),
    "key of nonfinite": ("nonfinite: {acton: raise}", "acton"),
    "key of a pin": ("pins: {layer: {dtype: fp32, outpt: input}}", "outpt"),
    "key of a pin in a list": ("pins: [{pattern: layer, dtyp: fp32}]", "dtyp"),
    "key of the plan": ("pin: {layer: fp32}", "pin"),
    "fields": ("loss_scaling: {init_scale: 8, max_scale: 16}", None),
    "a class": ("loss_scaling: {class_path: lightning_mp.LossScaling, init_args: {init_scale: 8}}", None),
    "a constructor": (
        "loss_scaling: {class_path: lightning_mp.LossScaling.deepspeed, init_args: {hysteresis: 2}}",
        None,
    ),
    "pins": ("pins: {layer: fp32}, checkpointing: layer, nonfinite: raise", None),
    "pins of fields": ("pins: {layer: {dtype: fp32, output: input}}, nonfinite: {action: raise}", None),
    "a list of pins": ("pins: [{pattern: layer, dtype: fp32}], checkpointing: {modules: [layer]}", None),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, about what Lightning calls
@pytest.mark.parametrize("name", STOCK)
def test_a_misspelt_key_is_the_parsers_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, key = STOCK[name]
    plan = f"{{class_path: lightning_mp.MixedPrecisionPlan, init_args: {{precision: 16-mixed, {written}}}}}"
    path = write(tmp_path, f"model: {{width: 4}}\ntrainer: {{accelerator: cpu, logger: false, plugins: [{plan}]}}")
    monkeypatch.setattr("sys.argv", ["train.py", "--config", path])
    arguments: Any = {"run": False, "save_config_callback": None, "seed_everything_default": 0}
    if key is None:
        plugin = LightningCLI(Net, **arguments).trainer.precision_plugin
        assert isinstance(plugin, MixedPrecisionPlan)
        return
    with pytest.raises(SystemExit) as ended:
        LightningCLI(Net, **arguments)
    assert ended.value.code == 2
    assert key in capsys.readouterr().err
