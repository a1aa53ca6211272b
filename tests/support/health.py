"""Runs under TrainingHealth in two processes, and what one process makes of the same batches."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_mp import LossScaling
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth
from lightning_mp.health.measurement import StepMeasurement, ToHost
from lightning_mp.record import metric_names
from support import sharded_hosts
from support.models import Regression, batches
from support.oracles import plan_for
from support.running import fit
from support.sharded import under

STEPS, LR = 4, 1e-2
#: a scale that is no power of two would round; one far from 1 shows where it was forgotten
STATIC = LossScaling.static(64.0)
ZERO = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
_WAIT: dict[str, Any] = {"timeout": timedelta(seconds=60)}


class Ranked(Regression):
    def __init__(self) -> None:
        super().__init__(plain_adamw)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))


def plain_adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=LR, eps=1e-4)


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.detach().flatten() for tensor in tensors]).norm())


def oracle(world: int = 2, accumulate: int = 1) -> list[dict[str, float]]:
    """The rows of :data:`STEPS` steps on the batches of all ranks, by a plain loop in one process."""
    module = Regression()
    net = module.net
    optimizer, data = plain_adamw(net.parameters()), list(batches())
    rows: list[dict[str, float]] = []
    for step in range(STEPS):
        window = data[step * accumulate : (step + 1) * accumulate]
        losses = [_loss(net, batch, rank) for batch in window for rank in range(world)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        grads = [parameter.grad.clone() for parameter in net.parameters()]
        optimizer.step()
        change = [new - old for new, old in zip(net.parameters(), before, strict=True)]
        rows.append(
            {
                metric_names.LOSS: loss.item(),
                metric_names.GRAD_NORM: norm(grads),
                metric_names.PARAM_NORM: norm(net.parameters()),
                metric_names.UPDATE_RATIO: norm(change) / norm(before),
                metric_names.LR: LR,
            }
        )
    return rows


def _loss(net: nn.Module, batch: Any, rank: int) -> Tensor:
    x, y = batch
    return (net(x * (1 + rank)) - y).pow(2).mean()


def _stock_ddp(mode: str) -> dict[str, Any]:
    return {"strategy": DDPStrategy(process_group_backend="gloo", **_WAIT), "precision": mode}


def _ours(name: str, **options: Any) -> Callable[[str], dict[str, Any]]:
    pins = None if name == "fsdp1" else {"LayerNorm": "fp32"}
    return lambda mode: under(name, plan_for(mode, STATIC, pins=pins), **options)


HOSTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "stock ddp": _stock_ddp,
    "stock fsdp1": lambda mode: {"strategy": sharded_hosts.fsdp1(), "precision": mode},
    "stock zero1": lambda mode: {"strategy": sharded_hosts.deepspeed(1), "precision": mode},
    "stock zero3": lambda mode: {"strategy": sharded_hosts.deepspeed(3), "precision": mode},
    "ddp": _ours("ddp"),
    "fsdp2": _ours("fsdp2", wrap="Linear"),
    "fsdp1": _ours("fsdp1", wrap="Linear"),
    **{name: _ours(name) for name in ZERO},
    "deepspeed_zero2_offload": _ours("deepspeed_zero2_offload"),
    "deepspeed_zero3_offload": _ours("deepspeed_zero3_offload"),
}


def watched(host: str, mode: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    health, scale = TrainingHealth(folder, report=False), LossScaleMonitor()
    fit(Ranked(), callbacks=[health, scale], max_steps=STEPS, **two(HOSTS[host](mode)))
    return health.rows, scale.rows


def two(host: dict[str, Any]) -> dict[str, Any]:
    return {"devices": 2, "use_distributed_sampler": False, **host}


class OneBad(Ranked):
    """In batch 2 the last rank's numbers are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
            batch = (batch[0] * float("nan"), batch[1])
        return self.loss(batch)


def bad_batch(host: str, mode: str, action: str, folder: Path) -> dict[str, Any]:
    """What each rank tells of a run in which one rank had a bad batch, and what is done about it."""
    mine = TrainingHealth(folder, actions={"nonfinite_loss": action}, report=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TrainingHealth: step")
        fit(OneBad(), callbacks=[mine], max_steps=STEPS, **two(HOSTS[host](mode)))
    return {
        "events": [event.to_dict() for event in mine.events],
        "rows": len(mine.rows),
        "finite": all(row[metric_names.PARAM_NORM] == row[metric_names.PARAM_NORM] for row in mine.rows),
    }


def totals() -> dict[str, float | None]:
    found: dict[str, float | None] = {}

    class Reads(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            rank = trainer.global_rank
            done = {metric_names.SAMPLES_PER_S: 8 + rank, metric_names.TOKENS_PER_S: 100 * (1 + rank)}
            done |= {"flops_per_s": 6e9, "seconds": 2.0 - rank}
            measured, to_host = StepMeasurement(trainer, pl_module), ToHost(torch.device("cpu"))
            found.update(measured.derived(to_host.read(measured.take(done))))

    fit(Ranked(), callbacks=[Reads()], max_steps=1, **two(_stock_ddp("32-true")))
    return found
