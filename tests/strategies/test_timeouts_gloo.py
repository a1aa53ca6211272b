"""Every process group of a strategy waits for other ranks as long as the strategy's ``timeout=`` says."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mp import MixedPrecisionPlan, make_strategy
from support.models import batches
from support.pipeline import ROWS, Staged
from support.pipeline import data as staged_batches
from support.ranks import Ranks
from support.running import fit
from support.sharded import HOSTS, WAIT, Ranked

pytestmark = pytest.mark.gloo


class Timeouts(Callback):
    """Keeps the timeouts of the groups that the run's strategy made."""

    def __init__(self) -> None:
        self.seen: list[timedelta] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        mesh = getattr(strategy, "_device_mesh", None)
        groups = [trainer.optimizers[0].dp_process_group] if mesh is None else mesh.get_all_groups()
        self.seen = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def timeouts(host: str) -> list[timedelta]:
    kept, plan = Timeouts(), MixedPrecisionPlan("32-true")
    if host == "pipeline":
        strategy = make_strategy("pipeline", plan, stages=2, microbatches=4, **WAIT)
        fit(Staged(), data=staged_batches(2, ROWS), plugins=[plan], callbacks=[kept], strategy=strategy, devices=2)
    else:
        options = HOSTS["fsdp2"](device_mesh=(1, 2)) if host == "hsdp" else HOSTS[host]()
        fit(Ranked(), data=batches(4), plugins=[plan], callbacks=[kept], **options)
    return kept.seen


def test_groups_of_meshes_and_of_deepspeed_have_the_strategys_timeout(ranks: Ranks) -> None:
    for host, groups in (("hsdp", 2), ("pipeline", 2), ("zero2", 1), ("zero3", 1)):
        assert ranks.call(timeouts, host) == [[WAIT["timeout"]] * groups] * 2
