"""Tensor parallelism, alone and with data parallelism: the losses, weights, norms and skips of one device."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from support.comparing import of_training, same, same_runs
from support.models import same_weights
from support.ranks import Ranks
from support.sharded import RATE, Both, Ranked, initialised_as_usual
from support.tensor_parallel import (
    PINS,
    STATIC,
    Given,
    Language,
    Mlp,
    Refused,
    Split,
    StartedOnMeta,
)

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
    one, also_one, other, also_other = worlds[4].run(Given())
    assert one == also_one
    assert other == also_other
    assert sorted(one["rows"] + other["rows"]) == list(range(16))


def test_a_tied_llama_from_the_meta_device_is_split_initialised_and_tied(worlds: dict[int, Ranks]) -> None:
    results = worlds[2].run(StartedOnMeta())
    for result in results:
        assert same_weights(result["start"], results[0]["start"])
        assert result["tied"]
        assert initialised_as_usual(result["start"], result["usual"])
        assert not same_weights(result["start"], result["weights"])


@pytest.mark.parametrize("which", REFUSALS)
def test_what_cannot_be_split_is_refused(worlds: dict[int, Ranks], which: str) -> None:
    for said in worlds[2].run(Refused(which)):
        assert all(words.lower() in said.lower() for words in REFUSALS[which]), said
