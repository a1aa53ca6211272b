"""What each rank of a two-process run does; the tests look at what came back."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError
from support.manual import Pair
from support.models import InfiniteGradient, Regression, batches, weights
from support.oracles import plan_for, stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace

#: on both sides of a comparison, so that fp16 rounds the same with and without a skipped step
STATIC = LossScaling.static(64.0)
BAD_RANK = 1
OPTIMIZERS: dict[str, Any] = {
    "fused": partial(AdamW, lr=1e-2, eps=1e-4, fused=True),
    "plain": partial(SGD, lr=1e-3, momentum=0.9),
}


def _ddp(**options: Any) -> dict[str, Any]:
    """Trainer arguments: both ranks on the CPU, their own data, and no waiting for ever."""
    strategy = DDPStrategy(timeout=timedelta(seconds=30), process_group_backend="gloo", **options)
    return {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}


class Ranked(Regression):
    """Each rank has its own data; gradients overflow on rank ``BAD_RANK`` alone."""

    def __init__(self, bad: tuple[int, ...] = (), optimizer: str = "fused") -> None:
        super().__init__(OPTIMIZERS[optimizer])
        self.bad = bad

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.overflow_at = self.bad if self.global_rank == BAD_RANK else ()
        return super().training_step(batch, batch_idx)


def _without(*bad: int) -> Any:
    rows = [row for batch in range(8) if batch not in bad for row in range(8 * batch, 8 * batch + 8)]
    return DataLoader(Subset(batches().dataset, rows), batch_size=8)


def overflow(mode: str, optimizer: str, bad: tuple[int, ...]) -> dict[str, Any]:
    """One rank overflows; beside it a run that never had those batches."""
    plan, trace, clean = plan_for(mode, STATIC), Trace(), Ranked(optimizer=optimizer)
    module = Ranked(bad, optimizer)
    fit(module, plugins=[plan], callbacks=[trace], **_ddp())
    fit(clean, plugins=[plan_for(mode, STATIC)], data=_without(*bad), **_ddp())
    return {"skipped": trace.skipped, "weights": weights(module), "clean": weights(clean), "start": trace.start}


def scale(mode: str) -> dict[str, Any]:
    """The scale while ranks overflow in turn."""
    trace = Trace()
    fit(Ranked((1, 4)), plugins=[plan_for(mode)], callbacks=[trace], **_ddp())
    return {"scales": trace.scales, "skipped": trace.skipped}


def equals_stock(mode: str, accumulate: int) -> dict[str, Any]:
    """The same run under Lightning's plugin and under the plan."""
    stock, ours = Ranked(optimizer="plain"), Ranked(optimizer="plain")
    fit(stock, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, **stock_for(mode), **_ddp())
    fit(ours, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, plugins=[plan_for(mode)], **_ddp())
    return {"stock": weights(stock), "ours": weights(ours), "losses": (stock.losses, ours.losses)}


def accumulated(batch: int) -> dict[str, Any]:
    """One rank's gradient overflows in one micro-batch of a window, most of which no rank shares."""

    class Planted(Ranked):
        def on_after_backward(self) -> None:
            if self.global_rank == BAD_RANK and len(self.losses) == batch + 1:
                self.net[3].weight.grad.fill_(float("inf"))

    plan, trace, module = plan_for("16-mixed"), Trace(), Planted()
    fit(module, plugins=[plan], callbacks=[trace], accumulate_grad_batches=4, **_ddp())
    counts = plan.applied_steps, plan.skipped_steps
    return {"counts": counts, "weights": weights(module), "at": [trace.start, trace.weights[3], trace.weights[7]]}


class Sick(Ranked):
    """On the bad rank alone something is non-finite from step 2 on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        guilty = self.global_rank == BAD_RANK and self.trainer.global_step >= 2
        if guilty and self.how == "batch":
            batch = (batch[0] * float("nan"), batch[1])
        loss = super().training_step(batch, batch_idx)
        if guilty and self.how == "gradient":
            return loss + InfiniteGradient.apply(self.net[3].weight.float().sum() * 0)
        return loss * float("nan") if guilty and self.how == "loss" else loss


def stopped(mode: str, how: str) -> dict[str, Any]:
    """The error each rank's run ended with."""
    plan = plan_for(mode, STATIC, nonfinite=NonFinite(max_consecutive=3))
    try:
        fit(Sick(how), plugins=[plan], **_ddp())
    except NonFiniteError as error:
        return {"rank": error.rank, "step": error.step, "module": error.module, "message": str(error)}
    return {}


