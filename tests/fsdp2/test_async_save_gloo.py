"""``async_save=True``: shards are written while training goes on, and what is not whole is never the newest."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp import MixedPrecisionPlan, NonFinite, make_strategy
from lightning_mp.checkpoints import CheckpointFormatError, read_full
from support.comparing import same
from support.models import Regression, batches
from support.ranks import RankError, Ranks
from support.running import trainer
from support.sharded import rank, whole
from support.shelf import Shelf

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


class Steps(Regression):
    """Keeps the weights after each step; the shelf's files are written once the next step has begun."""

    def __init__(self, kill_at: int | None, waits: bool) -> None:
        super().__init__(torch.optim.AdamW)
        self.kill_at, self.waits = kill_at, waits
        self.next_began, self.after = threading.Event(), dict[int, Any]()
        if waits or kill_at is not None:
            Shelf.before_write = staticmethod(self.before_write)

    def before_write(self, path: str) -> None:
        if rank() == 0 and path.endswith(".distcp") and f"step={self.kill_at}." in path:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.waits and not path.endswith("meta.pt"):
            assert self.next_began.wait(60), "training waits for the checkpoint"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.next_began.set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.next_began.clear()
        self.after[self.global_step] = whole(self)

    def on_train_end(self) -> None:
        self.next_began.set()


def fit_and_save(folder: str, later: bool = True, kill_at: int | None = None, waits: bool = False) -> dict[int, Any]:
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    plan = MixedPrecisionPlan("32-true")
    strategy = make_strategy("fsdp2", plan, process_group_backend="gloo", async_save=later)
    runner = trainer(
        plugins=[plan], max_steps=4, devices=2, strategy=strategy, enable_checkpointing=True, callbacks=[saves]
    )
    module = Steps(kill_at, waits)
    runner.fit(module, batches())
    return module.after


@pytest.mark.parametrize("protocol", ["", "shelf://"])
def test_what_is_written_is_what_weights_were_when_it_was_saved(ranks: Ranks, tmp_path: Path, protocol: str) -> None:
    after = ranks.call(fit_and_save, f"{protocol}{tmp_path}")[0]
    assert [one.name for one in tmp_path.iterdir()] == ["step=4.ckpt"]
    content = read_full(tmp_path / "step=4.ckpt", weights_only=False)
    assert content["global_step"] == 4
    assert same(content["state_dict"], after[4])
    at_once = ranks.call(fit_and_save, f"{protocol}{tmp_path}/at_once", later=False)[0]
    assert same(after, at_once)
    expected = read_full(tmp_path / "at_once" / "step=4.ckpt", weights_only=False)
    assert same(content["optimizer_states"], expected["optimizer_states"])


def test_training_goes_on_while_it_is_written(ranks: Ranks, tmp_path: Path) -> None:
    """A save at once would wait for the next step, and end in an error after a minute."""
    after = ranks.call(fit_and_save, f"shelf://{tmp_path}", waits=True)[0]
    assert same(read_full(tmp_path / "step=4.ckpt", weights_only=False)["state_dict"], after[4])


def test_one_that_is_broken_off_is_not_the_newest(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        ranks.call(fit_and_save, f"shelf://{tmp_path}", kill_at=3)
    assert read_full(tmp_path / "step=2.ckpt", weights_only=False)["global_step"] == 2
    with pytest.raises(CheckpointFormatError, match="not all of one"):
        read_full(tmp_path / "step=3.ckpt")


class Rewound(Steps):
    """Its loss is NaN in the last batch, while the checkpoint of the step before is being written."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 3 else loss


def _slowly(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    time.sleep(0.5)
    return original(*arguments, **options)


def rewind_while_saving(folder: str, kept: int) -> tuple[dict[int, Any], list[str]]:
    """The weights after each step, and what is left in the folder."""
    Shelf.before_write = staticmethod(lambda path: time.sleep(0.2))
    removed = Shelf.rm
    Shelf.rm = partialmethod(partial(_slowly, removed))  # type: ignore[assignment,method-assign]
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=kept)
    disk = Path(folder.removeprefix("shelf://"))
    rule = NonFinite(max_consecutive=0, on_budget="rewind", run_dir=str(disk / "run"))
    plan = MixedPrecisionPlan("32-true", nonfinite=rule)
    strategy = make_strategy("fsdp2", plan, process_group_backend="gloo", async_save=True)
    module, options = Rewound(None, False), {"devices": 2, "strategy": strategy, "max_steps": 4}
    try:
        runner = trainer(plugins=[plan], enable_checkpointing=True, callbacks=[saves], **options)
        runner.fit(module, batches())
    finally:
        Shelf.rm = removed  # type: ignore[method-assign]
    return module.after, sorted(path.name for path in disk.glob("*.ckpt"))


@pytest.mark.parametrize("kept", [1, -1])
def test_a_rewind_takes_the_one_that_is_being_written(ranks: Ranks, tmp_path: Path, kept: int) -> None:
    after, left = ranks.call(rewind_while_saving, f"shelf://{tmp_path}", kept)[0]
    assert same(after[4], after[3])
    assert not same(after[4], after[2])
    assert left == [f"step={step}.ckpt" for step in range(4 if kept == 1 else 1, 5)]


def wait_for_a_rank_that_hangs(folder: str) -> float:
    """How long the first rank waits for the other, which never writes its shards."""
    if rank() == 1:
        Shelf.before_write = staticmethod(lambda path: threading.Event().wait(20))
    saves = ModelCheckpoint(folder, every_n_train_steps=1)
    plan = MixedPrecisionPlan("32-true")
    options: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=3)}
    strategy = make_strategy("fsdp2", plan, async_save=True, **options)
    runner = trainer(
        plugins=[plan], max_steps=1, devices=2, strategy=strategy, enable_checkpointing=True, callbacks=[saves]
    )
    began = time.monotonic()
    with suppress(Exception):
        runner.fit(Regression(torch.optim.AdamW), batches())
    return time.monotonic() - began


def test_it_waits_for_other_ranks_as_long_as_timeout_says(tmp_path: Path) -> None:
    with Ranks() as ranks:
        assert ranks.call(wait_for_a_rank_that_hangs, f"shelf://{tmp_path}")[0] < 15
