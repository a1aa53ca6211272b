"""A batch is run again under hooks: the module, the pass and the batch are named, and nobody can tell it was run."""

import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.plan.diagnosis import Diagnosis
from support.cells import sampled
from support.nonfinite import BAD, STOCK, Breaks, Remembers
from support.oracles import stock_for
from support.running import fit


class Asks(Callback):
    def __init__(self, *at: int, when: str = "step") -> None:
        self.replayer, self.at, self.when = Replayer(), at, when
        self.diagnoses: list[Diagnosis] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.replayer.remember(trainer, batch, batch_idx)
        self.batch_idx = batch_idx

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._ask("step", trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self._ask("end", trainer, pl_module)

    def _ask(self, when: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if when == self.when and self.batch_idx in self.at:
            self.diagnoses.append(self.replayer.locate(trainer))


def _asked(module: LightningModule, *at: int, when: str = "step", **options: Any) -> Diagnosis:
    asks = Asks(*(at or (BAD,)), when=when)
    fit(module, callbacks=[asks], **options)
    return asks.diagnoses[0]


def test_a_window_is_gone_after_its_step() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Counts(Asks):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(weakref.ref(args[3][0]))
            alive.append(sum(one() is not None for one in seen))
            if len(seen) % 4 == 0:
                self.replayer.forget()

    fit(Breaks("gradient", ()), callbacks=[Counts(when="never")], accumulate_grad_batches=4)
    assert max(alive) <= 5, alive  # and what the loop has fetched


def test_a_replay_that_fails_says_so_and_looks_at_the_gradients() -> None:
    class Fails(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0], next(batch[1])), batch_idx)

    data = [(torch.ones(4, 16), iter([torch.ones(4, 1)])) for _ in range(5)]  # used up
    diagnosis = _asked(Fails("gradient"), data=DataLoader(data, batch_size=None))
    assert "the replay of batch 3 failed" in str(diagnosis.note)
    assert diagnosis.origin is not None
    assert diagnosis.origin.phase == "backward"


class Trace(Callback):
    """Everything a replay could have touched, after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters()}
        self.seen.append(
            {"gradients": {n: None if g is None else g.nan_to_num().clone() for n, g in gradients.items()}}
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        self.seen.append(
            {
                "buffers": {name: buffer.clone() for name, buffer in pl_module.named_buffers()},
                "mode": [module.training for module in pl_module.modules()],
                "numbers": torch.tensor([pl_module.steps, *pl_module.drawn, pl_module.average, *pl_module.losses]),
                "mean": pl_module.mean.compute().clone(),
                "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
                "hooks": [(len(m._forward_hooks), len(vars(m))) for m in pl_module.modules()],
                "step": trainer.global_step,
                "rng": torch.get_rng_state(),
            }
        )


@pytest.mark.parametrize(("mode", "when", "accumulate"), sampled(STOCK, ["step", "end"], [1, 2]))
def test_a_replay_leaves_no_trace(mode: str, when: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2, **stock_for(mode)}
    asked, plain, traces = Remembers("gradient"), Remembers("gradient"), (Trace(), Trace())
    asks = Asks(*range(8), when=when)
    seed_everything(1, verbose=False)
    first = fit(asked, callbacks=[asks, traces[0]], **options)
    seed_everything(1, verbose=False)
    second = fit(plain, callbacks=[traces[1]], **options)
    assert len(asks.diagnoses) >= 8
    assert first.logged_metrics.keys() == second.logged_metrics.keys()
    torch.testing.assert_close(traces[0].seen, traces[1].seen, rtol=0, atol=0, equal_nan=True)
