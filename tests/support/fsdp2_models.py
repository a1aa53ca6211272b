"""Models that are made on the meta device, cut, refused, or sharded by their users; under FSDP2 in real processes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support import hf
from support.models import FEATURES
from support.oracles import plan_for
from support.running import fit
from support.sharded import PINS, WAIT, Language, Ranked, RefusedWay, fsdp2, rank, refused, trained, whole, world


class Direct(Ranked):
    """The module holds a parameter itself, uses it in the step, and calls ``self(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 5))
        self.offset = nn.Parameter(torch.zeros(()).view(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.gain.mean()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x * self.factor()) + self.offset
        again = self(x[:2]).mean()
        return (out.float() - y).pow(2).mean() + self.gain.pow(2).sum() + again.pow(2)


class Shapes(Ranked):
    """Takes the shape, dtype or device of another unit's weight, and no value, in training and validation."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        weight = next(self.net.parameters())
        start = weight.new_zeros(len(x), weight.shape[1]).float() + weight.new_ones(1)
        x = torch.where(x > 0, torch.cat([x, torch.zeros_like(weight)])[: len(x)] + x, start).to(weight)
        return super().loss((x.type_as(weight), y))


class Parts(Ranked):
    """Never calls the net itself: only what it holds, reads weights, and only some get gradients."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x * self.factor())).relu()
        penalty = self.net[3].weight.float().pow(2).sum()
        return (hidden.float().sum(1, keepdim=True) - y).pow(2).mean() + penalty


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.empty(FEATURES))
        self.register_buffer("shift", torch.empty(FEATURES))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)
        nn.init.constant_(cast("Tensor", self.shift), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale + self.shift


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Late(Ranked):
    def __init__(self, layer: Any, *, at_once: bool = False, gain: bool = False) -> None:
        super().__init__()
        self.layer, self.made = layer, False
        with torch.device("meta"):
            if at_once:
                self.configure_model()
            if gain:
                self.gain = nn.Parameter(torch.ones(1))

    def configure_model(self) -> None:
        if not self.made:
            with torch.device("meta"):
                self.net = nn.Sequential(self.layer(), nn.Linear(FEATURES, 1))
            self.made = True


def _start_and_train(module: LightningModule, mode: str, **options: Any) -> dict[str, Any]:
    start: dict[str, Any] = {}
    module.on_train_start = lambda: start.update(whole(module))
    return {**trained(mode, fsdp2(**options.pop("strategy", {})), module, **options), "start": start}


@dataclass(frozen=True)
class OnMeta:
    at_once: bool

    def run(self) -> dict[str, Any]:
        torch.manual_seed(3 + rank())
        return _start_and_train(Late(Tied, at_once=self.at_once), "bf16-true", strategy={"wrap": "Tied"})


@dataclass(frozen=True)
class LlamaOnMeta:
    def run(self) -> dict[str, Any]:
        torch.manual_seed(3 + rank())
        module, strategy = Language("tied llama", meta=True), {"wrap": None}
        options: dict[str, Any] = {"data": hf.token_batches(), "pins": {"*norm*": "fp32"}}
        result = _start_and_train(module, "bf16-mixed", strategy=strategy, **options)
        model = cast("Any", module.model)
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        return {**result, "tied": tied, "usual": whole(Language("tied llama"))}


class OwnSharding(Ranked):
    """Shards itself, as stock ``ModelParallelStrategy`` wants it."""

    def __init__(self, dtype: Any, norm_dtype: Any, **policy: Any) -> None:
        super().__init__()
        self.policy, self.done = policy, False
        self.net.to(dtype)
        self.net[1].to(norm_dtype)

    def configure_model(self) -> None:
        if self.done:
            return
        self.done = True
        options = {"mesh": self.device_mesh["data_parallel"], "mp_policy": MixedPrecisionPolicy(**self.policy)}
        fully_shard(self.net[1], **options)
        fully_shard(self.net, **options)


@dataclass(frozen=True)
class UsersOwn:
    mode: str
    dtypes: tuple[torch.dtype, torch.dtype]
    policy: dict[str, Any]
    stock: bool

    def run(self) -> dict[str, Any] | str:
        host = fsdp2()
        if self.stock:
            host["strategy"] = ModelParallelStrategy(data_parallel_size=world(), tensor_parallel_size=1, **WAIT)
        found: dict[str, Any] = {}
        module = OwnSharding(*self.dtypes, **self.policy)
        said = refused(lambda: found.update(ddp=trained(self.mode, host, module, pins=PINS)))
        return {**found, "sharded": trained(self.mode, fsdp2(), Ranked(), pins=PINS)} if found else said


def _fitted(module: LightningModule, host: dict[str, Any], mode: str = "bf16-mixed", **plan: Any) -> Any:
    return fit(module, plugins=[plan_for(mode, **plan)], **host)


def _stored_twice() -> None:
    module = Ranked()
    _fitted(module, fsdp2(), mode="32-true")
    _fitted(module, fsdp2(), mode="bf16-true")


class Unfit(Ranked):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale, self.table = nn.Parameter(torch.tensor(1.0)), nn.Embedding(4, 4, max_norm=0.5)


class Penalised(Ranked):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net[0].weight.float().pow(2).sum()


WAYS: dict[str, Callable[[], Any]] = {
    "penalty": lambda: _fitted(Penalised(), fsdp2(wrap="Linear")),
    "weights": lambda: _fitted(Unfit(), fsdp2()),
    "mesh": lambda: _fitted(Ranked(), fsdp2(device_mesh=(2, 2))),
    "several": lambda: _fitted(
        Ranked(), fsdp2(wrap="Blok"), mode="bf16-true", pins={"Lineal": "fp32"}, checkpointing="nothing"
    ),
    "meta": lambda: _fitted(Late(Bare, at_once=True, gain=True), fsdp2(), pins={"Lineal": "fp32"}),
    "second storage": _stored_twice,
}
Refused = partial(RefusedWay, "support.fsdp2_models")