def pinned(mode: str) -> dict[str, Any]:
    """Norms in fp32 under DDP."""
    module = Ranked()
    fit(module, plugins=[plan_for(mode, STATIC, pins={"LayerNorm": "fp32"})], **_ddp())
    return {"weights": weights(module)}


class Constant(LightningModule):
    """One weight whose gradient is a chosen number a rank."""

    def __init__(self, *gradients: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.chosen = gradients

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = torch.full_like(self.weight, self.chosen[self.global_rank])
        return (self.weight * factor).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.averaged = self.weight.grad.double().tolist()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)


def reduced(mode: str, gradients: tuple[float, float], reduce_dtype: str | None, stock: bool) -> list[float]:
    """The averaged gradient."""
    module = Constant(*gradients)
    plan = plan_for(mode, LossScaling.static(1.0), **({"reduce_dtype": reduce_dtype} if reduce_dtype else {}))
    data = DataLoader(TensorDataset(torch.zeros(1)), batch_size=1)
    fit(module, data=data, **_ddp(), **(stock_for(mode) if stock else {"plugins": [plan]}))
    return module.averaged


def manual(overflow_in: dict[int, str]) -> dict[str, Any]:
    """Two optimizers stepped by hand; chosen nets overflow on one rank."""

    def way(m: Any, batch: Any, batch_idx: int) -> None:
        m.overflow = overflow_in if m.global_rank == BAD_RANK else {}
        first, second = m.optimizers()
        one, other = m.losses_of((batch[0] * (1 + m.global_rank), batch[1]), batch_idx)
        first.zero_grad()
        second.zero_grad()
        m.manual_backward(one + other)
        first.step()
        second.step()

    plan, trace, module = plan_for("16-mixed"), Trace(), Pair(way)
    fit(module, plugins=[plan], callbacks=[trace], **_ddp())
    counts = plan.applied_steps, plan.skipped_steps
    return {"scales": trace.scales, "counts": counts, "weights": weights(module), "each": trace.weights}


def resumed(path: str) -> dict[str, Any]:
    """Go on from a checkpoint of one device."""
    plan, trace = resume_plan(), Trace()
    fit(
        Regression(), plugins=[plan], callbacks=[trace], ckpt_path=path, data=ResumableBatches(), max_epochs=2, **_ddp()
    )
    return {"scales": trace.scales, "counts": (plan.applied_steps, plan.skipped_steps)}


def saved(folder: str) -> dict[str, Any]:
    """Save a checkpoint for one device to go on from."""
    plan, trace = resume_plan(), Trace()
    callbacks = [trace, SaveAt(Path(folder), 4)]
    fit(Ranked((1, 3)), plugins=[plan], callbacks=callbacks, data=ResumableBatches(), max_epochs=1, **_ddp())
    return {"scales": trace.scales}


def resume_plan() -> MixedPrecisionPlan:
    """A rule with every counter in use."""
    return plan_for("16-mixed", LossScaling(init_scale=32.0, hysteresis=2, growth_interval=5))


def run(scenarios: list[tuple[str, str, tuple[Any, ...]]]) -> bytes:
    """Each (key, function, arguments) in turn; a failing one leaves its traceback, and the others run.

    The results come pickled: tensors as they are would live in this process's shared memory, and die with it.
    """
    results: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = globals()
    for key, function, arguments in scenarios:
        results[key] = _or_traceback(partial(functions[function], *arguments))
    return pickle.dumps(results)


def _or_traceback(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception:
        return traceback.format_exc()


def fails_on_one_rank() -> None:
    """Rank 1 raises while rank 0 waits for it in a collective."""

    class Fails(Ranked):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == BAD_RANK and batch_idx == 2:
                raise KeyError("planned")
            return super().training_step(batch, batch_idx)

    fit(Fails(), plugins=[plan_for("16-mixed")], **_ddp())
