"""What each rank of a guarded two-process run does; one rank alone is guilty, and the tests look at what came back."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_mp import NonFiniteError, make_strategy
from lightning_mp.callbacks import NonFiniteGuard
from lightning_mp.monitor.nonfinite.replay import Diagnosis, Replayer
from support import sharded_hosts
from support.fsdp2 import or_traceback, refused, whole
from support.nonfinite import BAD, Breaks, Remembers, without
from support.oracles import plan_for, stock_for
from support.running import fit
from support.zero import fp16_supported

GUILTY = 1


class Ranked(Breaks):
    """Each rank has data of its own; rank ``GUILTY`` alone breaks; under FSDP2 every layer is a unit of its own."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,), **options: Any) -> None:
        optimizer = partial(AdamW, lr=1e-3, eps=1e-4, weight_decay=0.3)
        super().__init__(how, bad, **{"optimizer": optimizer, "guilty": GUILTY, **options})

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))


class Sharded(Ranked):
    """Shards itself, as Lightning's ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for layer in [*self.net, self.net]:
            if not isinstance(layer, FSDPModule) and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Statistics(Remembers):
    """Statistics, dropout and logs, with each rank on data of its own."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,)) -> None:
        super().__init__(how, bad, guilty=GUILTY)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))


def _ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(timeout=timedelta(seconds=30), process_group_backend="gloo", **options)


HOSTS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")


def _strategy(host: str, mode: str = "32-true") -> Any:
    if host.startswith("zero"):
        config = {
            "16-mixed": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
            "bf16-mixed": {"bf16": {"enabled": True, "check_grad_overflow": False}},
        }
        return sharded_hosts.deepspeed(int(host[-1]), **config.get(mode, {}))
    return {"ddp": _ddp, "fsdp2": sharded_hosts.fsdp2, "fsdp1": sharded_hosts.fsdp1}[host]()


def _kind(host: str) -> type[Ranked]:
    return Sharded if host == "fsdp2" else Ranked


def _on(strategy: Any) -> dict[str, Any]:
    return {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}


def _weights(module: nn.Module) -> dict[str, Tensor]:
    from support.zero import weights

    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return weights(module)
    return whole(module)


def _precision(host: str, mode: str) -> dict[str, Any]:
    return {"precision": mode} if host.startswith("zero") else stock_for(mode)


def guarded(host: str, mode: str, how: str, folder: str, bad: tuple[int, ...] = (BAD,), **options: Any) -> Any:
    """A guarded run, beside one without the bad batches; ``guard`` are the guard's own arguments."""
    guard = NonFiniteGuard(run_dir=folder, **options.pop("guard", {}))
    broken, error = _kind(host)(how, bad), None
    try:
        with fp16_supported():
            fit(broken, callbacks=[guard], **options, **_on(_strategy(host, mode)), **_precision(host, mode))
    except NonFiniteError as raised:
        error = raised.rank, raised.step, raised.module
    found = {
        "events": [event.to_dict() for event in guard.events],
        "counts": (guard.skipped_steps, guard.applied_steps),
        "weights": _weights(broken),
        "files": sorted(path.name for path in Path(folder, "nonfinite").glob("*.pt")),
        "error": error,
    }
    if error is None and "weight" not in how:
        clean = _kind(host)(how, ())
        with fp16_supported():
            fit(clean, data=without(*bad), **options, **_on(_strategy(host, mode)), **_precision(host, mode))
        found["clean"] = _weights(clean)
    return found


def at_stage_0(mode: str, folder: str) -> Any:
    """DeepSpeed without ZeRO: in fp32 a guarded run, else what was said instead of running."""
    guard = NonFiniteGuard(run_dir=folder)
    host = _on(sharded_hosts.deepspeed(0))

    def fitted() -> None:
        fit(Ranked("gradient"), callbacks=[guard], precision=mode, **host)

    return refused(fitted), [(event.step, event.rank, event.module) for event in guard.events]


class Asks(Callback):
    """Has every batch replayed at its end, and keeps the answers."""

    def __init__(self) -> None:
        self.replayer, self.diagnoses = Replayer(), list[Diagnosis]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.replayer.remember(trainer, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.diagnoses.append(self.replayer.locate(trainer, pl_module))


class ByHand(Ranked):
    """The same under manual optimization."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss: Any = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def replayed(strategy: str, mode: str, how: str, kind: str = "Ranked", clip: float | None = 1.0) -> Any:
    """A run under a plan of which every batch is replayed, beside the same run without."""
    found: dict[str, Any] = {}
    for name in ("asked", "plain"):
        torch.manual_seed(1)
        plan, asks = plan_for(mode), Asks()
        module = {"Ranked": Ranked, "Statistics": Statistics, "ByHand": ByHand}[kind](how)
        made = make_strategy(strategy, plan, timeout=timedelta(seconds=30))
        callbacks = [asks] if name == "asked" else []
        torch.manual_seed(1)
        fit(module, callbacks=callbacks, plugins=[plan], gradient_clip_val=clip, **_on(made))
        found[name] = _weights(module)
        if name == "asked":
            found["diagnoses"] = [
                (diagnosis.rank, diagnosis.origin and diagnosis.origin.module, diagnosis.bad_loss, diagnosis.batch_idx)
                for diagnosis in asks.diagnoses
            ]
    return found


def rewound(host: str, folder: str) -> Any:
    """Rewinds at batch 5 to the checkpoint of step 4."""
    guard = NonFiniteGuard("rewind", run_dir=folder)
    kept: dict[str, Any] = {}

    class Keeps(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            kept[trainer.global_step] = _weights(pl_module)

    class Spoilt(_kind(host)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.add_(1)

    module = Spoilt("loss", (5,))
    saved = ModelCheckpoint(Path(folder) / "saved", every_n_train_steps=4)
    fit(module, callbacks=[guard, Keeps(), saved], enable_checkpointing=True, **_on(_strategy(host)))
    return {"kept": kept, "events": [event.action for event in guard.events], "batches": len(module.losses)}


def run(scenarios: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]) -> dict[str, Any]:
    """Each (key, function, arguments, options) in turn; a failing one leaves its traceback, and the others run."""
    results: dict[str, Any] = {}
    for key, function, arguments, options in scenarios:
        results[key] = or_traceback(partial(globals()[function], *arguments, **options))
    return results
