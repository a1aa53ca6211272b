"""``lightning-mp advise CONFIG``: memory by part, the largest micro-batch, and what is measured here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from support.training import PLAIN, write

pytestmark = pytest.mark.usefixtures("own_folder")


def _advise(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments])


@pytest.mark.slow
def test_a_run_is_predicted_on_a_gpu(tmp_path: Path) -> None:
    result = _advise("experiment=llama_tiny", "plan=bf16", "--gpu", "t4-16", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
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
LOADER = "_target_: support.training.loader\n  rows: 12"
TWO = "train: {a: {_target_: support.training.loader, rows: 4}, b: {_target_: own_parts.endless}}"


@pytest.mark.filterwarnings("ignore:predict_memory answers by a formula")  # one of the cases is to be warned of
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accelerator: cpu\n  devices: 1": "accelerator: gpu\n  devices: [0, 1]"}, "By: traced"),
        ({LOADER: "_target_: own_parts.Endless"}, "By: traced"),
        ({LOADER: "_target_: own_parts.endless"}, "By: traced"),
        ({LOADER: TWO, "support.training.Net": "own_parts.Twofold"}, "By: traced"),
        ({"support.training.Net": "own_parts.Unstepped"}, "raised KeyError: 'input_ids' (own_parts.py:7)"),
    ],
    ids=["no such devices", "endless data", "an endless loader", "two loaders", "a step that raises"],
)
def test_a_config_is_predicted_or_it_is_said_why_not(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    write(tmp_path, OWN, "own_parts.py")
    config = PLAIN
    for old, new in changes.items():
        assert old in config
        config = config.replace(old, new)
    found = _advise(write(tmp_path, config))
    assert found.exit_code == 0, found.output
    assert said in found.stdout


def test_gpus_counts_the_devices_that_a_config_leaves_to_the_machine(tmp_path: Path) -> None:
    config = write(tmp_path, PLAIN)
    counts = {
        "trainer.devices=auto --gpus 4": 4,
        "trainer.devices=-1 --gpus 2": 2,
        "trainer.devices=3": 3,
    }
    for arguments, devices in counts.items():
        result = _advise(config, "strategy=fsdp2", "--json", *arguments.split())
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["devices"] == devices


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tokens 4e9 --price 2", "--price, --tokens next to a CONFIG"),
        ("--gpus 4 trainer.devices=2", "Write trainer.devices=4"),
        ("--gpus 0 trainer.devices=auto", "--gpus=0"),
        ("--gpu h100", "h100-80"),
        ("trainer.devices=abc", "trainer.devices='abc'"),
        ("data.rows=0", "The data hold no batch"),
    ],
)
def test_refused(arguments: str, said: str, tmp_path: Path) -> None:
    refused = _advise(write(tmp_path, PLAIN), *arguments.split())
    assert refused.exit_code == 2
    assert said in refused.output
