"""Tensor parallelism, alone and with data parallelism: the losses, weights, norms and skips of one device."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling
from support import hf
from support.comparing import of_training, same, same_runs
from support.models import FEATURES, InfiniteGradient, Regression, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import (
    BAD_RANK,
    OPTIMIZERS,
    RATE,
    Both,
    Ranked,
    fsdp2,
    initialised_as_usual,
    rank,
    refused_way,
    trained,
    whole,
)

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
        result = trained(self.mode, fsdp2(**{"wrap": None, **strategy}), made, data=_data(made), **self.options)
        return {**result, "tied": tied(made)}


def tied(module: Shared) -> bool | None:
    if not isinstance(module, Language):
        return None
    model = cast("Any", module.model)
    return model.lm_head.weight is model.get_input_embeddings().weight


def started_on_meta() -> dict[str, Any]:
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


def given() -> dict[str, Any]:
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
pytestmark = pytest.mark.gloo
TP = {"tensor_parallel": 2}
PINNED, CLIP = {"pins": PINS}, {"gradient_clip_val": 0.5}
WINDOWS = {"checkpointing": "LlamaDecoderLayer", "accumulate_grad_batches": 2}
FUSED, MOMENTUM = partial(Language, optimizer="fused"), partial(Language, optimizer="momentum")
CASES: dict[str, Split] = {
    "fused": Split("32-true", FUSED, PINNED | CLIP),
    "tied": Split("32-true", partial(Language, "tied llama"), CLIP, {"tensor_parallel_size": 2}),
    "checkpointed": Split("32-true", options=WINDOWS),
    "16-mixed": Split("16-mixed", MOMENTUM, {**PINNED, "loss_scaling": STATIC}),
    "plain": Split("32-true", Mlp, CLIP, {**TP, "wrap": "Linear"}),
    "own parameter": Split("32-true", partial(Mlp, gain=True, optimizer="fused"), CLIP),
}
#: of what a gradient runs through: some 12 products one after the other, of 16 to 32 terms; their roundings add up
SUMMANDS = 12 * 32
#: by the number of processes
BAD: dict[int, Split] = {
    world: Split("16-mixed", partial(Language, optimizer=optimizer, bad=(2,)), PINNED | CLIP)
    for world, optimizer in ((2, "adamw"), (4, "fused"))
}
HSDP = Both("16-mixed", partial(Ranked, (2,)), {"pins": {"LayerNorm": "fp32"}, **CLIP}, {"device_mesh": (2, 2)})
REFUSALS = {
    "no plan": ("tensor_parallel=2 on Mlp", "tp_plan="),
    "style": ("'colwize'", "'colwise'", "'dawn'", "'down'"),
    "norm": ("'norm', a LayerNorm",),
    "ties": ("embed_tokens.weight and", "lm_head.weight", "tie_word_embeddings=False"),
}


@pytest.fixture(scope="module")
def worlds(ranks: Ranks) -> Iterator[dict[int, Ranks]]:
    with Ranks(4) as four:
        yield {2: ranks, 4: four}


@pytest.mark.older_cpu
@pytest.mark.parametrize(("world", "case"), [*((2, case) for case in CASES), (4, "fused")])
def test_a_split_model_trains_as_on_one_device(worlds: dict[int, Ranks], world: int, case: str) -> None:
    split = CASES[case]
    alone, results = split.alone(ranks=world // 2), worlds[world].run(split)
    losses = torch.tensor([result["losses"] for result in results], dtype=torch.double).mean(0).tolist()
    within = of_training(split.mode, RATE, len(losses), SUMMANDS)
    assert len(losses) == (8 if results[0]["tied"] is None else 10)
    assert same(losses, alone["losses"], within)
    for result in results:
        assert same(result["weights"], alone["weights"], within)
        assert same(result["norms"], alone["norms"], within)
        assert same_weights(result["weights"], results[0]["weights"])
        assert result["tied"] in (None, case == "tied")


@pytest.mark.parametrize("world", BAD)
def test_one_rank_overflowing_alone_makes_all_skip(worlds: dict[int, Ranks], world: int) -> None:
    results = worlds[world].run(BAD[world])
    for result in results:
        assert result["skipped"] == [step == 2 for step in range(10)]
        assert result["scales"] == [256.0] * 2 + [128.0] * 8
        assert same_weights(result["weights"], results[0]["weights"])
        assert all(weight.isfinite().all() for weight in result["weights"].values())


def test_hsdp_is_ddp_and_all_skip_where_one_of_four_overflows(worlds: dict[int, Ranks]) -> None:
    results = worlds[4].run(HSDP)
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], of_training("16-mixed", RATE))
        assert result["sharded"]["skipped"] == [step == 2 for step in range(8)]
        assert same_weights(result["sharded"]["weights"], results[0]["sharded"]["weights"])


def test_a_group_gets_the_same_data_and_draws_the_same_numbers(worlds: dict[int, Ranks]) -> None:
    one, also_one, other, also_other = worlds[4].call(given)
    assert one == also_one
    assert other == also_other
    assert sorted(one["rows"] + other["rows"]) == list(range(16))


def test_a_tied_llama_from_the_meta_device_is_split_initialised_and_tied(worlds: dict[int, Ranks]) -> None:
    results = worlds[2].call(started_on_meta)
    for result in results:
        assert same_weights(result["start"], results[0]["start"])
        assert result["tied"]
        assert initialised_as_usual(result["start"], result["usual"])
        assert not same_weights(result["start"], result["weights"])


@pytest.mark.parametrize("which", REFUSALS)
def test_what_cannot_be_split_is_refused(worlds: dict[int, Ranks], which: str) -> None:
    for said in worlds[2].call(refused_way, __name__, which):
        assert all(words.lower() in said.lower() for words in REFUSALS[which]), said
