"""``lightning-mp advise CONFIG``: memory by part, the largest micro-batch, and what is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app
from support.training import PLAIN, write


def _advised(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["advise", "experiment=llama_tiny", "plan=bf16", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_run_is_predicted_on_a_gpu(tmp_path: Path, own_folder: None) -> None:
    said = json.loads(_advised("--gpu", "t4-16", "--json"))
    assert said["prediction"]["method"] == "traced"
    none, selective, full = (each["prediction"]["peak_bytes"] for each in said["fits"])
    assert said["prediction"]["peak_bytes"] == none > selective > full
    assert all(each["rows"] >= said["rows"] for each in said["fits"])
    assert not any(tmp_path.iterdir())


OWN = """
from torch.utils.data import DataLoader, IterableDataset
from support.training import Net, loader

class Unstepped(Net):
    def training_step(self, batch, batch_idx):
        raise KeyError("input_ids")

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from loader(4)

def endless():
    return DataLoader(Endless(), batch_size=None)

class Twofold(Net):
    def training_step(self, batch, batch_idx):
        return sum(super(Twofold, self).training_step(each, batch_idx) for each in batch.values())
"""


@pytest.mark.filterwarnings("ignore:predict_memory answers by a formula")  # one of the cases is to be warned of
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("accelerator: cpu\n  devices: 1", "accelerator: gpu\n  devices: [0, 1]"), "By: traced"),
        (("support.training.loader\n  rows: 12", "own_parts.Endless"), "By: traced"),
        (("support.training.loader\n  rows: 12", "own_parts.endless"), "By: traced"),
        (
            ("support.training.Net", "own_parts.Unstepped"),
            "raised KeyError: 'input_ids' (own_parts.py:7)",
        ),
    ],
)
def test_a_config_is_predicted_where_its_devices_are_not_and_what_cannot_be_is_said(
    change: tuple[str, str], said: str, tmp_path: Path, own_folder: None
) -> None:
    assert change[0] in PLAIN
    write(tmp_path, OWN, "own_parts.py")
    path = write(tmp_path, PLAIN.replace(*change))
    found = CliRunner().invoke(app, ["advise", path])
    assert found.exit_code == 0, found.output
    assert said in found.stdout
    refused = CliRunner().invoke(app, ["advise", path, "--gpus", "4", "--price", "2"])
    assert (refused.exit_code, "--gpus, --price next to a CONFIG" in refused.output) == (2, True)


def test_several_loaders_are_drawn_from_as_lightning_does(tmp_path: Path, own_folder: None) -> None:
    write(tmp_path, OWN, "own_parts.py")
    both = "train: {a: {_target_: support.training.loader, rows: 4}, b: {_target_: own_parts.endless}}"
    config = PLAIN.replace("_target_: support.training.loader\n  rows: 12", both).replace(
        "support.training.Net", "own_parts.Twofold"
    )
    found = CliRunner().invoke(app, ["advise", write(tmp_path, config)])
    assert found.exit_code == 0, found.output
    assert "By: traced" in found.stdout


def test_a_gpu_that_is_none_is_refused() -> None:
    refused = CliRunner().invoke(app, ["advise", "experiment=llama_tiny", "--gpu", "h100"])
    assert refused.exit_code == 2
    assert "h100-80" in refused.output


@pytest.mark.parametrize(
    ("argument", "said"),
    [("trainer.devices=abc", "trainer.devices='abc'"), ("data.rows=0", "The data hold no batch")],
)
def test_devices_that_lightning_does_not_take_and_empty_data_are_refused(
    argument: str, said: str, tmp_path: Path, own_folder: None
) -> None:
    refused = CliRunner().invoke(app, ["advise", write(tmp_path, PLAIN), argument])
    assert refused.exit_code == 2
    assert said in refused.output
