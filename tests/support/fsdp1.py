"""What each rank of a run under FSDP1 does, beside the same run under DDP; the tests look at what came back."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_mp import LossScaling, NonFinite, NonFiniteError, PlanError
from lightning_mp.modules.patterns import plain_name
from lightning_mp.strategies.fsdp1.strategy import PlanFSDP1Strategy
from support import hf
from support.collectives import recorded
from support.manual import Manual
from support.models import FEATURES, InfiniteGradient, Regression, batches, weights
from support.oracles import plan_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt

_WAIT = {"timeout": timedelta(seconds=30), "process_group_backend": "gloo"}
BAD_RANK, BAD_STEP = 1, 2
PINS = {"LayerNorm": "fp32"}


def _by_dimension(parameters: Any) -> Any:
    """Groups as most training scripts make them: no decay for what has one dimension, and that group first."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3}]
    return AdamW([*groups, {"params": [p for p in parameters if p.dim() > 1]}], lr=1e-2, eps=1e-4, weight_decay=0.3)


OPTIMIZERS: dict[str, Any] = {
    "fused": partial(AdamW, lr=1e-2, eps=1e-4, fused=True),
    "plain": partial(SGD, lr=1e-3, momentum=0.9),
    "bare": partial(SGD, lr=1e-3),
    "groups": _by_dimension,
    "adagrad": partial(Adagrad, lr=1e-2, initial_accumulator_value=0.5),
}


def ddp() -> dict[str, Any]:
    """Trainer arguments: both ranks on the CPU, their own data, and no waiting for ever."""
    return {
        "strategy": DDPStrategy(**_WAIT),
        "devices": int(os.environ["WORLD_SIZE"]),
        "use_distributed_sampler": False,
    }


def fsdp1(**options: Any) -> dict[str, Any]:
    """The same under FSDP1; every linear layer is a unit."""
    options.setdefault("wrap", "Linear")
    return {
        "strategy": PlanFSDP1Strategy(**_WAIT, **options),
        "devices": int(os.environ["WORLD_SIZE"]),
        "use_distributed_sampler": False,
    }


class Ranked(Regression):
    """Each rank has its own data; on rank ``BAD_RANK`` alone the gradient of the net's output overflows.

    ``even`` nets are split into whole vectors of the CPU's. Torch rounds what is left over from a vector another way,
    so that a step on a piece of a tensor is, to the last bit, the step on the whole only where nothing is left over.
    """

    def __init__(
        self, bad: tuple[int, ...] = (), optimizer: str = "fused", schedule: bool = False, even: bool = True
    ) -> None:
        super().__init__(OPTIMIZERS[optimizer], partial(StepLR, step_size=1, gamma=0.5) if schedule else None)
        self.bad = bad
        if even:
            generator = torch.Generator().manual_seed(5)
            self.net = nn.Sequential(
                nn.Linear(FEATURES, 64, bias=False), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 2, bias=False)
            )
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.normal_(0.0, 0.1, generator=generator)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net(x * (1 + self.global_rank))
        if self.training and self.global_rank == BAD_RANK and self.trainer.global_step in self.bad:
            out = InfiniteGradient.apply(out)
        return (out.float() - y.float()).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Seen(Callback):
    """The plan's readings after each step."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.skipped.append(plan.step_skipped)
        if plan.scaler is not None:
            self.scales.append(plan.scaler.get_scale())
        if plan.last_grad_norm is not None:
            self.norms.append(plan.last_grad_norm.item())


def whole(runner: Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full, under its own name."""
    model = runner.strategy.model
    if not isinstance(model, FullyShardedDataParallel):
        return weights(module)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {plain_name(name): value for name, value in weights(module).items()}


def trained(
    mode: str, host: dict[str, Any], module: LightningModule, data: Any = None, **options: Any
) -> dict[str, Any]:
    """One run, and what is left of it."""
    of_plan = {key: options.pop(key) for key in ("pins", "reduce_dtype", "checkpointing") if key in options}
    plan, seen = plan_for(mode, options.pop("loss_scaling", None), **of_plan), Seen()
    callbacks = [seen, *options.pop("callbacks", ())]
    runner = fit(module, plugins=[plan], callbacks=callbacks, data=data, **options, **host)
    return {
        "weights": whole(runner, module),
        "skipped": seen.skipped,
        "scales": seen.scales,
        "norms": seen.norms,
        "counts": (plan.applied_steps, plan.skipped_steps),
        "losses": list(getattr(module, "losses", ())),
        "lrs": list(getattr(module, "lrs", ())),
    }


