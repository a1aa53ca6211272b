"""What a user's run may do beside training, under any strategy, to be compared with one device on the same batches."""

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import MixedPrecisionPlan, Pin, PlanError, make_strategy
from lightning_mp.compat.lightning import LightningModule, MisconfigurationException, Trainer, callbacks
from support import sharded
from support.running import trainer as quiet_trainer

FEATURES, HIDDEN, ROWS, STEPS = 16, 32, 8, 8
#: what is refused in another exception says so: this package's errors in a step, and Lightning
REFUSING = (
    "within an accumulation window", "with ZeRO", "does not support", "not supported", "only supports",
    "which is None here",
)  # fmt: skip
#: with other rates than a checkpoint's
adamw = partial(AdamW, lr=2e-2, eps=1e-2)
#: leaves a parameter that has no gradient as it is
plain = partial(SGD, lr=1e-2)
MAY_BE_UNUSED = {"ddp": {"find_unused_parameters": True}}
#: strategies that take the options of another, and what each is told in every run
AS = {"hsdp": "fsdp2", "fsdp2_offload": "fsdp2", "deepspeed_zero3_offload": "deepspeed_zero3"}
ALWAYS = {"hsdp": {"device_mesh": (2, 1)}}
#: every ``Sequential`` is a unit
UNITS = MAY_BE_UNUSED | {
    "fsdp2": {"wrap": "Sequential"},
    "deepspeed_zero3": {"config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
}


def data(steps: int = STEPS, rows: int = ROWS) -> DataLoader[Any]:
    x = torch.randn(steps * rows, FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=rows)


class Net(LightningModule):
    """A backbone and a head; each rank trains on its rows of the global batch."""

    make_optimizer: Callable[[Any], Any] = staticmethod(adamw)
    learning_rate, batch_size = 2e-2, ROWS
    #: else ranks that run other modules wait for the one that comes to log first
    logs = True

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU())
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.head = nn.Linear(HIDDEN, 1)
        #: what a hook noted
        self.seen: dict[str, Any] = {}
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.backbone(x)))

    def loss(self, batch: Any, **options: Any) -> Tensor:
        """Each half by itself, also on one device: half-precision products round as they do on two ranks."""
        halves = range(2) if self.trainer.world_size == 1 else [self.global_rank]
        return torch.stack([self.half(batch, part, **options) for part in halves]).mean()

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        return (self(x).float() - y).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.logs:
            self.log("train_loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def train_dataloader(self) -> Any:
        return data(rows=self.batch_size)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


@dataclass
class Host:
    """Trainers of one strategy, in one mode; where nothing else is said a step is made every ``window`` batches."""

    strategy: str
    folder: Path
    mode: str = "32-true"
    window: int = 1
    pins: Any = None

    def trainer(self, strategy_options: Any = None, **options: Any) -> Trainer:
        # no gradient overflows at this scale: what a rank sums is twice what one device does
        scaling = {"init_scale": 256.0} if self.mode[:2] == "16" else None
        plan = MixedPrecisionPlan(self.mode, pins=self.pins, loss_scaling=scaling)
        options = {"accumulate_grad_batches": self.window, **options}
        if self.strategy != "single":
            own = (strategy_options or {}).get(AS.get(self.strategy, self.strategy), {})
            own = {"timeout": timedelta(seconds=60), **own, **ALWAYS.get(self.strategy, {})}
            made = make_strategy(self.strategy, plan, **own)
            options |= {"strategy": made, "devices": 2, "use_distributed_sampler": False}
        return quiet_trainer(plugins=[plan], default_root_dir=str(self.folder), **options)

    def fit(self, module: Net, ckpt_path: Any = None, **options: Any) -> Any:
        trainer = self.trainer(**options)
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        return left(trainer, module)

    def resume(self, second: Any = adamw, callback: Any = None, max_epochs: int = 2) -> Any:
        path, options = self.folder / "saved.ckpt", {"callbacks": [callback()]} if callback else {}
        trainer = self.trainer(max_steps=4, **options)
        trainer.fit(Net(), data())
        trainer.save_checkpoint(path)
        options = {"callbacks": [callback()]} if callback else {}
        return self.fit(Net(make_optimizer=second), ckpt_path=path, max_epochs=max_epochs, **options)


def left(trainer: Trainer, module: Net) -> dict[str, Any]:
    plan: Any = trainer.precision_plugin
    found: dict[str, Any] = {"weights": sharded.whole(module), "seen": module.seen}
    found["counts"] = (plan.applied_steps, plan.skipped_steps, trainer.global_step)
    if trainer.optimizers:
        found["lrs"] = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups][:1]
    return found


