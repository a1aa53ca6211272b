"""The features that are loops, schedules, averages and resumes, as functions of a host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.tuner import Tuner
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from conformance.optimizers import Lamb
from lightning_mp.compat.lightning import Callback, callbacks
from support.features import STEPS, Host, Net, data, feature, left


@feature
def lamb(host: Host) -> dict[str, Any]:
    return host.fit(Net(make_optimizer=partial(Lamb, lr=1e-2)))


def _groups(parameters: Any) -> AdamW:
    bias = [p for p in parameters if p.ndim < 2]
    groups = [{"params": bias, "weight_decay": 0.0}, {"params": [p for p in parameters if p.ndim > 1], "lr": 1e-3}]
    return AdamW(groups, lr=1e-2, eps=1e-2)


@feature
def parameter_groups(host: Host) -> dict[str, Any]:
    return host.fit(Net(make_optimizer=_groups))


def _some(parameters: Any) -> AdamW:
    return AdamW(parameters[2:], lr=1e-2, eps=1e-2)


@feature
def an_optimizer_of_some_parameters(host: Host) -> dict[str, Any]:
    return host.fit(Net(make_optimizer=_some))


def _resume(host: Host, first: Any, second: Any, **module: Any) -> dict[str, Any]:
    path = host.folder / "saved.ckpt"
    trainer = host.trainer(max_steps=4)
    trainer.fit(Net(make_optimizer=first), data())
    trainer.save_checkpoint(path)
    return host.fit(Net(make_optimizer=second), loader=data(), ckpt_path=path, max_epochs=2)


@feature
def resumed(host: Host) -> dict[str, Any]:
    same = partial(AdamW, lr=1e-2, eps=1e-2)
    return _resume(host, same, same)


@feature
def resumed_with_fused(host: Host) -> dict[str, Any]:
    return _resume(host, partial(AdamW, lr=1e-2, eps=1e-2), partial(AdamW, lr=1e-2, eps=1e-2, fused=True))


@feature
def resumed_with_other_hyperparameters(host: Host) -> dict[str, Any]:
    return _resume(host, partial(AdamW, lr=1e-2, eps=1e-2), partial(AdamW, lr=5e-3, eps=1e-2, weight_decay=0.5))


class _StepsItself(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)  # warm-up by hand
        optimizer.step(closure=optimizer_closure)


@feature
def optimizer_step_is_overridden(host: Host) -> dict[str, Any]:
    return host.fit(_StepsItself())


class _StepsRaw(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


@feature
def optimizer_step_calls_the_raw_optimizer(host: Host) -> dict[str, Any]:
    return host.fit(_StepsRaw())


class _None(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


@feature
def training_step_returns_none(host: Host) -> dict[str, Any]:
    return host.fit(_None())


# ---------------------------------------------------------------------- schedules and averages


@feature
def plateau_by_step(host: Host) -> dict[str, Any]:
    make = partial(ReduceLROnPlateau, patience=1, threshold=10.0, factor=0.5)
    return host.fit(Net(make_scheduler=make, monitor="train_loss"))


@feature
def one_cycle(host: Host) -> dict[str, Any]:
    return host.fit(Net(make_scheduler=partial(OneCycleLR, max_lr=1e-2, total_steps=STEPS)))


def _swa() -> Callback:
    return callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)


@feature
def swa(host: Host) -> dict[str, Any]:
    return host.fit(Net(), callbacks=[_swa()], max_epochs=4)


@feature
def ema(host: Host) -> dict[str, Any]:
    return host.fit(Net(), callbacks=[callbacks.EMAWeightAveraging(decay=0.5)])


@feature
def ema_resumed(host: Host) -> dict[str, Any]:
    path = host.folder / "ema.ckpt"
    trainer = host.trainer(max_steps=4, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)])
    trainer.fit(Net(), data())
    trainer.save_checkpoint(path)
    return host.fit(Net(), ckpt_path=path, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)], max_epochs=2)


@feature
def pruning(host: Host) -> dict[str, Any]:
    return host.fit(Net(), callbacks=[callbacks.ModelPruning("l1_unstructured", amount=0.5)], max_epochs=2)


# ---------------------------------------------------------------------- loops


class _Whole(Net):
    def mine(self, batch: Any) -> Any:
        return batch


@feature
def lr_finder(host: Host) -> dict[str, Any]:
    module = _Whole()  # Lightning looks at the losses of one rank
    trainer = host.trainer()
    found = Tuner(trainer).lr_find(module, data(), num_training=6, update_attr=False, early_stop_threshold=None)
    losses = [float(loss) for loss in found.results["loss"]]
    trainer.fit(module, data())
    return left(trainer, module) | {"losses": losses}


class _OwnLoader(Net):
    def train_dataloader(self) -> Any:
        return data(rows=self.batch_size)

    def val_dataloader(self) -> Any:
        return data(2, rows=self.batch_size)


@feature
def batch_size_scaler(host: Host) -> dict[str, Any]:
    module = _OwnLoader()
    trainer = host.trainer()
    size = Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=2, init_val=4, max_trials=2)
    trainer.fit(module)
    return left(trainer, module) | {"size": size}


def _evaluate(trainer: Any, module: Any) -> dict[str, Any]:
    found = {"validate": trainer.validate(module, data(2), verbose=False)[0]}
    found["test"] = trainer.test(module, data(2), verbose=False)[0]
    found["predict"] = torch.cat(trainer.predict(module, data(2))).float()
    return found


@feature
def evaluated_after_fit(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer()
    trainer.fit(module, data())
    return left(trainer, module) | _evaluate(trainer, module)


@feature
def evaluated_between(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer(val_check_interval=4)
    trainer.fit(module, data(), data(2))
    return left(trainer, module) | {"val_loss": float(trainer.callback_metrics["val_loss"])}


@feature
def fit_twice(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer()
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    return left(trainer, module)


@feature
def best_checkpoint_tested(host: Host) -> dict[str, Any]:
    module = Net()
    keep = callbacks.ModelCheckpoint(dirpath=host.folder / "best", monitor="val_loss", save_top_k=1)
    trainer = host.trainer(callbacks=[keep], val_check_interval=4, enable_checkpointing=True)
    trainer.fit(module, data(), data(2))
    return left(trainer, module) | {"test": trainer.test(module, data(2), ckpt_path="best", verbose=False)[0]}


@feature
def early_stopping(host: Host) -> dict[str, Any]:
    stop = callbacks.EarlyStopping("val_loss", min_delta=1e3, patience=1)
    module, trainer = Net(), host.trainer(callbacks=[stop], max_epochs=6)
    trainer.fit(module, data(), data(2))
    return left(trainer, module)
