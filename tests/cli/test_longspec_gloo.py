"""``experiment=longspec`` in two processes under ZeRO-1 trains, and every module ran as docs/how-to/lora.md says."""

import argparse
import json
import math
from pathlib import Path

import pytest

from lightning_mp.cli.train import run as train
from support.deepspeed_json import fp16_supported
from support.ranks import Ranks
from support.training import losses

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]
SHORT = (
    "trainer.max_steps=6", f"data.text={argparse.__file__}", "data.val_batches=2", "trainer.num_sanity_val_steps=0",
    "trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
)  # fmt: skip


def experiment(folder: Path) -> int:
    """Trains as ``lightning-mp train`` does, with DeepSpeed as it is on CUDA."""
    with fp16_supported():
        return train(["experiment=longspec", f"run_dir={folder}", *SHORT], lambda _: None)


def test_the_recipe_trains_as_it_is_declared(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.call(experiment, tmp_path) == [0, 0]
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert audit["ok"], audit
    stored = {row["module"]: row["param"] for row in audit["rows"]}
    assert {dtype for name, dtype in stored.items() if "norm" in name or "lora_" in name} == {"fp32"}
    assert {dtype for name, dtype in stored.items() if name.endswith(("lm_head", "embed_tokens", "base_layer"))} == {
        "fp16"
    }
    assert [math.isfinite(loss) for loss in losses(tmp_path)] == [True] * 6
