"""What each rank of a guarded two-process run does; one rank alone is guilty, and the tests look at what came back."""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import AdamW

from lightning_mp import NonFinite, NonFiniteError, make_strategy
from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.callbacks import NonFiniteGuard
from lightning_mp.plan.diagnosis import Diagnosis
from support import sharded_hosts
from support.nonfinite import BAD, Breaks, without
from support.oracles import plan_for, stock_for
from support.running import fit
from support.sharded import ddp, on, refused, whole

GUILTY = 1


class Ranked(Breaks):
    """Each rank has data of its own; rank ``GUILTY`` alone breaks; under FSDP2 every layer is a unit of its own."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,), **options: Any) -> None:
        optimizer = partial(AdamW, lr=1e-3, eps=1e-4, weight_decay=0.3)
        super().__init__(how, bad, **{"optimizer": optimizer, "guilty": GUILTY, **options})

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))


class Sharded(Ranked):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for layer in [*self.net, self.net]:
            if not isinstance(layer, FSDPModule) and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


HOSTS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")


def _host(name: str) -> dict[str, Any]:
    return ddp() if name == "ddp" else on(getattr(sharded_hosts, name)())


def _kind(host: str) -> type[Ranked]:
    return Sharded if host == "fsdp2" else Ranked


@dataclass(frozen=True)
class Guarded:
    host: str
    mode: str
    how: str
    folder: Path
    bad: tuple[int, ...] = (BAD,)
    #: the guard's own, and the Trainer's
    guard: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / f"{self.host}_{self.mode}_{self.how}_{self.bad}"

    def _fit(self, module: Ranked, **options: Any) -> None:
        fit(module, **options, **self.options, **_host(self.host), **stock_for(self.mode))

    def run(self) -> dict[str, Any]:
        guard, error = NonFiniteGuard(run_dir=self.run_dir, **self.guard), None
        broken = _kind(self.host)(self.how, self.bad)
        try:
            self._fit(broken, callbacks=[guard])
        except NonFiniteError as raised:
            error = raised.rank, raised.step, raised.module
        found = {
            "events": [event.to_dict() for event in guard.events],
            "counts": (guard.skipped_steps, guard.applied_steps),
            "weights": whole(broken),
            "files": sorted(path.name for path in (self.run_dir / "nonfinite").glob("*.pt")),
            "error": error,
        }
        if error is None and self.how != "weight":
            clean = _kind(self.host)(self.how, ())
            self._fit(clean, data=without(*self.bad))
            found["clean"] = whole(clean)
        return found


@dataclass(frozen=True)
class UnderDeepSpeed:
    folder: Path

    def run(self) -> str:
        guard, host = NonFiniteGuard(run_dir=self.folder), on(sharded_hosts.deepspeed(2))
        return refused(lambda: fit(Ranked("gradient"), callbacks=[guard], **host))


@dataclass(frozen=True)
class NoFolder:
    folder: Path

    def run(self) -> str:
        return refused(lambda: fit(Ranked("gradient"), callbacks=[NonFiniteGuard(run_dir=self.folder)], **ddp()))


class Asks(Callback):
    def __init__(self) -> None:
        self.replayer, self.diagnoses = Replayer(), list[Diagnosis]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.replayer.remember(trainer, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.diagnoses.append(self.replayer.locate(trainer))


@dataclass(frozen=True)
class Replayed:
    """A run under a plan of which every batch is replayed, beside the same run without."""

    strategy: str
    mode: str
    how: str

    def run(self) -> dict[str, Any]:
        asks = Asks()
        asked, plain = self._weights(asks), self._weights()
        diagnoses = [(found.rank, found.origin and found.origin.module, found.bad_loss) for found in asks.diagnoses]
        batches = [found.batch_idx for found in asks.diagnoses]
        return {"asked": asked, "plain": plain, "diagnoses": diagnoses, "batches": batches}

    def _weights(self, *callbacks: Callback) -> dict[str, Tensor]:
        torch.manual_seed(1)
        plan, module = plan_for(self.mode), Ranked(self.how)
        strategy = make_strategy(self.strategy, plan, timeout=timedelta(seconds=30))
        torch.manual_seed(1)
        fit(module, callbacks=list(callbacks), plugins=[plan], gradient_clip_val=1.0, **on(strategy))
        return whole(module)


@dataclass(frozen=True)
class Rewound:
    """Rewinds at batch 5 to the checkpoint of step 4: a guard on a stock strategy, or a plan on its own."""

    host: str
    folder: Path
    planned: bool = False

    def _who(self) -> dict[str, Any]:
        if not self.planned:
            return {"callbacks": [NonFiniteGuard("rewind", run_dir=self.folder)], **_host(self.host)}
        rule = NonFinite(max_consecutive=0, on_budget="rewind", save_batch=True, run_dir=str(self.folder))
        plan = plan_for("32-true", nonfinite=rule)
        name = f"deepspeed_{self.host}" if self.host.startswith("zero") else self.host
        strategy = make_strategy(name, plan, timeout=timedelta(seconds=60))
        return {"callbacks": [], "plugins": [plan], **on(strategy)}

    def run(self) -> dict[str, Any]:
        kept: dict[int, Any] = {}

        class Keeps(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
                kept[trainer.global_step] = whole(pl_module)

        # a plan refuses weights that are changed behind ZeRO's partitions: there the step of batch 4 is what is undone
        spoils = not (self.planned and self.host.startswith("zero"))

        class Spoilt(Ranked if self.planned else _kind(self.host)):  # type: ignore[misc]
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if batch_idx == 5 and spoils:
                    with torch.no_grad():
                        for parameter in self.parameters():
                            parameter.add_(1)

        module, who = Spoilt("loss", (5,)), self._who()
        callbacks = [*who.pop("callbacks"), Keeps(), ModelCheckpoint(self.folder / "saved", every_n_train_steps=4)]
        fit(module, callbacks=callbacks, enable_checkpointing=True, **who)
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return {
            "kept": kept,
            "events": [json.loads(line)["action"] for line in lines],
            "files": sorted(path.name for path in (self.folder / "nonfinite").glob("*.pt")),
            "batches": len(module.losses),
        }
