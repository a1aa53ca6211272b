"""A folder that is written over by a process that is killed half way is the one that was there before."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan
from lightning_mp.checkpoints import read_full
from support.comparing import same
from support.models import Regression, batches
from support.ranks import RankError, Ranks
from support.running import trainer
from support.sharded import HOSTS, rank, whole

pytestmark = pytest.mark.gloo

#: which file of a checkpoint, of those that rank 0 opens to write, it does not come to the end of
FILES = {"fsdp2": 2, "zero2": 2, "zero3": 1}
EACH = ["fsdp2", *(pytest.param(host, marks=pytest.mark.slow) for host in ("zero2", "zero3"))]


@dataclass(frozen=True)
class Save:
    """So many steps, then a checkpoint; what is in it. On rank 0 the process is killed when it opens a ``file``."""

    host: str
    steps: int
    path: str
    file: int | None = None

    def run(self) -> dict[str, Any]:
        fitted = trainer(plugins=[MixedPrecisionPlan("32-true")], max_steps=self.steps, **HOSTS[self.host]())
        module = Regression(torch.optim.AdamW)
        fitted.fit(module, batches())
        if rank() == 0 and self.file is not None:
            sys.addaudithook(Killer(self.file))
        fitted.save_checkpoint(self.path)
        return whole(module)


class Killer:
    """Ends the process when it opens that many files to write."""

    def __init__(self, file: int) -> None:
        self.left = file

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and any(letter in str(arguments[1]) for letter in "wxa+"):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("host", EACH)
def test_what_was_there_is_still_there(host: str, ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    ranks.run(Save(host, 2, str(path)))
    before = read_full(path, weights_only=False)
    with pytest.raises(RankError, match="exit code -9"):
        ranks.run(Save(host, 4, str(path), FILES[host]))
    after = read_full(path, weights_only=False)
    assert after["global_step"] == before["global_step"] == 2
    assert same(before["state_dict"], after["state_dict"])
    assert same(before["optimizer_states"], after["optimizer_states"])


@pytest.mark.parametrize("host", EACH)
def test_it_is_replaced_once_all_of_it_is_written(host: str, ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    ranks.run(Save(host, 2, str(path)))
    expected = ranks.run(Save(host, 4, str(path)))[0]
    assert read_full(path, weights_only=False)["global_step"] == 4
    assert same(read_full(path)["state_dict"], expected)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]
