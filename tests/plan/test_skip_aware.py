"""Skip-aware hooks beside Lightning's own plugin: what does not move, for how long, and how they are removed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp.plan.skip_aware import SkipAwareHooks
from support.models import Regression
from support.running import fit

sgd = partial(SGD, lr=1.0e-3)
rising = partial(LambdaLR, lr_lambda=lambda step: step + 1)


class Install(Callback):
    """Installs the hooks when training starts; a step is skipped where ``skipped`` says so."""

    def __init__(self, skipped: Callable[[], bool]) -> None:
        self.hooks, self.skipped = SkipAwareHooks(), skipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hooks.install(trainer, pl_module, self.skipped)


def _lrs(module: Regression) -> list[int]:
    return [round(lr / 1e-3) for lr in module.lrs]


def test_removing_restores_exactly_what_was_there() -> None:
    module = Regression(sgd, rising)
    before = dict(module.__dict__)
    hooked = Install(lambda: True)
    fit(module, precision="32-true", callbacks=[hooked])
    assert "lr_scheduler_step" in module.__dict__
    hooked.hooks.remove()
    hooked.hooks.remove()
    assert "lr_scheduler_step" not in module.__dict__
    assert before.keys() <= module.__dict__.keys()
    module.lrs = []
    fit(module, precision="32-true")
    assert _lrs(module) == list(range(1, 9))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_can_be_installed_at_once_and_removed_in_any_order(order: tuple[int, int]) -> None:
    """A guard and a monitor may both leave steps out, and end in the order of the callbacks."""
    module = Regression(sgd, rising)
    before = dict(module.__dict__)
    hooks = [Install(lambda: module.trainer.global_step - 1 == 1), Install(lambda: module.trainer.global_step - 1 == 4)]
    trainer = fit(module, precision="32-true", callbacks=list(hooks))
    assert _lrs(module) == [1, 2, 2, 3, 4, 4, 5, 6]
    hooks[order[0]].hooks.remove()
    config = trainer.lr_scheduler_configs[0]
    stood = config.scheduler.last_epoch
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 2
    module.lr_scheduler_step(config.scheduler, None)  # the first one's step
    assert config.scheduler.last_epoch == stood + (order[0] == 0)
    hooks[order[1]].hooks.remove()
    assert "lr_scheduler_step" not in module.__dict__
    assert before.keys() >= {key for key in module.__dict__ if key.startswith("lr_scheduler")}
