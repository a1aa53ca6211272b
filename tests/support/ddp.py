"""What each rank of a run under DDP does; the tests look at what came back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan
from support.manual import Pair
from support.models import Regression, weights
from support.nonfinite import without
from support.oracles import plan_for, stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.sharded import BAD_RANK, Ranked, ddp
from support.traces import Trace

#: on both sides of a comparison, so that fp16 rounds the same with and without a skipped step
STATIC = LossScaling.static(64.0)


def _counts(plan: MixedPrecisionPlan) -> tuple[int, int]:
    return plan.applied_steps, plan.skipped_steps


@dataclass(frozen=True)
class Overflow:
    """One rank overflows; beside it a run that never had those batches."""

    mode: str
    optimizer: str
    bad: tuple[int, ...]

    def run(self) -> dict[str, Any]:
        trace, module, clean = Trace(), Ranked(self.bad, self.optimizer), Ranked(optimizer=self.optimizer)
        fit(module, plugins=[plan_for(self.mode, STATIC)], callbacks=[trace], **ddp())
        fit(clean, plugins=[plan_for(self.mode, STATIC)], data=without(*self.bad), **ddp())
        return {"skipped": trace.skipped, "weights": weights(module), "clean": weights(clean), "start": trace.start}


@dataclass(frozen=True)
class Scale:
    """The scale while steps 1 and 4 overflow on one rank."""

    mode: str

    def run(self) -> dict[str, Any]:
        trace = Trace()
        fit(Ranked((1, 4)), plugins=[plan_for(self.mode)], callbacks=[trace], **ddp())
        return {"scales": trace.scales, "skipped": trace.skipped}


@dataclass(frozen=True)
class EqualsStock:
    """The same run under Lightning's plugin and under the plan."""

    mode: str
    accumulate: int

    def run(self) -> dict[str, Any]:
        found = {}
        for name, plugin in (("stock", stock_for(self.mode)), ("ours", {"plugins": [plan_for(self.mode)]})):
            module = Ranked(optimizer="momentum")
            fit(module, accumulate_grad_batches=self.accumulate, gradient_clip_val=0.5, **plugin, **ddp())
            found[name] = {"losses": module.losses, "weights": weights(module)}
        return found


class Planted(Ranked):
    """On one rank one micro-batch has an infinite gradient."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_after_backward(self) -> None:
        if self.global_rank == BAD_RANK and len(self.losses) == self.batch + 1:
            self.net[3].weight.grad.fill_(float("inf"))


@dataclass(frozen=True)
class Accumulated:
    """One rank's gradient overflows in one micro-batch of a window, most of which no rank shares."""

    batch: int

    def run(self) -> dict[str, Any]:
        plan, trace, module = plan_for("16-mixed"), Trace(), Planted(self.batch)
        fit(module, plugins=[plan], callbacks=[trace], accumulate_grad_batches=4, **ddp())
        at = [trace.start, trace.weights[3], trace.weights[7]]
        return {"counts": _counts(plan), "weights": weights(module), "at": at}


@dataclass(frozen=True)
class Pinned:
    """Norms in fp32 under DDP."""

    mode: str

    def run(self) -> dict[str, Tensor]:
        module = Ranked()
        fit(module, plugins=[plan_for(self.mode, STATIC, pins={"LayerNorm": "fp32"})], **ddp())
        return weights(module)


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


@dataclass(frozen=True)
class Reduced:
    """The averaged gradient of two ranks; under Lightning's own plugin where ``stock`` says so."""

    mode: str
    gradients: tuple[float, float]
    reduce_dtype: str | None = None
    stock: bool = False

    def run(self) -> list[float]:
        module = Constant(*self.gradients)
        options = {"reduce_dtype": self.reduce_dtype} if self.reduce_dtype else {}
        plan = plan_for(self.mode, LossScaling.static(1.0), **options)
        data = DataLoader(TensorDataset(torch.zeros(1)), batch_size=1)
        fit(module, data=data, **ddp(), **(stock_for(self.mode) if self.stock else {"plugins": [plan]}))
        return module.averaged


@dataclass(frozen=True)
class ByHand:
    """Two optimizers stepped by hand; chosen nets overflow on one rank in batch 3."""

    which: str

    def run(self) -> dict[str, Any]:
        def way(m: Any, batch: Any, batch_idx: int) -> None:
            m.overflow = {3: self.which} if m.global_rank == BAD_RANK else {}
            first, second = m.optimizers()
            one, other = m.losses_of((batch[0] * (1 + m.global_rank), batch[1]), batch_idx)
            first.zero_grad()
            second.zero_grad()
            m.manual_backward(one + other)
            first.step()
            second.step()

        plan, trace, module = plan_for("16-mixed"), Trace(), Pair(way)
        fit(module, plugins=[plan], callbacks=[trace], **ddp())
        return {"scales": trace.scales, "counts": _counts(plan), "weights": weights(module), "each": trace.weights}


def resume_plan() -> MixedPrecisionPlan:
    """A rule with every counter in use."""
    return plan_for("16-mixed", LossScaling(init_scale=32.0, hysteresis=2, growth_interval=5))


@dataclass(frozen=True)
class Resumed:
    """A run that goes on from a checkpoint of one device."""

    path: Path

    def run(self) -> dict[str, Any]:
        plan, trace, data = resume_plan(), Trace(), ResumableBatches()
        options = {"ckpt_path": self.path, "data": data, "max_epochs": 2}
        fit(Regression(), plugins=[plan], callbacks=[trace], **options, **ddp())
        return {"scales": trace.scales, "counts": _counts(plan)}


@dataclass(frozen=True)
class Saved:
    """A run that saves a checkpoint for one device to go on from; the scales."""

    folder: Path

    def run(self) -> list[float]:
        trace = Trace()
        callbacks, data = [trace, SaveAt(self.folder, 4)], ResumableBatches()
        fit(Ranked((1, 3)), plugins=[resume_plan()], callbacks=callbacks, data=data, **ddp())
        return trace.scales


@dataclass(frozen=True)
class FailsOnOneRank:
    """Rank 1 raises while rank 0 waits for it in a collective."""

    def run(self) -> None:
        class Fails(Ranked):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.global_rank == BAD_RANK and batch_idx == 2:
                    raise KeyError("planned")
                return super().training_step(batch, batch_idx)

        fit(Fails(), plugins=[plan_for("16-mixed")], **ddp())
