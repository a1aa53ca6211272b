"""Models that are made on the meta device, cut, refused, or sharded by their users; under FSDP2 in real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import LBFGS

from support import hf
from support.collectives import recorded
from support.models import FEATURES, batches
from support.oracles import plan_for
from support.running import fit, trainer
from support.sharded import PINS, WAIT, Language, Ranked, RefusedWay, fsdp2, rank, refused, trained, whole, world


class Net(nn.Module):
    """A block with a norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, 24), nn.LayerNorm(24), nn.Linear(24, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


# ------------------------------------------------------------------ how users write them


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


# ------------------------------------------------------------------ several runs


# ------------------------------------------------------------------ the meta device


class Tied(nn.Module):
    """Weights tied by hand, a buffer, and an initialisation of its own."""

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
    """Nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Late(Ranked):
    """Makes its net on the meta device, where ``where`` says."""

    def __init__(self, where: str, *layers: Any, gain: bool = False) -> None:
        super().__init__()
        self.where, self.layers, self.made = where, layers, False
        if where == "init":
            with torch.device("meta"):
                self._make()
        elif where == "init_module":
            self._make()
        if gain:
            self.gain = nn.Parameter(torch.ones(1, device="meta"))

    def _make(self) -> None:
        self.net = nn.Sequential(*(layer() for layer in self.layers), nn.Linear(FEATURES, 1))
        self.made = True

    def configure_model(self) -> None:
        if not self.made:
            with torch.device("meta"):
                self._make()


def _start_and_train(module: LightningModule, mode: str, **options: Any) -> dict[str, Any]:
    start: dict[str, Any] = {}
    module.on_train_start = lambda: start.update(whole(module))
    result = trained(mode, fsdp2(**options.pop("strategy", {})), module, **options)
    return {**result, "start": start, "meta": [n for n, p in module.named_parameters() if p.is_meta]}


META_LAYERS = {"net": Net, "tied": Tied}
META_WRAP = {"net": "Linear", "tied": "Tied"}


@dataclass(frozen=True)
class OnMeta:
    """A plain module; ranks draw different numbers."""

    where: str
    layer: str

    def run(self) -> dict[str, Any]:
        torch.manual_seed(3 + rank())
        pins = PINS if self.layer == "net" else {}
        strategy = {"wrap": META_WRAP[self.layer]}
        if self.where != "init_module":
            module = Late(self.where, META_LAYERS[self.layer])
            return _start_and_train(module, "bf16-true", strategy=strategy, pins=pins)
        runner = trainer(plugins=[plan_for("bf16-true", pins=pins)], **fsdp2(**strategy))
        with runner.init_module(empty_init=True):
            module = Late(self.where, META_LAYERS[self.layer])
        assert next(module.net.parameters()).is_meta
        start: dict[str, Any] = {}
        module.on_train_start = lambda: start.update(whole(module))
        runner.fit(module, batches())
        return {"weights": whole(module), "start": start, "losses": module.losses}


@dataclass(frozen=True)
class LlamaOnMeta:
    """A transformers model, and the same model made as usual."""

    kind: str

    def run(self) -> dict[str, Any]:
        torch.manual_seed(3 + rank())
        module, strategy = Language(self.kind, meta=True), {"wrap": None}
        options: dict[str, Any] = {"data": hf.token_batches(), "pins": {"*norm*": "fp32"}}
        result = _start_and_train(module, "bf16-mixed", strategy=strategy, **options)
        model = cast("Any", module.model)
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        return {**result, "tied": tied, "usual": whole(Language(self.kind))}


@dataclass(frozen=True)
class CannotMake:
    """What is said of a module that cannot be made."""

    layer: type[nn.Module]
    pins: dict[str, str] = field(default_factory=dict)
    gain: bool = False

    def run(self) -> str:
        plan = plan_for("bf16-mixed", pins=self.pins)
        return refused(lambda: fit(Late("init", self.layer, gain=self.gain), plugins=[plan], **fsdp2()))


# ------------------------------------------------------------------ starts and dtypes


@dataclass(frozen=True)
class Dtypes:
    """What is stored, and what crosses between ranks."""

    mode: str
    options: dict[str, Any]

    def run(self) -> dict[str, Any]:
        seen: dict[str, set[str]] = {}
        module = Ranked()
        with recorded(seen):
            trained(self.mode, fsdp2(), module, **self.options)
        return {"stored": {name: str(p.dtype).removeprefix("torch.") for name, p in module.named_parameters()}, **seen}


# ------------------------------------------------------------------ sharded by their users


class OwnSharding(Ranked):
    """Shards itself, as stock ``ModelParallelStrategy`` wants it."""

    def __init__(self, dtype: Any, norm_dtype: Any, **policy: Any) -> None:
        super().__init__()
        self.norm_alone = policy.pop("norm_alone", False)
        self.policy, self.done = policy, False
        self.net.to(dtype)
        self.net[1].to(norm_dtype)

    def configure_model(self) -> None:
        if self.done:
            return
        self.done = True
        options = {"mesh": self.device_mesh["data_parallel"], "mp_policy": MixedPrecisionPolicy(**self.policy)}
        fully_shard(self.net[1], **options)
        if not self.norm_alone:
            fully_shard(self.net, **options)


@dataclass(frozen=True)
class UsersOwn:
    """A model that its user shards, beside the plan's own sharding; or what is said of it."""

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


# ------------------------------------------------------------------ refusals


def _fitted(
    module: LightningModule, host: dict[str, Any], data: Any = None, mode: str = "bf16-mixed", **plan: Any
) -> Any:
    return fit(module, plugins=[plan_for(mode, **plan)], data=data, **host)


def _stored_twice() -> None:
    module = Ranked()
    _fitted(module, fsdp2(), mode="32-true")
    _fitted(module, fsdp2(), mode="bf16-true")


def _lbfgs() -> None:
    module = Ranked()
    module.make_optimizer = partial(LBFGS, lr=0.1)
    _fitted(module, fsdp2())


class Unfit(Ranked):
    """Holds a parameter without a dimension, and an embedding that scales its rows in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale, self.table = nn.Parameter(torch.tensor(1.0)), nn.Embedding(4, 4, max_norm=0.5)


class Reads(Ranked):
    """What the step makes of a weight of another unit, or of a gradient, is in the loss."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x, y)) + self.read(self.net, x)


WAYS: dict[str, Callable[[], Any]] = {
    "penalty": lambda: _fitted(Reads(lambda net, x: net[0].weight.float().pow(2).sum()), fsdp2(wrap="Linear")),
    "weights": lambda: _fitted(Unfit(), fsdp2()),
    "no plan": lambda: fit(Ranked(), plugins=[HalfPrecision("bf16-true")], **fsdp2()),
    "wrap": lambda: _fitted(Ranked(), fsdp2(wrap="Lineal")),
    "mesh": lambda: _fitted(Ranked(), fsdp2(device_mesh=(2, 2))),
    "tied pin": lambda: _fitted(
        Language("tied llama"), fsdp2(wrap=None), hf.token_batches(), "16-mixed", pins={"lm_head": "bf16"}
    ),
    "several": lambda: _fitted(
        Ranked(), fsdp2(wrap="Blok"), mode="bf16-true", pins={"Lineal": "fp32"}, checkpointing="nothing"
    ),
    "lbfgs": _lbfgs,
    "second storage": _stored_twice,
}


Refused = partial(RefusedWay, "support.fsdp2_models")
