"""Where no step is skipped the plan is Lightning's own plugin, bit for bit: losses, gradients, weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from lightning_mp import MixedPrecisionPlan
from support.cells import sampled
from support.models import HIDDEN, Regression, batches, same_weights
from support.oracles import plan_for, stock_for
from support.running import fit
from support.traces import Trace, same_runs, traced

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-2),
    "adamw-fused": partial(AdamW, lr=1e-2, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd-momentum-fused": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad-fused": partial(Adagrad, lr=1e-1, fused=True),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate-3, the last window partial": {"accumulate_grad_batches": 3},
    "clip-norm": {"gradient_clip_val": 0.5},
    "clip-value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}


class ClipsFusedToo(MixedPrecision):
    clip_gradients = Precision.clip_gradients


def _pair(mode: str, build: Any, stock: Any = None, **loop: Any) -> None:
    plan, traces = plan_for(mode), list[Trace]()
    for host in (stock or stock_for(mode), {"plugins": [plan]}):
        seed_everything(1, verbose=False)
        traces.append(traced(build(), **host, **loop))
    there, here = traces
    assert plan.skipped_steps == 0
    assert same_runs(there, here)
    assert there.module.lrs == here.module.lrs
    assert len(there.seen) == len(here.seen) > 0
    assert all(same_weights(a, b) for a, b in zip(there.seen, here.seen, strict=True))
    assert there.global_steps == here.global_steps
    assert not same_weights(here.start, here.weights[-1])


@pytest.mark.parametrize(
    ("mode", "optimizer", "loop"), sampled(["32-true", "bf16-mixed", "16-mixed"], OPTIMIZERS, LOOPS)
)
def test_losses_gradients_weights_and_state_are_stocks(mode: str, optimizer: str, loop: str) -> None:
    def build() -> Regression:
        return Regression(OPTIMIZERS[optimizer])

    if mode == "16-mixed" and optimizer == "lbfgs":
        return  # refused under a loss scale
    stock = stock_for(mode)
    if "fused" in optimizer and "clip" in loop and mode != "32-true":
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(build(), **stock, **LOOPS[loop])
        if mode == "16-mixed":
            return  # test_clipping.py compares with the optimizer's plain form (complaint 2, PL 21435)
        stock = {"plugins": [ClipsFusedToo(mode, "cpu")]}  # which without a scaler nothing speaks against
    if "fused" in optimizer and mode == "16-mixed":
        _pair_but_for_what_the_hooks_see(build, **LOOPS[loop])
    else:
        _pair(mode, build, stock=stock, **LOOPS[loop])


def _pair_but_for_what_the_hooks_see(build: Any, **loop: Any) -> None:
    """Lightning lets a fused optimizer unscale inside its step: hooks see scaled gradients there, true ones here."""
    there = traced(build(), **stock_for("16-mixed"), **loop)
    here = traced(build(), plugins=[plan_for("16-mixed")], **loop)
    assert same_runs(there, here)
    for scaled, true in zip(there.seen, here.seen, strict=True):
        assert same_weights({name: gradient / 256.0 for name, gradient in scaled.items()}, true)


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__(partial(SGD, lr=1e-2))
        self.net = nn.Sequential(nn.LazyLinear(HIDDEN), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "bf16-true"])
def test_parameters_that_the_first_batch_makes_are_stocks(mode: str) -> None:
    stock, ours = Lazy(), Lazy()
    for module, host in ((stock, stock_for(mode)), (ours, {"plugins": [plan_for(mode)]})):
        seed_everything(1, verbose=False)
        fit(module, **host)
    assert stock.losses == ours.losses
    assert same_weights(stock.state_dict(), ours.state_dict())
    assert [one.dtype for one in stock.state_dict().values()] == [one.dtype for one in ours.state_dict().values()]


class Dropped(Regression):
    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["adamw"])
        self.net.insert(2, nn.Dropout(0.3))
        self.net.insert(1, nn.BatchNorm1d(HIDDEN))

    def val_dataloader(self) -> Any:
        return batches()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_with_random_layers_and_running_statistics(mode: str) -> None:
    """No random number is drawn, and no buffer is written, that Lightning would not."""
    _pair(mode, Dropped, max_epochs=2)


def test_overflows_from_the_default_scale_take_torchs_path_down() -> None:
    """Skips included: from 2**16 the first steps overflow in fp16."""
    plan = MixedPrecisionPlan("16-mixed")
    hosts = stock_for("16-mixed", init_scale=2.0**16), {"plugins": [plan]}
    there, here = (traced(Regression(OPTIMIZERS["adamw"]), **host) for host in hosts)
    assert plan.skipped_steps > 0
    assert here.scales == there.scales
    assert same_runs(there, here)


@pytest.mark.parametrize("saved", ["none", "logged", "not logged"])
def test_tensorboard_gets_the_metrics_it_gets_under_stock(saved: str, tmp_path: Path) -> None:
    """One ``hp_metric`` where the module logs hyperparameters, else none; the plan is in ``hparams.yaml``."""
    events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = []
    for name, host in (("stock", {"precision": "32-true"}), ("plan", {"plugins": [MixedPrecisionPlan("32-true")]})):
        module, logger = Regression(), TensorBoardLogger(tmp_path, name=name, version="")
        if saved != "none":
            module.save_hyperparameters({"width": 3}, logger=saved == "logged")
        fit(module, logger=logger, max_steps=1, **host)
        found = events.EventAccumulator(str(tmp_path / name)).Reload()
        written.append({tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]})
    assert written[0] == written[1]
    assert len(written[1].get("hp_metric", ())) == (saved == "logged")
    assert "precision_plan" in (tmp_path / "plan" / "hparams.yaml").read_text()
