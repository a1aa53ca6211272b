"""Models that are made on the meta device, cut, refused, or sharded by their users; under FSDP2 in real processes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import LBFGS
from torch.utils.data import DataLoader

from lightning_mp import LossScaling, NonFinite, NonFiniteError
from lightning_mp.modules.class_swap import original_class
from support import hf
from support.fsdp2 import (
    BAD_RANK,
    OPTIMIZERS,
    PINS,
    WAIT,
    Blocks,
    Net,
    Ranked,
    both,
    ddp,
    fsdp2,
    recorded,
    refused,
    trained,
    whole,
    world,
)
from support.models import FEATURES, InfiniteGradient
from support.oracles import plan_for
from support.running import fit, trainer


def rank() -> int:
    """This process's."""
    return int(os.environ["RANK"])


# ------------------------------------------------------------------ transformers


class Language(LightningModule):
    """A tiny transformers model; each rank has its own rows."""

    def __init__(self, kind: str, meta: bool = False, **config: Any) -> None:
        super().__init__()
        with torch.device("meta") if meta else nullcontext():
            self.model = make(kind, **config)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, (batch + self.global_rank) % hf.VOCABULARY)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["groups"](self.parameters())


def make(kind: str, **config: Any) -> nn.Module:
    """A model by name; a Llama may be tied."""
    if kind != "tied llama":
        return {"llama": hf.llama, "gpt2": hf.gpt2}[kind](**config)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": hf.VOCABULARY, "hidden_size": hf.WIDTH, "intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).train()


def token_batches() -> Any:
    """Fixed token ids."""
    return DataLoader(cast("Any", hf.tokens(16)), batch_size=2)


def units_of(module: nn.Module) -> list[str]:
    """The names of the shard units below ``module``."""
    return [name for name, part in module.named_modules() if name and isinstance(part, FSDPModule)]