def both(mode: str, module: dict[str, Any], options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    """The same run under DDP and under FSDP1."""
    return {
        "ddp": trained(mode, ddp(), Ranked(**module), **options),
        "fsdp1": trained(mode, fsdp1(**strategy), Ranked(**module), **options),
    }


# ------------------------------------------------------------------ dtypes


def dtypes(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is stored, gathered, normed, handed on and reduced."""
    seen: dict[str, set[str]] = {}
    stored: dict[str, str] = {}

    class Watched(Ranked):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            stored.update({plain_name(n): str(p.dtype).removeprefix("torch.") for n, p in self.named_parameters()})
            handle = self.net[1].register_forward_hook(lambda _m, _a, out: seen["handed on"].add(str(out.dtype)[6:]))
            seen.setdefault("handed on", set())
            try:
                return super().training_step(batch, batch_idx)
            finally:
                handle.remove()

    with recorded(seen):
        trained(mode, fsdp1(), Watched(), **options)
    return {"stored": stored, **seen}


# ------------------------------------------------------------------ checkpoints


def checkpoint(folder: str, saver: str, state: str, optimizer: str) -> dict[str, Any]:
    """One host saves after step 4 and runs to the end; then each host goes on from what was saved."""
    hosts: dict[str, Callable[[], dict[str, Any]]] = {"ddp": ddp, "fsdp1": lambda: fsdp1(state_dict_type=state)}
    scaling = LossScaling(init_scale=32.0, hysteresis=2, growth_interval=5)
    options: dict[str, Any] = {"pins": PINS, "loss_scaling": scaling}
    save = SaveAt(Path(folder) / f"{saver} {state} {optimizer}", 4)
    module = Ranked((1,), optimizer)
    runs = {"to the end": trained("16-mixed", hosts[saver](), module, ResumableBatches(), callbacks=[save], **options)}
    path = save.folder / "4.ckpt"
    for name, host in hosts.items():
        if name == "fsdp1" or state == "full":
            module = Ranked(optimizer=optimizer)
            runs[name] = trained("16-mixed", host(), module, ResumableBatches(), ckpt_path=path, **options)
    notes = None
    if saver == "fsdp1":
        notes = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)["lightning_mp"]
    return {"runs": runs, "folder": path.is_dir(), "notes": notes}


class AtStart(Callback):
    """Saves before the first step, over whatever lies there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def overwritten(folder: str) -> dict[str, Any]:
    """Formats saved over each other, before any optimizer has state; each run, and one from its checkpoint."""
    path, found = Path(folder) / "start.ckpt", {}
    for step, state in enumerate(("full", "sharded", "full")):
        host = partial(fsdp1, state_dict_type=state)
        first = trained("16-mixed", host(), Ranked(), callbacks=[AtStart(path)])
        found[f"{step} {state}"] = first, trained("16-mixed", host(), Ranked(), ckpt_path=path)
    return found


# ------------------------------------------------------------------ several runs


def again(how: str) -> dict[str, Any]:
    """The same module run twice, or validated before it is trained."""
    found = {}
    for name, host in (("ddp", ddp), ("fsdp1", fsdp1)):
        module, plan = Ranked((1,)), plan_for("16-mixed", pins=PINS)
        runner = trainer(plugins=[plan], **host())
        if how == "validate":
            runner.validate(module, batches(), verbose=False)
        else:
            runner.fit(module, batches(), batches())
        if how == "new trainer":
            runner = trainer(plugins=[plan_for("16-mixed", pins=PINS)], **host())
        elif how == "same trainer":
            runner.fit_loop.max_epochs = 2
        module.bad = ()
        runner.fit(module, batches(), batches())
        runner.validate(module, batches(), verbose=False)
        found[name] = {"weights": whole(runner, module), "losses": module.losses}
    return found


def another_plan() -> str:
    """A module that a run sharded, under a plan that stores it otherwise."""
    module = Ranked()
    fit(module, plugins=[plan_for("32-true")], **fsdp1())
    plan, host = plan_for("bf16-true", reduce_dtype="bf16"), fsdp1(sharding_strategy="NO_SHARD")
    return _refused(lambda: fit(module, plugins=[plan], **host))


def stopped() -> dict[str, Any]:
    """The error that too many skips end with."""

    class Sick(Ranked):
        def loss(self, batch: Any) -> Tensor:
            guilty = self.global_rank == BAD_RANK and self.trainer.global_step >= 2
            return super().loss((batch[0] * float("nan"), batch[1]) if guilty else batch)

    plan = plan_for("bf16-mixed", nonfinite=NonFinite(max_consecutive=2), pins=PINS)
    try:
        fit(Sick(), plugins=[plan], **fsdp1())
    except NonFiniteError as error:
        return {"rank": error.rank, "step": error.step, "module": error.module, "message": str(error)}
    return {}


# ------------------------------------------------------------------ other models


class Language(LightningModule):
    """A tiny transformers model; each rank has its own rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = {"llama": hf.llama, "gpt2": hf.gpt2}[kind]()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, (batch + self.global_rank) % hf.VOCABULARY)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["groups"](self.parameters())


def language(kind: str, mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """A transformers model under both hosts; how it was cut."""
    tokens: Any = DataLoader(cast("Any", hf.tokens(8)), batch_size=2)
    found = {"ddp": trained(mode, ddp(), Language(kind), tokens, **options)}
    module, host = Language(kind), fsdp1(wrap=None)
    found["fsdp1"] = trained(mode, host, module, tokens, **options)
    root = host["strategy"].model
    units = {plain_name(n) for n, m in root.named_modules() if n and isinstance(m, FullyShardedDataParallel)}
    return {**found, "units": units}


def different_starts() -> dict[str, Any]:
    """Ranks that start from different weights."""
    module = Ranked()
    start = weights(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(float(os.environ["RANK"]))
    return {"start": start, **trained("32-true", fsdp1(), module, max_epochs=1, limit_train_batches=0)}


def on_meta() -> dict[str, Any]:
    """A module that is made on the meta device, and with fewer weights on each rank than the world has processes."""

    class Late(Ranked):
        def configure_model(self) -> None:
            if next(self.net.parameters()).device.type != "meta":
                with torch.device("meta"):
                    self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))

    torch.manual_seed(3 + int(os.environ["RANK"]))
    return trained("bf16-true", fsdp1(), Late(), pins=PINS)


def frozen() -> dict[str, Any]:
    """Some parameters do not train."""

    class Part(Ranked):
        def __init__(self) -> None:
            super().__init__(optimizer="groups")
            self.net[0].requires_grad_(False)
            self.net[1].bias.requires_grad_(False)

    options: dict[str, Any] = {"pins": PINS, "gradient_clip_val": 0.5}
    return {name: trained("bf16-mixed", host(), Part(), **options) for name, host in (("ddp", ddp), ("fsdp1", fsdp1))}


# ------------------------------------------------------------------ refusals


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except PlanError as error:
        return str(error)
    return "not refused"


def refused(which: str) -> str:
    """What is said instead of running."""

    class Wrapped(Ranked):
        def configure_model(self) -> None:
            if not isinstance(self.net[0], FullyShardedDataParallel):
                self.net[0] = FullyShardedDataParallel(self.net[0], device_id=torch.device("cpu"))

    class Mixed(Ranked):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)

    def ignoring(module: Ranked) -> Any:
        return fit(module, **bf16, **fsdp1(ignored_states=[module.net[0].weight]))

    bf16: dict[str, Any] = {"plugins": [plan_for("bf16-mixed")]}
    ways: dict[str, Callable[[], Any]] = {
        "wrapped": lambda: fit(Wrapped(), **bf16, **fsdp1()),
        "integer": lambda: fit(Mixed(), **bf16, **fsdp1()),
        "manual": lambda: fit(Manual(), **bf16, **fsdp1()),
        "ignored": lambda: ignoring(Ranked()),
        "no plan": lambda: fit(Ranked(), precision="bf16-mixed", **fsdp1()),
        "wrap": lambda: fit(Ranked(), **bf16, **fsdp1(wrap="Lineal")),
        "mesh": lambda: fit(Ranked(), **bf16, **fsdp1(device_mesh=(2, 2), sharding_strategy="HYBRID_SHARD")),
        "one shard": lambda: fit(Ranked(), **bf16, **fsdp1(device_mesh=(2, 1), sharding_strategy="HYBRID_SHARD")),
    }
    return _refused(ways[which])


def run(scenarios: list[tuple[str, str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Each (key, function, arguments) in turn; a failing one leaves its traceback, and the others run."""
    results: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = globals()
    for key, function, arguments in scenarios:
        results[key] = _or_traceback(partial(functions[function], *arguments))
    return results


def _or_traceback(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception:
        return traceback.format_exc()
