"""FSDP2 under a plan, in two real processes: every run is that of DDP, from where a model is made to its last step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support import hf
from support.comparing import of_training, same_runs
from support.fsdp2_halves import EQUAL, HEAD, LAYERS, Kinds, PastItsPin, bytes_moved, read
from support.models import FEATURES, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import (
    PINS,
    RATE,
    WAIT,
    Both,
    Language,
    Ranked,
    fsdp2,
    initialised_as_usual,
    rank,
    refused,
    refused_way,
    trained,
    whole,
    world,
)


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


class Forces(Ranked):
    """The gradient of the output by the input is part of the loss, as of potentials and of gradient penalties."""

    def loss(self, batch: Any) -> Tensor:
        x = (batch[0] * self.factor()).requires_grad_(True)
        energy = self.net(x).float()
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (energy - batch[1]).pow(2).mean() + forces.float().pow(2).mean()


class Noted(Ranked):
    """``configure_optimizers`` reads what the model noted on a parameter, as Mamba notes ``_no_weight_decay``."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight._no_weight_decay = True

    def configure_optimizers(self) -> Any:
        noted = [p for p in self.parameters() if hasattr(p, "_no_weight_decay")]
        others = [p for p in self.parameters() if not hasattr(p, "_no_weight_decay")]
        assert len(noted) == 1
        return torch.optim.AdamW([{"params": noted, "weight_decay": 0.0}, {"params": others}], RATE, eps=1e-4)


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


def on_meta(at_once: bool) -> dict[str, Any]:
    torch.manual_seed(3 + rank())
    return _start_and_train(Late(Tied, at_once=at_once), "bf16-true", strategy={"wrap": "Tied"})


def llama_on_meta() -> dict[str, Any]:
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


class SparseAndComplex(Ranked):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, FEATURES, sparse=True)
        self.spectrum = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex64))


class Penalised(Ranked):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net[0].weight.float().pow(2).sum()


WAYS: dict[str, Callable[[], Any]] = {
    "penalty": lambda: _fitted(Penalised(), fsdp2(wrap="Linear")),
    "weights": lambda: _fitted(Unfit(), fsdp2()),
    "gradients": lambda: _fitted(SparseAndComplex(), fsdp2()),
    "mesh": lambda: _fitted(Ranked(), fsdp2(device_mesh=(2, 2))),
    "several": lambda: _fitted(
        Ranked(), fsdp2(wrap="Blok"), mode="bf16-true", pins={"Lineal": "fp32"}, checkpointing="nothing"
    ),
    "meta": lambda: _fitted(Late(Bare, at_once=True, gain=True), fsdp2(), pins={"Lineal": "fp32"}),
    "second storage": _stored_twice,
}
pytestmark = pytest.mark.gloo
PINNED = {"pins": {"LayerNorm": "fp32"}}
CLIP = {"gradient_clip_val": 0.5}
WRITTEN: dict[str, Both] = {
    "Direct": Both("16-mixed", Direct, PINNED | CLIP),
    "Forces": Both("32-true", Forces),
    "Noted": Both("32-true", Noted),
    "Shapes": Both("bf16-mixed", Shapes, {**CLIP, "num_sanity_val_steps": 1}),
    "Parts": Both("16-mixed", Parts, {"pins": {"LayerNorm": "fp32", "net.3": "fp32"}, **CLIP}, {"wrap": None}),
}
F32, BF16 = torch.float32, torch.bfloat16
#: a user's own sharding: mode, the dtypes of net and norm, its MixedPrecisionPolicy; and what is said, if anything
USERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mixed": (partial(UsersOwn, "16-mixed", (F32, F32), {}), ()),
    "true": (partial(UsersOwn, "bf16-true", (BF16, F32), {"reduce_dtype": F32}), ()),
    "reduces in half": (
        partial(UsersOwn, "bf16-true", (BF16, F32), {}),
        ("'net' with MixedPrecisionPolicy(", "reduce_dtype=torch.float32"),
    ),
    "computes otherwise": (
        partial(UsersOwn, "16-mixed", (F32, F32), {"param_dtype": torch.float16}),
        ("param_dtype=torch.float16",),
    ),
}
REFUSALS: dict[str, tuple[str, ...]] = {
    "mesh": ("device_mesh=(2, 2)", "2 processes", "start 4"),
    "several": ("3 errors", "pin 'Lineal'", "checkpointing pattern 'nothing'", "wrap= 'Blok'"),
    "meta": ("3 errors", "pin 'Lineal'", "module 'Late'", "module 'net.0'", "reset_parameters"),
    "weights": ("2 errors", "'logit_scale'", "value.view(1)", "'table' with max_norm=0.5"),
    "gradients": ("2 errors", "'spectrum', a complex parameter", "view_as_real", "'table' with sparse=True", "mp_ddp"),
    "penalty": ("'net.0.weight' used in the step outside of the unit",),
    "second storage": ("6 parameters sharded already", "bf16"),
}


