"""A small language model whose products can run in FP8, and what counts them."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import FP8, MixedPrecisionPlan, PlanError
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.record import metric_names
from support.running import trainer
from support.sharded import rank, under

VOCABULARY, WIDTH = 48, 32
RECIPES = ("rowwise", "tensorwise", "rowwise_gw_hp")


class Block(nn.Module):
    """Pre-norm, with a causal mean over the tokens in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).relu()
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down((hidden.float().cumsum(1) / steps).to(hidden.dtype))


class Language(LightningModule):
    """Two blocks; it records training losses, the first step's gradients and the last evaluation's logits."""

    def __init__(self, compiled: str | None = None, fails_at: int = -1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.logits: Any = None
        self.fails_at = fails_at
        if compiled is not None:
            for block in self.blocks:
                block.compile(backend=compiled, fullgraph=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.blocks(self.embedding(ids)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise InterruptedError
        logits = self(batch)[:, :-1]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.gradients:
            named = self.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.logits = self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def texts(rows: int = 32, length: int = 9, seed: int = 3) -> DataLoader[Tensor]:
    """Rows of token ids that count upwards from a random start, four at a time; 36 tokens are no multiple of 16."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader((start + torch.arange(length)) % VOCABULARY, batch_size=4)  # type: ignore[arg-type]


def plan(recipe: str = "rowwise", checkpointing: Any = None, pins: Any = None, **fields: Any) -> MixedPrecisionPlan:
    """FP8 wherever the small layers allow it."""
    rule = FP8(**{"recipe": recipe, "small": "convert", **fields})
    return MixedPrecisionPlan("fp8-mixed", fp8=rule, checkpointing=checkpointing, pins=pins)


def run(module: Any, plugin: Any, *, validate: bool = False, data: Any = None, ckpt_path: Any = None, **a: Any) -> Any:
    data = texts() if data is None else data
    runner = trainer(plugins=[plugin], num_sanity_val_steps=0, **{"limit_val_batches": int(validate), **a})
    runner.fit(module, data, data, ckpt_path=ckpt_path)
    return module


def same(one: Any, other: Any) -> bool:
    equal = [torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items()]
    return bool(equal) and all(equal) and one.losses == other.losses


@contextmanager
def products() -> Generator[list[tuple[int, ...]], None, None]:
    """The FP8 products made within, each by its output's shape."""
    made: list[tuple[int, ...]] = []
    multiply = torch._scaled_mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        output = multiply(*args, **kwargs)
        made.append(tuple(output.shape))
        return output

    with mock.patch.object(torch, "_scaled_mm", counted):
        yield made


def kind(weight: Tensor) -> str:
    return type(weight.data).__name__


class Plain(Language):
    """Leaves gradients alone, which ZeRO has moved away."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        #: what the weight of a converted layer was in its forwards, by the Trainer's stage
        self.held: dict[str, str] = {}
        layer = self.blocks[0].up
        layer.register_forward_pre_hook(lambda *_: self.held.update({self.trainer.state.stage: kind(layer.weight)}))


@dataclass(frozen=True)
class Across:
    """A run of two processes on ``strategy``, each with its own texts unless ``alike``; then a second run."""

    strategy: str
    recipe: str = "rowwise"
    alike: bool = False
    pins: dict[str, str] = field(default_factory=dict[str, str])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    rule: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> Any:
        plugin, module = plan(self.recipe, pins=self.pins or None, **self.rule), Plain()
        host = under(self.strategy, plugin, **self.options)
        runner = trainer(**host, num_sanity_val_steps=0, limit_val_batches=1)
        with products() as made:
            try:
                runner.fit(module, texts(seed=3 if self.alike else 3 + rank()), texts())
            except PlanError as error:
                return [fault.problem for fault in error.faults]
            logits, made_in_fit = module.logits, len(made)
            if not self.strategy.startswith("deepspeed"):
                runner.validate(module, texts(), verbose=False)
        return {
            "losses": module.losses,
            "logits": logits,
            "validated": module.logits,
            "products": made_in_fit,
            "held": {str(stage.value): name for stage, name in module.held.items()},
            "kept": {kind(t.to_local() if hasattr(t, "to_local") else t) for t in module.state_dict().values()},
            "layers": plugin.fp8_layers,
        }


def scales(strategy: str, folder: Path, **options: Any) -> list[tuple[float, float] | None]:
    """The smallest and the largest scale of each reading of a run, ``None`` where they were not read."""
    health = TrainingHealth(folder / strategy, report=False)
    runner = trainer(**under(strategy, plan("tensorwise"), **options), callbacks=[health], limit_val_batches=0)
    runner.fit(Plain(), texts(seed=3 + rank()))
    read = ((row[metric_names.FP8_SCALE_MIN], row[metric_names.FP8_SCALE_MAX]) for row in health.rows)
    return [pair if pair[0] is not None else None for pair in read]
