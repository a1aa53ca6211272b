"""What each rank of a run under FSDP1 does beyond what :mod:`support.sharded` has; the tests look at what came back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_mp import LossScaling
from lightning_mp.modules.patterns import plain_name
from support import hf
from support.collectives import recorded
from support.manual import Manual
from support.models import FEATURES, weights
from support.oracles import plan_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.sharded import PINS, Both, Language, Ranked, RefusedWay, ddp, fsdp1, trained

Even = partial(Ranked, even=True)


# ------------------------------------------------------------------ dtypes


@dataclass(frozen=True)
class Dtypes:
    """What is stored, gathered, normed, handed on and reduced."""

    mode: str
    options: dict[str, Any]

    def run(self) -> dict[str, Any]:
        seen: dict[str, set[str]] = {"handed on": set()}
        stored: dict[str, str] = {}

        class Watched(Ranked):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                stored.update({plain_name(n): str(p.dtype).removeprefix("torch.") for n, p in self.named_parameters()})
                note = self.net[1].register_forward_hook(lambda _m, _a, out: seen["handed on"].add(str(out.dtype)[6:]))
                with note:
                    return super().training_step(batch, batch_idx)

        with recorded(seen):
            trained(self.mode, fsdp1(), Watched(even=True), **self.options)
        return {"stored": stored, **seen}


# ------------------------------------------------------------------ checkpoints


@dataclass(frozen=True)
class Saved:
    """One host saves after step 4 and runs to the end; then each host goes on from what was saved."""

    folder: Path
    saver: str
    state: str
    optimizer: str

    def run(self) -> dict[str, Any]:
        hosts: dict[str, Callable[[], Any]] = {"ddp": ddp, "fsdp1": partial(fsdp1, state_dict_type=self.state)}
        scaling = LossScaling(init_scale=32.0, hysteresis=2, growth_interval=5)

        def run(host: str, bad: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
            options |= {"pins": PINS, "loss_scaling": scaling, "data": ResumableBatches()}
            return trained("16-mixed", hosts[host](), Even(bad, self.optimizer), **options)

        save = SaveAt(self.folder / f"{self.saver} {self.state} {self.optimizer}", 4)
        runs = {"to the end": run(self.saver, (1,), callbacks=[save])}
        path = save.folder / "4.ckpt"
        for host in hosts if self.state == "full" else ("fsdp1",):
            runs[host] = run(host, ckpt_path=path)
        file, notes = path / "meta.pt" if path.is_dir() else path, None
        if self.saver == "fsdp1":
            notes = torch.load(file, weights_only=False)["lightning_mp"]
        return {"runs": runs, "folder": path.is_dir(), "notes": notes}


class AtStart(Callback):
    """Saves before the first step, over whatever lies there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@dataclass(frozen=True)
class Overwritten:
    """Formats saved over each other, before any optimizer has state; each run, and one from its checkpoint."""

    folder: Path

    def run(self) -> list[tuple[Any, Any]]:
        path, found = self.folder / "start.ckpt", []
        for state in ("full", "sharded", "full"):
            first = trained("16-mixed", fsdp1(state_dict_type=state), Even(), callbacks=[AtStart(path)])
            found.append((first, trained("16-mixed", fsdp1(state_dict_type=state), Even(), ckpt_path=path)))
        return found


# ------------------------------------------------------------------ models


@dataclass(frozen=True)
class Transformers:
    """A transformers model under both hosts; how it was cut."""

    kind: str
    mode: str
    options: dict[str, Any]

    def run(self) -> dict[str, Any]:
        units: set[str] = set()

        class Cut(Language):
            def on_train_end(self) -> None:
                parts = self.trainer.strategy.model.named_modules()
                cut = {plain_name(n) for n, m in parts if n and isinstance(m, FullyShardedDataParallel)}
                units.update(name.removeprefix("module.") for name in cut)

        options = {"data": hf.token_batches(8), **self.options}
        found = Both(self.mode, partial(Cut, self.kind), options, {"wrap": None}, "fsdp1").run()
        return {**found, "units": units}


@dataclass(frozen=True)
class DifferentStarts:
    """Ranks that start from different weights."""

    def run(self) -> dict[str, Any]:
        module = Even()
        start = weights(module)
        for parameter in module.parameters():
            parameter.data.add_(float(os.environ["RANK"]))
        return {"start": start, **trained("32-true", fsdp1(), module, limit_train_batches=0)}


@dataclass(frozen=True)
class OnMeta:
    """A module that is made on the meta device, and with fewer weights on each rank than the world has processes."""

    def run(self) -> dict[str, Any]:
        class Late(Ranked):
            def configure_model(self) -> None:
                if next(self.net.parameters()).device.type != "meta":
                    with torch.device("meta"):
                        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))

        torch.manual_seed(3 + int(os.environ["RANK"]))
        return trained("bf16-true", fsdp1(), Late(even=True), pins=PINS)


class Frozen(Ranked):
    """Some parameters do not train."""

    def __init__(self) -> None:
        super().__init__(optimizer="groups", even=True)
        self.net[0].requires_grad_(False)
        self.net[1].bias.requires_grad_(False)


# ------------------------------------------------------------------ refusals


class Wrapped(Ranked):
    """It wraps a layer itself."""

    def configure_model(self) -> None:
        if not isinstance(self.net[0], FullyShardedDataParallel):
            self.net[0] = FullyShardedDataParallel(self.net[0], device_id=torch.device("cpu"))


class WithIntegers(Ranked):
    """It holds a parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)


def _fitted(module: LightningModule, **strategy: Any) -> Any:
    return fit(module, plugins=[plan_for("bf16-mixed")], **fsdp1(**strategy))


def _ignoring(module: Ranked) -> Any:
    return _fitted(module, ignored_states=[module.net[0].weight])


def _stored_twice() -> None:
    module = Even()
    fit(module, plugins=[plan_for("32-true")], **fsdp1())
    plan, host = plan_for("bf16-true", reduce_dtype="bf16"), fsdp1(sharding_strategy="NO_SHARD")
    fit(module, plugins=[plan], **host)


WAYS: dict[str, Callable[[], Any]] = {
    "wrapped": lambda: _fitted(Wrapped()),
    "integer": lambda: _fitted(WithIntegers()),
    "manual": lambda: _fitted(Manual()),
    "ignored": lambda: _ignoring(Ranked()),
    "no plan": lambda: fit(Ranked(), precision="bf16-mixed", **fsdp1()),
    "wrap": lambda: _fitted(Ranked(), wrap="Lineal"),
    "mesh": lambda: _fitted(Ranked(), device_mesh=(2, 2), sharding_strategy="HYBRID_SHARD"),
    "one shard": lambda: _fitted(Ranked(), device_mesh=(2, 1), sharding_strategy="HYBRID_SHARD"),
    "another plan": _stored_twice,
}


Refused = partial(RefusedWay, "support.fsdp1")