def _equal(ranks: Ranks, case: Any, within: float = 0.0) -> None:
    """Assert that each rank's two runs are one, and that ranks hold one set of weights."""
    results = ranks.run(case)
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], within)
    assert same_weights(*(result["sharded"]["weights"] for result in results))


@pytest.mark.parametrize("way", WRITTEN)
def test_modules_are_written_as_for_ddp(ranks: Ranks, way: str) -> None:
    _equal(ranks, WRITTEN[way], of_training(WRITTEN[way].mode, RATE))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_module_on_the_meta_device_is_initialised_alike_on_all_ranks(ranks: Ranks, at_once: bool) -> None:
    one, other = ranks.call(on_meta, at_once)
    assert same_weights(one["start"], other["start"])
    assert same_weights(one["weights"], other["weights"])
    assert not same_weights(one["start"], one["weights"])
    assert "net.0.second.weight" not in one["start"]
    assert one["start"]["net.0.scale"].unique().tolist() == [0.5]
    assert one["start"]["net.0.shift"].unique().tolist() == [0.25]
    assert 0 < one["start"]["net.0.first.weight"].abs().max() <= 0.25


def test_a_llama_on_the_meta_device_is_initialised_as_usual(ranks: Ranks) -> None:
    one, other = ranks.call(llama_on_meta)
    assert same_weights(one["start"], other["start"])
    assert one["tied"]
    assert initialised_as_usual(one["start"], one["usual"])
    assert not same_weights(one["start"], one["weights"])


@pytest.mark.parametrize("strategy", ["stock", "own"])
@pytest.mark.parametrize("case", USERS)
def test_a_users_own_sharding_means_the_same_or_is_refused(ranks: Ranks, case: str, strategy: str) -> None:
    own, said = USERS[case]
    sharded = own(stock=strategy == "stock")
    if not said:
        _equal(ranks, sharded)
        return
    for result in ranks.run(sharded):
        assert all(words.lower() in result.lower() for words in (*said, "mp_fsdp2"))


@pytest.mark.parametrize("which", REFUSALS)
def test_bad_input_is_refused_before_the_first_step(ranks: Ranks, which: str) -> None:
    for said in ranks.call(refused_way, __name__, which):
        assert all(words.lower() in said.lower() for words in REFUSALS[which]), said


#: bytes that all gathers of a step bring in: 2 an element of the weights that qualify, 4 another
GATHERED = {"llama": 542_464, "gpt2": 684_288}
#: elements of a block, and of the rest, as they are cut on two processes
ELEMENTS = {"llama": (36_992, 32_320), "gpt2": (49_984, 20_352)}


@pytest.mark.parametrize("kind", GATHERED)
def test_bytes_gathered_and_kept(ranks: Ranks, kind: str) -> None:
    block, rest = ELEMENTS[kind]
    for result in ranks.call(bytes_moved, kind):
        assert same_runs(result["ddp"], result["sharded"], 0.0)
        for step in result["steps"][1:]:  # in the first, ranks tell each other their order of units
            assert sum(step["gathered"]) == GATHERED[kind]
            blocks = sorted(step["gathered"])[-2 * LAYERS :] if kind == "gpt2" else step["gathered"]
            assert sum(size <= 1.01 * 2 * block for size in blocks) >= 2 * LAYERS
            assert sorted(step["reduced"]) == sorted([4 * block] * LAYERS + [4 * rest])
        assert result["kept"] == [0] * len(result["kept"])


def test_a_block_that_runs_several_times_is_reduced_once(ranks: Ranks) -> None:
    block, rest = ELEMENTS["llama"]
    for result in ranks.call(bytes_moved, "one block"):
        assert same_runs(result["ddp"], result["sharded"], 1e-5)
        assert all(sorted(step["reduced"]) == [4 * rest, 4 * block] for step in result["steps"][1:])


@pytest.mark.parametrize("case", EQUAL)
def test_steps_are_ddps_to_the_last_bit(ranks: Ranks, case: str) -> None:
    _equal(ranks, EQUAL[case])


def test_a_weight_read_elsewhere_is_refused_on_every_rank_with_the_pin_to_write(ranks: Ranks) -> None:
    for said in ranks.call(read):
        assert all(words in said for words in ("net.2.weight is fp16", "(pow, ", "pins={'net.2': 'fp32'}"))


@pytest.mark.parametrize("wrap", [Kinds, None])
def test_a_pinned_weight_that_is_computed_with_elsewhere_is_refused_with_its_pin(ranks: Ranks, wrap: Any) -> None:
    for said in ranks.call(read, PastItsPin, wrap, **HEAD):
        assert "net.2.weight is pinned to fp32 ('net.2')" in said
        assert "(convolution, fsdp2_halves.py:" in said
