"""What each rank of a run with tensor parallelism does, and the same run on one device."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling
from support import hf
from support.models import FEATURES, InfiniteGradient, Regression
from support.oracles import plan_for
from support.running import fit
from support.sharded import BAD_RANK, OPTIMIZERS, RefusedWay, fsdp2, rank, trained, whole

PINS = {"*norm*": "fp32"}
MLP_PLAN = {"up": "colwise", "down": "rowwise"}
STATIC = LossScaling.static(64.0)
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


class Shared(LightningModule):
    """Every data-parallel rank has its own data; without ranks (``ranks``) one device has all of it.

    Gradients overflow on rank ``BAD_RANK`` alone in the steps ``bad``.
    """

    def __init__(self, optimizer: str = "adamw", ranks: int = 0, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.optimizer, self.ranks, self.bad = optimizer, ranks, bad
        self.losses: list[float] = []

    def shares(self) -> list[int]:
        return list(range(self.ranks)) if self.ranks else [self.trainer.distributed_sampler_kwargs["rank"]]

    def spoiled(self, tensor: Tensor) -> Tensor:
        bad = not self.ranks and self.global_rank == BAD_RANK and len(self.losses) in self.bad
        return InfiniteGradient.apply(tensor) if bad else tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.stack([self.loss_of(batch, share) for share in self.shares()]).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Language(Shared):
    def __init__(self, kind: str = "llama", meta: bool = False, **options: Any) -> None:
        super().__init__(**options)
        with torch.device("meta" if meta else "cpu"):
            self.model = hf.MODELS[kind]() if kind != "llama" else hf.llama(**HEADS)

    def loss_of(self, batch: Any, share: int) -> Tensor:
        return self.spoiled(hf.loss_of(self.model, (batch + share) % hf.VOCABULARY))


class Mlp(Shared):
    def __init__(self, gain: bool = False, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 24), nn.Linear(24, 1)
        self.gain = nn.Parameter(torch.ones(3)) if gain else None

    def loss_of(self, batch: Any, share: int) -> Tensor:
        x, y = batch
        out = self.down(self.up(self.norm(x * (1 + share))).relu())
        if self.gain is not None:
            out = out * self.gain.mean()
        return (self.spoiled(out).float() - y).pow(2).mean()


def _data(module: LightningModule) -> Any:
    return hf.token_batches(20) if isinstance(module, Language) else None


@dataclass(frozen=True)
class Split:
    """A model split over all ranks; ``tp_plan`` of the test's own where the model has none."""

    mode: str
    model: Callable[..., Shared] = Language
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=lambda: {"tensor_parallel": 2})

    def alone(self, ranks: int) -> dict[str, Any]:
        made = self.model(ranks=ranks)
        return trained(self.mode, {}, made, data=_data(made), **deepcopy(self.options))

    def run(self) -> dict[str, Any]:
        made = self.model()
        strategy = {"tp_plan": MLP_PLAN, **self.strategy} if isinstance(made, Mlp) else self.strategy
        placed: dict[str, Any] = {}
        made.on_train_start = lambda: placed.update(
            {name: str(cast("Any", parameter).placements) for name, parameter in made.named_parameters()}
        )
        result = trained(self.mode, fsdp2(**{"wrap": None, **strategy}), made, data=_data(made), **self.options)
        return {**result, "placements": placed, "tied": tied(made)}


def tied(module: Shared) -> bool | None:
    if not isinstance(module, Language):
        return None
    model = cast("Any", module.model)
    return model.lm_head.weight is model.get_input_embeddings().weight


@dataclass(frozen=True)
class StartedOnMeta:
    def run(self) -> dict[str, Any]:
        torch.manual_seed(rank())
        module, start = Language("tied llama", meta=True), {}
        module.on_train_start = lambda: start.update(whole(module))
        host = fsdp2(wrap=None, tensor_parallel=2)
        result = trained("bf16-mixed", host, module, data=_data(module), pins=PINS)
        return {**result, "tied": tied(module), "start": start, "usual": whole(Language("tied llama"))}


class Watched(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows = [*getattr(self, "rows", []), *batch[0][:, 0].tolist()]
        self.drawn = torch.rand(3).tolist()
        return (self.net(batch[0].repeat(1, FEATURES)).float() - 1).pow(2).mean()


@dataclass(frozen=True)
class Given:
    def run(self) -> dict[str, Any]:
        torch.manual_seed(rank())
        module = Watched()
        rows = DataLoader(TensorDataset(torch.arange(16.0).view(16, 1)), batch_size=2, shuffle=True)
        host = fsdp2(tp_plan={"net.0": "colwise_rep"}, tensor_parallel=2)
        host.pop("use_distributed_sampler")
        fit(module, data=rows, plugins=[plan_for("32-true")], **host)
        return {"rows": module.rows, "drawn": module.drawn}


def _fitted(module: Shared, **strategy: Any) -> Any:
    return fit(module, plugins=[plan_for("bf16-mixed")], data=_data(module), **fsdp2(**strategy))


_WHOLE_HEAD = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
WAYS: dict[str, Callable[[], Any]] = {
    "no plan": lambda: _fitted(Mlp(), tensor_parallel=2),
    "style": lambda: _fitted(Mlp(), tensor_parallel=2, tp_plan={"up": "colwize", "dawn": "rowwise"}),
    "norm": lambda: _fitted(Mlp(), tensor_parallel=2, tp_plan={"norm": "colwise"}),
    "ties": lambda: _fitted(Language("tied llama"), wrap=None, tensor_parallel=2, tp_plan=_WHOLE_HEAD),
}


Refused = partial(RefusedWay, "support.tensor_parallel")