def language(kind: str, mode: str, options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    """A transformers model under both hosts; how it was cut."""
    found = {"ddp": trained(mode, ddp(), Language(kind), data=token_batches(), **dict(options))}
    module = Language(kind)
    host = fsdp2(**{"wrap": None, **strategy})
    found["fsdp2"] = trained(mode, host, module, data=token_batches(), **dict(options))
    return {**found, "units": units_of(module)}


def compiled(how: str) -> dict[str, Any]:
    """Compiled blocks; what was compiled, whether that was checkpointed and sharded by then, and how many graphs."""
    graphs: list[Any] = []
    order: list[tuple[str, bool, bool]] = []
    compile_ = nn.Module.compile

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def noting(module: nn.Module) -> None:
        checkpointed = "_lmp_checkpoint" in module.__dict__
        order.append((original_class(module).__name__, checkpointed, isinstance(module, FSDPModule)))
        compile_(module, backend=backend)

    nn.Module.compile = noting
    options: dict[str, Any] = {
        "pinned": {"pins": PINS},
        "checkpointed": {"checkpointing": "Net"},
        "both": {"pins": PINS, "checkpointing": "Net"},
    }[how]
    try:
        found = both(Blocks, "bf16-mixed", {"wrap": Net, "compile": True}, **options)
    finally:
        nn.Module.compile = compile_
        torch._dynamo.reset()
    return {**found, "order": order, "graphs": len(graphs)}


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


class Forgotten(nn.Module):
    """Its reset leaves one parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.empty(FEATURES)), nn.Parameter(torch.zeros(FEATURES))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.left


class Bare(nn.Module):
    """Nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Initialises(nn.Module):
    """Initialises its modules as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.BatchNorm1d(FEATURES))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.125)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


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


def on_meta(where: str, layer: str, mode: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """A plain module; ranks draw different numbers."""
    torch.manual_seed(3 + rank())
    make_layer = {"net": Net, "tied": Tied, "nanogpt": Initialises}[layer]
    if where == "init_module":
        plan = plan_for(mode, pins=PINS if layer == "net" else {})
        runner = trainer(plugins=[plan], **fsdp2(**strategy))
        with runner.init_module(empty_init=True):
            module = Late(where, make_layer)
        assert next(module.net.parameters()).is_meta
        start: dict[str, Any] = {}
        module.on_train_start = lambda: start.update(whole(module))
        from support.models import batches

        runner.fit(module, batches())
        return {"weights": whole(module), "start": start, "losses": module.losses}
    options: dict[str, Any] = {"pins": PINS} if layer == "net" else {}
    return _start_and_train(Late(where, make_layer), mode, strategy=strategy, **options)


def llama_on_meta(kind: str, mode: str) -> dict[str, Any]:
    """A transformers model, and the same model made as usual."""
    torch.manual_seed(3 + rank())
    module = Language(kind, meta=True)
    strategy: dict[str, Any] = {"wrap": None}
    result = _start_and_train(module, mode, strategy=strategy, data=token_batches(), pins={"*norm*": "fp32"})
    model = cast("Any", module.model)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    return {**result, "tied": tied, "usual": whole(Language(kind))}


def not_initialised(layer: str) -> str:
    """What is said of a module that cannot be made."""
    layers = {"bare": Bare, "forgotten": Forgotten}
    plan = plan_for("bf16-mixed", pins={"Lineal": "fp32"} if layer == "bare" else {})
    return refused(lambda: fit(Late("init", layers[layer], gain=layer == "bare"), plugins=[plan], **fsdp2()))


# ------------------------------------------------------------------ starts and stops


def different_starts() -> dict[str, Any]:
    """Ranks that start from different weights and buffers."""
    module = Ranked()
    module.register_buffer("count", torch.full((3,), rank()))
    start = whole(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank())
    return {"first": start, **trained("32-true", fsdp2(), module, limit_train_batches=0)}


def stopped(mode: str, how: str) -> dict[str, Any]:
    """The error each rank's run ended with."""

    class Sick(Ranked):
        def loss(self, batch: Any) -> Tensor:
            guilty = self.global_rank == BAD_RANK and self.trainer.global_step >= 2
            x, y = batch
            hidden = self.net[1](self.net[0](x * float("nan") if guilty and how == "batch" else x)).relu()
            if guilty and how == "gradient":
                hidden = InfiniteGradient.apply(hidden)
            loss = (self.net[3](hidden).float() - y).pow(2).mean()
            return loss * float("nan") if guilty and how == "loss" else loss

    rule: Any = "raise" if how == "loss" else NonFinite(max_consecutive=2)
    try:
        fit(Sick(), plugins=[plan_for(mode, LossScaling.static(64.0), nonfinite=rule, pins=PINS)], **fsdp2())
    except NonFiniteError as error:
        return {"rank": error.rank, "step": error.step, "module": error.module, "message": str(error)}
    return {}


def dtypes(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is stored, and what crosses between ranks."""
    seen: dict[str, set[str]] = {}
    module = Ranked()
    plan = plan_for(mode, **options)
    with recorded(seen):
        fit(module, plugins=[plan], **fsdp2())
    stored = {name: str(p.dtype).removeprefix("torch.") for name, p in module.named_parameters()}
    return {"stored": stored, **seen}


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


def users(strategy: str, mode: str, dtypes: tuple[Any, Any], policy: dict[str, Any]) -> dict[str, Any] | str:
    """A model that its user shards, beside the plan's own sharding."""
    pins = {"pins": PINS}
    host = fsdp2()
    if strategy == "stock":
        stock = ModelParallelStrategy(data_parallel_size=world(), tensor_parallel_size=1, **WAIT)
        host = {**host, "strategy": stock}
    found: dict[str, Any] = {}

    def go() -> None:
        found["ddp"] = trained(mode, host, OwnSharding(*dtypes, **policy), **pins)

    said = refused(go)
    if not found:
        return said
    return {**found, "fsdp2": trained(mode, fsdp2(), Ranked(), **pins)}


# ------------------------------------------------------------------ refusals


def refusal(which: str) -> str:
    """What is said instead of running."""
    bf16: dict[str, Any] = {"plugins": [plan_for("bf16-mixed")]}
    half = plan_for("16-mixed", pins={"lm_head": "bf16"})
    several = plan_for("bf16-true", pins={"Lineal": "fp32"}, checkpointing="nothing")

    recomputed = plan_for("bf16-true", pins=PINS, checkpointing="Net")

    def second_storage() -> None:
        module = Ranked()
        fit(module, plugins=[plan_for("32-true")], **fsdp2())
        fit(module, plugins=[plan_for("bf16-true")], **fsdp2())

    ways: dict[str, Any] = {
        "no plan": lambda: fit(Ranked(), precision="bf16-mixed", **fsdp2()),
        "wrap": lambda: fit(Ranked(), **bf16, **fsdp2(wrap="Lineal")),
        "wrap class": lambda: fit(Ranked(), **bf16, **fsdp2(wrap=[nn.Linear, nn.Bilinear])),
        "wrap empty": lambda: fit(Ranked(), **bf16, **fsdp2(wrap="ReLU")),
        "mesh": lambda: fit(Ranked(), **bf16, **fsdp2(device_mesh=(2, 2))),
        "sizes": lambda: fit(Ranked(), **bf16, **fsdp2(data_parallel_size=3)),
        "tensor": lambda: fit(Ranked(), **bf16, **fsdp2(tensor_parallel=3)),
        "tied pin": lambda: fit(Language("tied llama"), plugins=[half], data=token_batches(), **fsdp2(wrap=None)),
        "several": lambda: fit(Ranked(), plugins=[several], **fsdp2(wrap="Blok")),
        "lbfgs": lambda: _lbfgs(bf16),
        "compile": lambda: fit(Blocks(), plugins=[recomputed], **fsdp2(wrap=Net, compile=True)),
        "second storage": second_storage,
    }
    said = refused(ways[which])
    dist.barrier()
    return said


def _lbfgs(plan: dict[str, Any]) -> None:
    module = Ranked()
    module.make_optimizer = partial(LBFGS, lr=0.1)
    fit(module, **plan, **fsdp2())
