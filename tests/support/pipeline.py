"""Modules cut into stages, and the same batches on one process, as many accumulated as there are micro-batches."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from support import hf
from support.comparing import same
from support.ranks import Ranks
from support.running import trainer
from support.sharded import full

WIDTH, ROWS, VOCABULARY, LENGTH = 8, 8, hf.VOCABULARY, 6
INF = float("inf")
#: of a mean over micro-batches, and of a sum in another order
OF_A_MEAN, OF_A_SUM = 1e-2, 1e-6


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Staged(LightningModule):
    """Four blocks and a head, which says itself what its stages are; gradients are noted before each step."""

    def __init__(self, bad: Mapping[int, str] | None = None, pieces: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()
        self.bad, self.pieces = dict(bad or {}), pieces
        self.gradients: list[dict[str, Tensor]] = []
        self.seen: list[Tensor] = []
        #: of the last clipping
        self.norm: float | None = None

    def build(self) -> None:
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        size = len(self.blocks) // count
        return nn.Sequential(*self.blocks[index * size : (index + 1) * size], *[self.head][: index == count - 1])

    def pipeline_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = self.pipeline_batch(batch)
        return self.pipeline_loss(self(inputs), target)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = self.pipeline_batch(batch)
        self.log("val_loss", self.pipeline_loss(self(inputs), target))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.pipeline_batch(batch)[0])

    def on_after_backward(self) -> None:
        name = self.bad.get((len(self.seen) - 1) // self.pieces)
        gradient = dict(self.named_parameters())[name].grad if name else None
        if gradient is not None:
            getattr(gradient, "_local_tensor", gradient).fill_(INF)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        here = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.gradients.append({name: full(gradient) for name, gradient in here.items()})

    def on_before_zero_grad(self, optimizer: Any) -> None:
        plan: Any = self.trainer.precision_plugin
        self.norm = None if plan.engine.last_norm is None else float(plan.engine.last_norm)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class OnMeta(Staged):
    """Made on the meta device where there are stages."""

    def build(self) -> None:
        with torch.device("meta" if "RANK" in os.environ else "cpu"):
            super().build()


class Llama(Staged):
    """transformers' Llama, which is cut without its help."""

    pipeline_stage = None

    def build(self) -> None:
        self.model = hf.llama(max_position_embeddings=16, num_hidden_layers=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits

    def pipeline_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[2], batch[2]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())


class GPT2(Llama):
    """transformers' GPT-2, its head untied."""

    def build(self) -> None:
        self.model = hf.gpt2(n_positions=16, n_layer=4, tie_word_embeddings=False)


#: arguments of a Trainer that count batches, which are pieces on one process
_IN_BATCHES = ("limit_train_batches", "overfit_batches", "val_check_interval")


