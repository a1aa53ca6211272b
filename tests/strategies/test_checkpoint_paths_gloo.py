"""Checkpoints that are no local path: by fsspec, by ``file://``, in a format of a CheckpointIO's, of another module."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_mp import MixedPrecisionPlan, PlanError, consolidate
from lightning_mp.checkpoints import CheckpointFormatError
from lightning_mp.pipeline.strategy import PlanPipelineStrategy
from support import shelf as shelf
from support.cells import WHOLE
from support.models import same_weights
from support.pipeline import ROWS, Staged, data
from support.ranks import Ranks
from support.running import trainer
from support.saved import full_state
from support.sharded import under

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
#: what writes one file, through the CheckpointIO
ONE_FILE = {
    "ddp": {},
    "fsdp1": {"wrap": "Linear"},
    "fsdp2": {"save_distributed_checkpoint": False},
    "pipeline": {"microbatches": 2},
}
FOLDERS = {"fsdp2": {}, "deepspeed_zero1": {}}
#: what writes folders of shards behind any protocol
ANYWHERE = {"fsdp2": {}, "hsdp": {"device_mesh": (2, 1)}}


class InFolders(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint.pop("state_dict"), f"{path}/weights")
        super().save_checkpoint(checkpoint, f"{path}/rest")

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        load = super().load_checkpoint
        return {"state_dict": load(f"{path}/weights", **options), **load(f"{path}/rest", **options)}


def _runner(strategy: str, options: dict[str, Any], plugins: Any = (), **arguments: Any) -> Any:
    host = under(strategy, MixedPrecisionPlan("32-true"), **options)
    arguments |= {"enable_checkpointing": "callbacks" in arguments, "num_sanity_val_steps": 0}
    return trainer(**{**host, "plugins": [*host["plugins"], *plugins], **arguments})


class Watched(Staged):
    def no_gradient_is_looked_at(self, *_: Any) -> None: ...

    on_after_backward = on_before_optimizer_step = on_before_zero_grad = no_gradient_is_looked_at

    def on_train_start(self) -> None:
        self.began = self.weights()

    on_test_start, test_step = on_train_start, Staged.validation_step

    def weights(self) -> dict[str, Any]:
        if isinstance(self.trainer.strategy, PlanPipelineStrategy):
            return {name: one.clone() for name, one in self.trainer.strategy.lightning_module_state_dict().items()}
        return full_state(self)

    def on_train_end(self) -> None:
        self.ended = self.weights()


@dataclass(frozen=True)
class GoesOn:
    strategy: str
    path: str
    folders: bool = False
    shards: bool = False

    def run(self) -> list[Any]:
        plugins, options = [InFolders()] * self.folders, (ANYWHERE if self.shards else ONE_FILE)[self.strategy]
        modules, steps = (Watched(), Watched()), []
        for number, module in enumerate(modules):
            runner = _runner(self.strategy, options, plugins, max_epochs=1 + number)
            runner.fit(module, data(2, ROWS), ckpt_path=self.path if number else None)
            runner.save_checkpoint(self.path)
            steps.append(runner.global_step)
        return [modules[0].ended, modules[1].began, steps]


def _goes_on(ranks: Ranks, run: GoesOn) -> None:
    before, after, steps = ranks.run(run)[0]
    assert same_weights(after, before)
    assert steps == [2, 4]


#: what saves in a bucket is most of what saves elsewhere
WAYS = {("shelf://", False): ONE_FILE, ("file://", False): ("ddp", "pipeline"), ("", True): ("fsdp1", "fsdp2")}


@pytest.mark.parametrize(
    ("strategy", "protocol", "folders"),
    [
        pytest.param(strategy, *way, marks=[] if strategy in often else WHOLE)
        for way, often in WAYS.items()
        for strategy in ONE_FILE
    ],
)
def test_a_run_goes_on(ranks: Ranks, tmp_path: Path, strategy: str, protocol: str, folders: bool) -> None:
    _goes_on(ranks, GoesOn(strategy, f"{protocol}{tmp_path}/saved.ckpt", folders))
    assert (tmp_path / "saved.ckpt").is_dir() == folders
    assert not Path(protocol.partition("/")[0] or "none").exists()


@pytest.mark.parametrize("strategy", ANYWHERE)
def test_a_run_goes_on_from_shards_in_a_bucket(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    address = f"shelf://{tmp_path}/saved.ckpt"
    _goes_on(ranks, GoesOn(strategy, address, shards=True))
    consolidate(address, f"shelf://{tmp_path}/out/weights.safetensors")
    consolidate(tmp_path / "saved.ckpt", tmp_path / "weights.safetensors")
    written = [(tmp_path / name).read_bytes() for name in ("out/weights.safetensors", "weights.safetensors")]
    assert written[0] == written[1]
    assert not Path("shelf:").exists()


def refused() -> list[str]:
    saves = _runner("deepspeed_zero1", {}, callbacks=[ModelCheckpoint("shelf:///tmp/shards")])
    with pytest.raises(PlanError) as before:
        saves.fit(Watched(), data(1, ROWS))
    runner = _runner("deepspeed_zero1", {})
    runner.fit(Watched(), data(1, ROWS))
    with pytest.raises(CheckpointFormatError) as after:
        runner.save_checkpoint("shelf:///tmp/shards/saved.ckpt")
    return [str(before.value), str(after.value)]


def test_deepspeeds_files_are_not_written_to_a_remote_folder(ranks: Ranks) -> None:
    for said in (said for one in ranks.call(refused) for said in one):
        assert "shelf:///tmp/shards" in said
        assert "use strategy='mp_fsdp2'" in said
    assert not Path("shelf:").exists()


def another_module(strategy: str, path: str) -> dict[str, Any]:
    runner, fitted, tested = _runner(strategy, FOLDERS[strategy]), Watched(), Watched()
    runner.fit(fitted, data(2, ROWS))
    runner.save_checkpoint(path)
    runner.test(tested, data(1, ROWS), ckpt_path=path, verbose=False)
    return {"fitted": fitted.ended, "tested": tested.began}


@pytest.mark.parametrize("strategy", FOLDERS)
def test_another_module_is_tested_with_a_folder(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    for result in ranks.call(another_module, strategy, str(tmp_path / "saved.ckpt")):
        assert same_weights(result["tested"], result["fitted"])