class ClipsItself(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"] = float(nn.utils.clip_grad_norm_(self.parameters(), 0.05))


class Changes(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3.0)


class Poisons(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        last = self.global_rank == self.trainer.world_size - 1
        for parameter in self.parameters():  # under FSDP1 and 2 this rank has a shard of some
            if parameter.grad is not None and last and self.trainer.global_step == 2:
                parameter.grad.fill_(float("inf"))


class LogsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.seen["norms"] = {name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()}


class Clamps(Net):
    gathers = False

    def on_train_batch_end(self, *rest: Any) -> None:
        import deepspeed

        parameters = list(self.head.parameters())
        partitioned = self.gathers and hasattr(parameters[0], "ds_id")
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=partitioned), torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-0.1, 0.1)


class StepsItself(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)  # warm-up by hand
        optimizer.step(closure=optimizer_closure)


class StepsRaw(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class ReturnsNone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, patience=1, threshold=10.0, factor=0.5)
        kept = {"scheduler": schedule, "interval": "step", "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": kept}


class WholeBatches(Net):
    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]).float() - batch[1]).pow(2).mean()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(HIDDEN, HIDDEN)


class OneRank(Net):
    logs = False

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        hidden = self.backbone(x)
        return (self.head(self.middle(hidden) if part else hidden).float() - y).pow(2).mean()


class Wide(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen["head"] = str(out.dtype)
        return out


class Switches(Net):
    """A part of it, its backbone, is frozen or trained from the fifth batch on."""

    unfreezes, part = True, "backbone"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        getattr(self, self.part).requires_grad_(not self.unfreezes)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            getattr(self, self.part).requires_grad_(self.unfreezes)


class OneRankSwitches(OneRank, Switches):
    make_optimizer, part = staticmethod(plain), "middle"


class Heads(Net):
    """Two heads; a half of a batch goes through those that ``used`` says, by the number of the batch."""

    make_optimizer = staticmethod(plain)
    logs = False
    sizes: tuple[int, ...] = (1, 1)
    used: Callable[[int, int], Sequence[int]] = staticmethod(lambda batch_idx, part: [batch_idx % 2])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.head
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, self.sizes[at]) for at in range(2))

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        hidden = self.middle(self.backbone(x))
        used = self.used(self.trainer.fit_loop.batch_idx, part)
        out = sum(self.heads[at](hidden).mean(1, keepdim=True) for at in used)
        return (out.float() - y).pow(2).mean()


class Penalized(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * sum(parameter.pow(2).sum() for parameter in self.parameters())


class Routed(Net):
    """A sum of experts, each a unit; each half of the batch takes its own ``ways``, in that order."""

    logs = False
    ways: tuple[str, str] = ("ab", "ab")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.middle.requires_grad_(False)
        self.a, self.b = (nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2))

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        hidden = self.backbone(x)
        out = hidden + sum(getattr(self, way)(hidden) for way in self.ways[part])
        return (self.head(out).float() - y).pow(2).mean()


class Normed(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.GELU())