def data(steps: int, rows: int, replicas: int = 1, replica: int | None = None) -> DataLoader[Any]:
    """Batches of ``ROWS`` in pieces of ``rows``; all replicas' one after the other, or those of one."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(steps * replicas):
        x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 1, generator=generator)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        if replica is None or number % replicas == replica:
            batches += list(zip(x.split(rows), y.split(rows), tokens.split(rows), strict=True))
    return DataLoader(batches, batch_size=None)


@dataclass(frozen=True)
class Fit:
    """A fit in stages; ``alone`` is the same on one process."""

    precision: str = "32-true"
    schedule: str = "1f1b"
    module: type[Staged] = Staged
    stages: int = 2
    microbatches: int = 4
    replicas: int = 1
    steps: int = 4
    accumulate: int = 1
    clip: float | None = None
    scale: float = 2.0**24
    bad: tuple[tuple[int, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    load: str | None = None
    save: str | None = None
    fits: int = 1

    def plan_of(self) -> MixedPrecisionPlan:
        scaling = {"loss_scaling": LossScaling(init_scale=self.scale)} if self.precision.startswith("16") else {}
        return MixedPrecisionPlan(self.precision, **scaling, **dict(self.plan))

    def run(self) -> dict[str, Any]:
        """On each rank."""
        plan = self.plan_of()
        strategy = make_strategy(
            "pipeline",
            plan,
            stages=self.stages,
            schedule=self.schedule,
            microbatches=self.microbatches,
            data_parallel_size=self.replicas,
            **dict(self.options),
        )
        module = self.module(dict(self.bad))
        place = int(os.environ["RANK"]) % self.replicas
        loader = data(self.steps, ROWS, self.replicas, place)
        devices = {"devices": self.stages * self.replicas, "strategy": strategy, "use_distributed_sampler": False}
        return self._result(plan, module, loader, data(2, ROWS), devices, self.accumulate)

    def alone(self) -> dict[str, Any]:
        """On one process. A replica divides by fewer pieces before it scales: the scale here is as much larger."""
        pieces, plan = self.microbatches * self.replicas, replace(self, scale=self.scale * self.replicas).plan_of()
        module = self.module(dict(self.bad), pieces)
        loader = data(self.steps, ROWS // self.microbatches, self.replicas)
        arguments = tuple((key, value * pieces if key in _IN_BATCHES else value) for key, value in self.arguments)
        files = {"load": self.load and f"{self.load}.alone", "save": self.save and f"{self.save}.alone"}
        alone = replace(self, arguments=arguments, **files)
        found = alone._result(plan, module, loader, data(2, ROWS), {}, self.accumulate * pieces)
        return {**found, "scale": None if found["scale"] is None else found["scale"] / self.replicas}

    def _result(
        self, plan: MixedPrecisionPlan, module: Staged, loader: Any, held_out: Any, extra: Any, accumulate: int
    ) -> dict[str, Any]:
        arguments = {"gradient_clip_val": self.clip, "accumulate_grad_batches": accumulate, **dict(self.arguments)}
        runner = trainer(**{"plugins": [plan], "num_sanity_val_steps": 0, **arguments, **extra})
        for number in range(self.fits):
            runner.fit_loop.max_epochs += min(number, 1)
            runner.fit(module, loader, held_out, ckpt_path=self.load)
        if self.save:
            runner.save_checkpoint(self.save)
        metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
        return {
            "gradients": module.gradients,
            "weights": {k: full(v).cpu() for k, v in runner.strategy.lightning_module_state_dict().items()},
            "optimizer": runner.strategy.optimizer_state(runner.optimizers[0]),
            "counts": (plan.skipped_steps, plan.applied_steps),
            "scale": None if plan.scaler is None else plan.scaler.get_scale(),
            "steps": runner.global_step,
            "rates": runner.optimizers[0].param_groups[0]["lr"],
            "metrics": metrics,
            "norm": module.norm,
            "held": sum(p.untyped_storage().nbytes() // p.element_size() for p in module.parameters()),
        }


@dataclass(frozen=True)
class Under(Fit):
    """The same batches under another strategy, the pieces of each dealt over its ranks."""

    strategy: str = "fsdp2"

    def run(self) -> dict[str, Any]:
        """On each rank."""
        plan, share = self.plan_of(), self.microbatches // self.stages
        pieces: Any = data(self.steps, ROWS // self.microbatches).dataset
        mine = DataLoader(pieces[int(os.environ["RANK"]) :: self.stages], batch_size=None)
        strategy = make_strategy(self.strategy, plan)
        devices = {"devices": self.stages, "strategy": strategy, "use_distributed_sampler": False}
        module = self.module(dict(self.bad), share)
        return self._result(plan, module, mine, data(2, ROWS), devices, self.accumulate * share)


def equal(fit: Fit, ranks: Ranks, within: float = 0.0, later: float = 0.0) -> dict[str, Any]:
    """Assert that a fit in stages is the one on one process, which is returned.

    To the last bit, or ``within`` in the first step that is applied and ``later`` in what is made of its weights.
    """
    results, alone = ranks.run(fit), fit.alone()
    allowed = within
    for step, expected in enumerate(alone["gradients"]):
        if all(gradient.isfinite().all() for gradient in expected.values()):
            found = {name: gradient for result in results for name, gradient in result["gradients"][step].items()}
            assert same(found, expected, allowed), step
            allowed = later
    assert list(results[0]["weights"]) == list(alone["weights"])
    for key in ("weights", "optimizer"):
        assert same(results[0][key], alone[key], 10 * later), key
    for key in ("counts", "scale", "steps", "rates"):
        assert {result[key] for result in results} == {alone[key]}, key
    assert all(same(result["norm"], alone["norm"], OF_A_SUM) for result in results)
    (loss,) = {result["metrics"]["val_loss"] for result in results}
    assert loss == pytest.approx(alone["metrics"]["val_loss"], rel=OF_A_MEAN)
    if fit.replicas == 1:
        assert all(set(results[0]["gradients"][0]).isdisjoint(result["gradients"][0]) for result in results[1:])
        assert len({result["metrics"]["train_loss"] for result in results}) == 1
    return alone
