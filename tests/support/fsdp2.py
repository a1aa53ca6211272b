"""What each rank of a run under FSDP2 does, beside the same run under DDP; the tests look at what came back."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_mp import PlanError
from lightning_mp.strategies.fsdp2.strategy import PlanFSDP2Strategy
from support.models import FEATURES, InfiniteGradient, Regression
from support.oracles import plan_for
from support.running import fit

WAIT = {"timeout": timedelta(seconds=30), "process_group_backend": "gloo"}
BAD_RANK = 1
PINS = {"LayerNorm": "fp32"}


def _by_dimension(parameters: Any) -> Any:
    """Groups as most training scripts make them: no decay for what has one dimension, and that group first."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3}]
    return AdamW([*groups, {"params": [p for p in parameters if p.dim() > 1]}], lr=1e-2, eps=1e-4, weight_decay=0.3)


OPTIMIZERS: dict[str, Any] = {
    "fused": partial(AdamW, lr=1e-2, eps=1e-4, fused=True),
    "adamw": partial(AdamW, lr=1e-2, eps=1e-4),
    "momentum": partial(SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(SGD, lr=1e-3),
    "groups": _by_dimension,
    "adagrad": partial(Adagrad, lr=1e-2, initial_accumulator_value=0.5),
}


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"])


def _host(strategy: Any) -> dict[str, Any]:
    return {"strategy": strategy, "devices": world(), "use_distributed_sampler": False}


def ddp() -> dict[str, Any]:
    """Trainer arguments: every rank on the CPU, its own data, and no waiting for ever."""
    return _host(DDPStrategy(**WAIT, find_unused_parameters=True))


def fsdp2(**options: Any) -> dict[str, Any]:
    """The same under FSDP2; every linear layer is a unit unless told otherwise."""
    options.setdefault("wrap", "Linear")
    return _host(PlanFSDP2Strategy(**WAIT, **options))


class Ranked(Regression):
    """Each data-parallel rank has its own data; gradients overflow on rank ``BAD_RANK`` alone."""

    def __init__(self, bad: tuple[int, ...] = (), optimizer: str = "fused", schedule: bool = False) -> None:
        super().__init__(OPTIMIZERS[optimizer], partial(StepLR, step_size=1, gamma=0.5) if schedule else None)
        self.bad = bad
        self.validated: list[float] = []

    def factor(self) -> int:
        """What this rank's data is multiplied with."""
        return 1 + self.global_rank

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net(x * self.factor())
        guilty = self.global_rank == min(BAD_RANK, self.trainer.world_size - 1)
        if self.training and guilty and len(self.losses) in self.bad:
            out = InfiniteGradient.apply(out)
        return (out.float() - y.float()).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Seen(Callback):
    """The plan's readings after each step."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.skipped.append(plan.step_skipped)
        if plan.scaler is not None:
            self.scales.append(plan.scaler.get_scale())
        if plan.last_grad_norm is not None:
            self.norms.append(plan.last_grad_norm.item())


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer in full."""
    return {name: full(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


PLANS = ("pins", "reduce_dtype", "checkpointing", "loss_scaling", "nonfinite")


def trained(mode: str, host: dict[str, Any], module: LightningModule, **options: Any) -> dict[str, Any]:
    """One run, and what is left of it."""
    plan = plan_for(mode, **{key: options.pop(key) for key in PLANS if key in options})
    seen = Seen()
    callbacks = [seen, *options.pop("callbacks", ())]
    fit(module, plugins=[plan], callbacks=callbacks, **options, **host)
    return {
        "weights": whole(module),
        "skipped": seen.skipped,
        "scales": seen.scales,
        "norms": seen.norms,
        "counts": (plan.applied_steps, plan.skipped_steps),
        "losses": list(getattr(module, "losses", ())),
        "validated": list(getattr(module, "validated", ())),
        "lrs": list(getattr(module, "lrs", ())),
    }


def both(
    make: Callable[[], LightningModule], mode: str, strategy: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """The same run under DDP and under FSDP2."""
    return {
        "ddp": trained(mode, ddp(), make(), **dict(options)),
        "fsdp2": trained(mode, fsdp2(**(strategy or {})), make(), **dict(options)),
    }


def ranked(mode: str, module: dict[str, Any], options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    """A regression under both."""
    return both(partial(Ranked, **module), mode, strategy, **options)


class Net(nn.Module):
    """A block with a norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, 24), nn.LayerNorm(24), nn.Linear(24, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


class Blocks(Ranked):
    """Two blocks and a head; ``net`` in their place."""

    def __init__(self, optimizer: str = "fused", bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad, optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(Net(), Net(), nn.Linear(FEATURES, 1))


def blocks(mode: str, options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    """Blocks under both."""
    return both(Blocks, mode, {"wrap": Net, **strategy}, **options)


@contextmanager
def recorded(seen: dict[str, set[str]]) -> Iterator[None]:
    """The dtypes that cross between ranks."""
    names = [name for name in dir(dist) if name.startswith(("reduce_scatter", "all_gather"))]
    before = {name: getattr(dist, name) for name in names}

    def recording(call: Any, what: str) -> Any:
        def record(*args: Any, **options: Any) -> Any:
            items = (*args, *options.values())
            found = {str(item.dtype).removeprefix("torch.") for item in items if isinstance(item, Tensor)}
            seen.setdefault(what, set()).update(found - {"uint8"})  # uint8: objects
            return call(*args, **options)

        return record

    for name, call in before.items():
        setattr(dist, name, recording(call, name.partition("_")[0]))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def refused(call: Callable[[], Any]) -> str:
    """What was said instead of running."""
    try:
        call()
    except PlanError as error:
        return str(error)
    return "not refused"


def run(scenarios: list[tuple[str, str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Each (key, ``module:function``, arguments) in turn; a failing one leaves its traceback, and the others run."""
    results: dict[str, Any] = {}
    for key, place, arguments in scenarios:
        home, _, name = place.rpartition(":")
        function = getattr(import_module(f"support.{home or 'fsdp2'}"), name)
        results[key] = or_traceback(partial(function, *arguments))
    return results


def or_traceback(scenario: Callable[[], Any]) -> Any:
    """What it returns, or how it failed."""
    try:
        return scenario()
    except Exception:
        return traceback.format_exc()
