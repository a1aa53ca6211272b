"""The bad batch on disk: what is in the file, and that running it again gives the same loss and the same culprit."""

import random
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import PlanError
from lightning_mp.bad_steps.handler import replay_saved
from lightning_mp.callbacks import NonFiniteGuard
from support.models import batches
from support.nonfinite import BAD, FAULTS, STOCK, Breaks
from support.oracles import stock_for
from support.running import fit

CONTEXTS: dict[str, Any] = {
    "32-true": nullcontext,
    "bf16-mixed": partial(torch.autocast, "cpu", torch.bfloat16),
    "16-mixed": partial(torch.autocast, "cpu", torch.float16),
    "bf16-true": nullcontext,
}


class Draws(Breaks):
    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(how, **options)
        self.net.insert(4, nn.Dropout(0.5))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + random.random() + float(np.random.random())


class Alone(Draws):
    """The same, as it is run again: without a Trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[2].bad = self.how == "gradient"
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


def _saved(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "nonfinite").iterdir())


@pytest.mark.parametrize("mode", STOCK)
def test_it_holds_the_batch_and_the_generators(tmp_path: Path, mode: str) -> None:
    seed_everything(3, verbose=False)
    fit(Breaks("loss"), callbacks=[NonFiniteGuard(run_dir=tmp_path)], **stock_for(mode))
    (path,) = _saved(tmp_path)
    saved = torch.load(path, weights_only=True)
    assert path.name == "step_000003_rank0.pt"
    assert (saved["batch_idx"], saved["step"], saved["rank"]) == (BAD, BAD, 0)
    assert saved["loss_scale"] == (256.0 if mode == "16-mixed" else None)
    assert saved["event"]["module"] == FAULTS["loss"][0]
    dtype = torch.bfloat16 if mode == "bf16-true" else torch.float32
    expected = [tensor.to(dtype) for tensor in list(batches())[BAD]]
    assert all(map(torch.equal, saved["batch"], expected))
    assert set(saved["rng"]) == {"torch", "python", "numpy"}
    assert saved["format_version"] == 1
    assert path.stat().st_size < 30_000  # the batch, not what its tensors are views of


def test_a_file_of_a_newer_format_version_is_answered_with_a_sentence(tmp_path: Path) -> None:
    torch.save({"format_version": 2}, tmp_path / "step_000001_rank0.pt")
    with pytest.raises(PlanError, match=r"step_000001_rank0\.pt has format version 2.* Update lightning-mp"):
        replay_saved(tmp_path / "step_000001_rank0.pt", Alone("gradient"), nullcontext())


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_it_runs_again_to_the_same_loss_and_the_same_module(tmp_path: Path, mode: str) -> None:
    module = Draws("gradient", bad=(0,))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    seed_everything(3, verbose=False)
    options = stock_for(mode, init_scale=1.0) if mode == "16-mixed" else stock_for(mode)
    fit(module, callbacks=[NonFiniteGuard(run_dir=tmp_path)], **options)
    again = Alone("gradient")
    again.load_state_dict(weights)
    loss, origin = replay_saved(_saved(tmp_path)[0], again.train(), CONTEXTS[mode]())
    assert loss is not None
    assert loss.item() == pytest.approx(module.losses[0], abs=0 if mode != "16-mixed" else 1e-3)
    assert origin is not None
    assert (origin.module, origin.phase) == ("net.2", "backward")
    assert not torch.isfinite(again.net[0].weight.grad).all()


def test_its_gradients_are_those_of_the_step_under_accumulation(tmp_path: Path) -> None:
    """Lightning divides the loss of a micro-batch by their number."""
    seen: dict[int, Tensor] = {}

    class Overflows(Breaks):
        def on_after_backward(self) -> None:
            seen[len(self.losses) - 1] = self.net[4].weight.grad.clone()

    module = Overflows("gradient", bad=(0,))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    guard = NonFiniteGuard(run_dir=tmp_path)
    fit(module, callbacks=[guard], accumulate_grad_batches=4)
    again = Alone("gradient")
    again.net.pop(4)  # the dropout
    again.load_state_dict(weights)
    replay_saved(_saved(tmp_path)[0], again.train(), nullcontext())
    assert guard.events[0].evidence["batch_idx"] == 0
    assert torch.equal(again.net[4].weight.grad, seen[0])


def test_a_batch_that_cannot_be_saved_does_not_end_the_run(tmp_path: Path) -> None:
    class Odd(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[:2], batch_idx)

    module, lock = Odd("loss"), threading.Lock()
    data = DataLoader([[*batch, lock] for batch in batches()], batch_size=None)
    with pytest.warns(UserWarning, match="bad batch of step 3 could not be saved: TypeError: cannot pickle"):
        fit(module, callbacks=[NonFiniteGuard(run_dir=tmp_path)], data=data)
    assert len(module.losses) == 8
    assert _saved(tmp_path) == []
