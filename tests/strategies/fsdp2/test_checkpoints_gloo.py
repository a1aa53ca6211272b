"""FSDP2 goes on from its own checkpoints: by as many processes and by fewer, from shards and from one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import LossScaling
from support.comparing import of_training, same
from support.fsdp2_models import Blocks, Net
from support.models import same_weights
from support.ranks import Ranks
from support.saving import ResumableBatches, SaveAt
from support.sharded import PINS, RATE, ddp, fsdp2, trained

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

AT = 4
#: optimizers whose groups are in another order than the model's parameters, that keep no state, and usual ones
CASES = [(optimizer, form) for optimizer in ("fused", "groups", "sgd") for form in ("shards", "file")]


class Saved(Blocks):
    """The same data for every process, and one frozen layer."""

    def __init__(self, optimizer: str, bad: tuple[int, ...] = ()) -> None:
        super().__init__(optimizer, bad)
        self.net[0].up.requires_grad_(False)

    def factor(self) -> int:
        return 1


@dataclass(frozen=True)
class Run:
    """A run to the end that is saved in the middle, as shards or in one file; or one from there, of other weights."""

    folder: Path
    optimizer: str
    form: str
    resumes: str | None = None

    def run(self) -> dict[str, Any]:
        module = Saved(self.optimizer, () if self.resumes else (1,))
        own: dict[str, Any] = {"callbacks": [SaveAt(self.folder, AT)]}
        if self.resumes:
            own = {"ckpt_path": self.folder / f"{AT}.ckpt"}
            for parameter in module.parameters():
                parameter.data.add_(1.0)
        host = fsdp2(wrap=Net, save_distributed_checkpoint=self.form == "shards")
        if self.resumes == "ddp":
            host = ddp(find_unused_parameters=True)
        scaling = LossScaling(init_scale=32.0, hysteresis=2, growth_interval=3)
        own |= {"pins": PINS, "loss_scaling": scaling, "data": ResumableBatches(), "gradient_clip_val": 0.5}
        found = trained("16-mixed", host, module, **own)
        return {**found, "folder": (self.folder / f"{AT}.ckpt").is_dir()}


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One process."""
    with Ranks(1) as started:
        yield started


@pytest.mark.parametrize(("optimizer", "form"), CASES)
def test_a_run_goes_on(ranks: Ranks, alone: Ranks, tmp_path: Path, optimizer: str, form: str) -> None:
    """A single file goes on under DDP too, with the state of its optimizer."""
    saved = ranks.run(Run(tmp_path, optimizer, form))[0]
    resumed = Run(tmp_path, optimizer, form, "fsdp2")
    again = [*ranks.run(resumed), *alone.run(resumed)]
    again += ranks.run(Run(tmp_path, optimizer, form, "ddp")) if form == "file" else []
    assert saved["folder"] == (form == "shards")
    assert same_weights(again[0]["weights"], saved["weights"])
    for found in again:
        assert found["counts"] == saved["counts"] == (7, 1)
        assert found["scales"] == saved["scales"][AT:]
        # another number of processes sums the norm that is clipped by in another order
        assert same(found["weights"], saved["weights"], of_training("16-mixed", RATE, steps=8 - AT))