class Manual(Net):
    bare, window, poisons = False, 1, False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss(batch) / self.window
        loss.backward() if self.bare else self.manual_backward(loss)
        if self.poisons and batch_idx == 2:
            found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            if self.global_rank == self.trainer.world_size - 1:
                torch._foreach_mul_(found, float("inf"))
        if (batch_idx + 1) % self.window == 0:
            if len(optimizers) == 1 and not self.bare:
                self.clip_gradients(optimizers[0], gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


class Adversaries(Net):
    """A GAN: each net is toggled for a loss of its own; ``ahead``, both forward passes come first."""

    ahead = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def half(self, batch: Any, part: int, judged: bool = False) -> Tensor:
        made = self.middle(self.backbone(batch[0].chunk(2)[part]))
        return (self.head(made.detach() if judged else made).float() - float(judged)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [self.loss(batch, judged=judged) for judged in (False, True)] if self.ahead else []
        for judged, optimizer in zip((False, True), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(losses[judged] if losses else self.loss(batch, judged=judged))
            self.untoggle_optimizer(optimizer)
            optimizer.step()
            optimizer.zero_grad()  # after the step: what the other loss left behind is stepped on

    def configure_optimizers(self) -> Any:
        maker = [*self.backbone.parameters(), *self.middle.parameters()]
        return [plain(maker), plain(self.head.parameters())]


class FailsOnce(Net):
    healed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and not self.healed:
            self.healed = True
            loss.register_hook(lambda gradient: {}["planned"])
        return loss


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [adamw([*self.backbone.parameters(), *self.middle.parameters()]), SGD(self.head.parameters(), lr=1e-2)]


def lr_finder(host: Host) -> dict[str, Any]:
    module, trainer = WholeBatches(), host.trainer()  # Lightning looks at the losses of one rank
    found = Tuner(trainer).lr_find(module, data(), num_training=6, update_attr=False, early_stop_threshold=None)
    losses = [float(loss) for loss in found.results["loss"]]
    trainer.fit(module, data())
    return left(trainer, module) | {"losses": losses}


def batch_size_scaler(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer()
    size = Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=2, init_val=4, max_trials=2)
    trainer.fit(module)
    return left(trainer, module) | {"size": size}


def evaluated(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer(val_check_interval=4)
    trainer.fit(module, data(), data(2))
    found = left(trainer, module) | {"val_loss": float(trainer.callback_metrics["val_loss"])}
    found["validate"] = trainer.validate(module, data(2), verbose=False)[0]
    found["predict"] = torch.cat(trainer.predict(module, data(2))).float()
    return found | {"test": trainer.test(module, data(2), verbose=False)[0]}


def best_checkpoint_tested(host: Host) -> dict[str, Any]:
    best = callbacks.ModelCheckpoint(dirpath=host.folder / "best", monitor="val_loss", save_top_k=1)
    module, trainer = Net(), host.trainer(callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, data(), data(2))
    return left(trainer, module) | {"test": trainer.test(module, data(2), ckpt_path="best", verbose=False)[0]}


def saved_weights_tested(host: Host) -> dict[str, Any]:
    saves = callbacks.ModelCheckpoint(dirpath=host.folder / "weights", save_weights_only=True)
    trainer = host.trainer(callbacks=[saves], enable_checkpointing=True)
    trainer.fit(Net(), data())
    module, again = Net(), host.trainer()
    return {"test": again.test(module, data(2), ckpt_path=saves.best_model_path, verbose=False)[0]}


def saved_after_validation(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer()
    trainer.fit(module, data())
    trainer.validate(module, data(2), verbose=False)
    trainer.save_checkpoint(host.folder / "late.ckpt")
    return left(trainer, module)


def batch_norm_evaluated(host: Host) -> dict[str, Any]:
    saves = callbacks.ModelCheckpoint(dirpath=host.folder / "norm", save_last=True)
    module, trainer = Normed(), host.trainer(callbacks=[saves], enable_checkpointing=True)
    trainer.fit(module, data(), data(2))
    live = float(trainer.callback_metrics["val_loss"])
    tested = trainer.test(module, data(2), verbose=False)[0]["test_loss"]
    saved = trainer.test(module, data(2), ckpt_path=saves.last_model_path, verbose=False)[0]["test_loss"]
    return {"apart": [live - saved, tested - saved]}


def fit_twice(host: Host) -> dict[str, Any]:
    module, trainer = Net(), host.trainer()
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    return left(trainer, module)


def a_head_that_sums_in_fp32(host: Host) -> dict[str, Any]:
    half = "fp16" if host.mode == "16-mixed" else "bf16"
    return replace(host, pins=[Pin("head", half, accumulate="fp32")]).fit(Wide())


def fit_after_a_failure(host: Host) -> dict[str, Any]:
    module = FailsOnce()
    with suppress(KeyError):
        host.trainer().fit(module, data())
    return host.fit(module)


def early_stopping(host: Host) -> dict[str, Any]:
    stop = callbacks.EarlyStopping("val_loss", min_delta=1e3, patience=1)
    module, trainer = Net(), host.trainer(callbacks=[stop], max_epochs=6)
    trainer.fit(module, data(), data(2))
    return left(trainer, module)


def _fits(make: Callable[[], Net] = Net, callback: Any = None, **options: Any) -> Callable[[Host], dict[str, Any]]:
    return lambda host: host.fit(make(), **options, **({"callbacks": [callback()]} if callback else {}))


_ema = partial(callbacks.EMAWeightAveraging, decay=0.5)
_swa = partial(callbacks.StochasticWeightAveraging, 1e-2, swa_epoch_start=1, annealing_epochs=1)
_finetuning = partial(callbacks.BackboneFinetuning, unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
_pruning = partial(callbacks.ModelPruning, "l1_unstructured", amount=0.5)
_schedule = partial(callbacks.GradientAccumulationScheduler, {0: 1, 1: 3})
_some = partial(Net, make_optimizer=lambda parameters: adamw(parameters[2:]))


def _own_head(batch_idx: int, part: int) -> Sequence[int]:
    """Both heads in the first batch, each rank's own afterwards."""
    return [part] if batch_idx else [0, 1]


def _routed(*ways: str) -> Callable[[Host], dict[str, Any]]:
    return _fits(partial(Routed, ways=ways), strategy_options=UNITS)


_unused = partial(_fits, strategy_options=MAY_BE_UNUSED)
FEATURE: dict[str, Callable[[Host], dict[str, Any]]] = {
    "clips_in_a_hook": _fits(ClipsItself),
    "changes_before_the_step": _fits(Changes),
    "poisons_before_the_step": _fits(Poisons),
    "logs_grad_norm": _fits(LogsNorms),
    "clamps_weights_after_the_step": _fits(Clamps),
    "clamps_gathered_weights": _fits(partial(Clamps, gathers=True)),
    "clips_by_norm": _fits(gradient_clip_val=0.05),
    "clips_by_value": _fits(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "accumulates": _fits(accumulate_grad_batches=3, gradient_clip_val=0.05),
    "accumulates_on_a_schedule": _fits(callback=_schedule, max_epochs=2),
    "a_layer_is_never_used": _unused(Unused),
    "a_layer_is_used_on_one_rank": _unused(OneRank),
    "backbone_finetuning": _fits(callback=_finetuning, max_epochs=3),
    "unfreezes_by_hand": _fits(Switches),
    "freezes_by_hand": _unused(partial(Switches, unfreezes=False)),
    "freezes_in_the_midst_of_a_window": _unused(
        partial(Switches, unfreezes=False, make_optimizer=plain), accumulate_grad_batches=3
    ),
    "unfreezes_in_the_midst_of_a_window": _fits(partial(Switches, make_optimizer=plain), accumulate_grad_batches=3),
    "one_rank_freezes_in_the_midst_of_a_window": _unused(
        partial(OneRankSwitches, unfreezes=False), accumulate_grad_batches=3
    ),
    "one_rank_unfreezes_in_the_midst_of_a_window": _unused(OneRankSwitches, accumulate_grad_batches=3),
    "heads_by_turns": _unused(Heads),
    "heads_by_turns_in_a_window": _unused(Heads, accumulate_grad_batches=2),
    "a_head_a_rank": _unused(partial(Heads, used=_own_head)),
    "a_head_a_rank_of_other_sizes": _unused(partial(Heads, used=_own_head, sizes=(1, 3))),
    "all_weights_in_the_loss": _fits(Penalized, strategy_options=UNITS),
    "ranks_use_the_same_units": _routed("ab", "ab"),
    "a_unit_is_used_on_one_rank": _routed("a", "ab"),
    "ranks_run_units_in_opposite_orders": _routed("ab", "ba"),
    "manual_optimization": _fits(Manual),
    "manual_accumulation": _fits(partial(Manual, window=2)),
    "manual_bare_backward": _fits(partial(Manual, bare=True)),
    "manual_poisons_after_backward": _fits(partial(Manual, poisons=True)),
    "two_optimizers": _fits(Two),
    "two_optimizers_of_a_gan": _unused(Adversaries),
    "two_optimizers_of_a_gan_after_both_forwards": _unused(partial(Adversaries, ahead=True)),
    "an_optimizer_of_some_parameters": _fits(_some),
    "resumed_with_fused": lambda host: host.resume(partial(adamw, fused=True)),
    "resumed_with_other_hyperparameters": lambda host: host.resume(partial(adamw, lr=5e-3, weight_decay=0.5)),
    "optimizer_step_is_overridden": _fits(StepsItself),
    "optimizer_step_calls_the_raw_optimizer": _fits(StepsRaw),
    "training_step_returns_none": _fits(ReturnsNone),
    "plateau_by_step": _fits(Plateau),
    "swa": _fits(callback=_swa, max_epochs=4),
    "ema": _fits(callback=_ema),
    "ema_resumed": lambda host: host.resume(callback=_ema),
    "pruning": _fits(callback=_pruning, max_epochs=2),
}
_OWN = lr_finder, batch_size_scaler, evaluated, best_checkpoint_tested, saved_weights_tested, saved_after_validation
_OWN += batch_norm_evaluated, fit_twice, a_head_that_sums_in_fp32, fit_after_a_failure, early_stopping
FEATURE |= {one.__name__: one for one in _OWN}
#: in which windows a feature's steps are made is its own affair, or the user's by hand
OWN_WINDOWS = {
    name for name in FEATURE if name.startswith(("accumulates", "manual", "two_optimizers", "heads_by_turns"))
}
OWN_WINDOWS |= {name for name in FEATURE if name.endswith("in_the_midst_of_a_window")}


def ran(name: str, strategy: str, folder: str, mode: str, window: int) -> dict[str, Any]:
    import torch.distributed as dist

    if strategy != "single" and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        with warnings.catch_warnings():  # what a warning says that a result is not: as good as refused
            warnings.filterwarnings("error", message=".*which is None here")
            return FEATURE[name](Host(strategy, Path(folder), mode, window))
    except (PlanError, MisconfigurationException, NotImplementedError) as error:
        return {"refused": str(error)}
    except Exception as error:
        refused = any(word in str(error) for word in REFUSING)
        return {"refused": str(error)} if refused else {"failed": traceback.format_exc()}
