"""Tensor parallelism, alone and with data parallelism: the losses, weights, norms and skips of one device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from support import fsdp2
from support import tensor_parallel as tp
from support.comparing import of_ranks, same
from support.gloo import run_ranks
from support.models import same_weights

pytestmark = pytest.mark.gloo

TP = {"tensor_parallel": 2}
PINS, CLIP = {"pins": tp.PINS}, {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
#: name → model, mode, module, options, strategy
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "adamw": ("llama", "32-true", {}, PINS | CLIP, TP),
    "fused": ("llama", "32-true", {"optimizer": "fused"}, PINS | CLIP, TP),
    "tied": ("tied llama", "32-true", {"kind": "tied llama"}, CLIP, {"tensor_parallel_size": 2}),
    "by value": ("llama", "32-true", {}, BY_VALUE, {**TP, "wrap": "LlamaDecoderLayer"}),
    "checkpointed": ("llama", "32-true", {}, {"checkpointing": "LlamaDecoderLayer", "accumulate_grad_batches": 2}, TP),
    "16-mixed": ("llama", "16-mixed", {"optimizer": "momentum"}, {**PINS, "loss_scaling": tp.STATIC}, TP),
    "bf16-mixed": ("llama", "bf16-mixed", {"optimizer": "momentum"}, PINS, TP),
    "plain": ("mlp", "32-true", {}, CLIP, {**TP, "wrap": "Linear"}),
    "own parameter": ("mlp", "32-true", {"gain": True, "optimizer": "fused"}, CLIP, TP),
}
#: 16-bit products of halves are rounded otherwise than those of the whole
WITHIN = {"16-mixed": 1e-3, "bf16-mixed": 1e-3}
#: by the number of processes
BAD: dict[int, tuple[Any, ...]] = {
    world: ("llama", "16-mixed", {"optimizer": optimizer, "bad": (2,)}, PINS | CLIP, TP)
    for world, optimizer in ((2, "adamw"), (4, "fused"))
}
IN_TWO = {**TP, "tp_plan": tp.MLP_PLAN}
HSDP = ("16-mixed", {"bad": (2,)}, {"pins": {"LayerNorm": "fp32"}, **CLIP}, {"device_mesh": (2, 2)})
#: (strategy, magnitude) by the number of processes
NORMS: dict[int, list[tuple[dict[str, Any], int]]] = {
    2: [({}, 1), (IN_TWO, 0), (IN_TWO, 1), (IN_TWO, 2)],
    4: [({"device_mesh": (2, 2)}, 1), (IN_TWO, 1), ({**IN_TWO, "device_mesh": (2, 1)}, 2)],
}
REFUSALS = {
    "no plan": ("tensor_parallel=2 on Mlp", "tp_plan="),
    "features": ("up.weight of shape (25, 16)", "down.weight of shape (1, 25)", "2 faults"),
    "style": ("'colwize'", "'colwise'", "'dawn'", "'down'"),
    "norm": ("'norm', a LayerNorm",),
    "ties": ("embed_tokens.weight whole and", "lm_head.weight split along dimension 0", "tie_word_embeddings=False"),
}
CASES_OF_FOUR = ("fused", "own parameter")


def _scenarios(world: int) -> list[tuple[str, str, tuple[Any, ...]]]:
    home = "tensor_parallel:"
    some = CASES if world == 2 else CASES_OF_FOUR
    shared = [
        *((key, f"{home}split", CASES[key]) for key in some),
        ("bad", f"{home}split", BAD[world]),
        ("meta", f"{home}started_on_meta", (TP,)),
        ("given", f"{home}given", (TP,)),
        *((f"norms {n}", f"{home}norms", case) for n, case in enumerate(NORMS[world])),
    ]
    if world == 4:
        return [*shared, ("hsdp", "ranked", HSDP), ("refused heads", f"{home}refusal", ("heads",))]
    return [*shared, *((f"refused {which}", f"{home}refusal", (which,)) for which in REFUSALS)]


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What the ranks brought back: two that split each layer, and four, of which pairs do."""
    return {world: run_ranks(fsdp2.run, _scenarios(world), world=world, timeout=200) for world in (2, 4)}


@pytest.mark.parametrize(("world", "case"), [(2, case) for case in CASES] + [(4, case) for case in CASES_OF_FOUR])
def test_a_split_model_trains_as_on_one_device(worlds: Any, world: int, case: str) -> None:
    kind, mode, module, options, _ = CASES[case]
    alone = tp.single(kind, mode, {**module, "ranks": world // 2}, **deepcopy(options))
    results = of_ranks(worlds[world], case)
    losses = torch.tensor([result["losses"] for result in results]).mean(0)
    within = WITHIN.get(mode, 1e-5)
    assert len(losses) == (8 if kind == "mlp" else 10)
    assert (losses - torch.tensor(alone["losses"])).abs().max() < within
    for result in results:
        assert same(result["weights"], alone["weights"], within, within)
        assert same(result["norms"], alone["norms"], within)
        assert same_weights(result["weights"], results[0]["weights"])
        assert result["tied"] in (None, kind == "tied llama")


def test_layers_are_split_and_the_rest_is_whole_in_each_group(worlds: Any) -> None:
    for result in of_ranks(worlds[2], "adamw"):
        placed = {name.removeprefix("model.model.layers.0."): places for name, places in result["placements"].items()}
        assert placed["self_attn.q_proj.weight"].endswith("Shard(dim=0))")
        assert placed["self_attn.o_proj.weight"].endswith("Shard(dim=1))")
        assert placed["input_layernorm.weight"].endswith("Replicate())")


@pytest.mark.parametrize("world", BAD)
def test_one_rank_overflowing_alone_makes_all_skip(worlds: Any, world: int) -> None:
    results = of_ranks(worlds[world], "bad")
    for result in results:
        assert result["skipped"] == [step == 2 for step in range(10)]
        assert result["scales"] == [256.0] * 2 + [128.0] * 8
        assert same_weights(result["weights"], results[0]["weights"])
        assert all(weight.isfinite().all() for weight in result["weights"].values())


def test_hsdp_is_ddp_and_all_skip_where_one_of_four_overflows(worlds: Any) -> None:
    results = of_ranks(worlds[4], "hsdp")
    for result in results:
        assert all(same(result["ddp"][key], result["fsdp2"][key]) for key in result["ddp"])
        assert result["fsdp2"]["skipped"] == [step == 2 for step in range(8)]
        assert same_weights(result["fsdp2"]["weights"], results[0]["fsdp2"]["weights"])


@pytest.mark.parametrize(("world", "number"), [(world, n) for world in NORMS for n in range(len(NORMS[world]))])
def test_the_norm_over_all_meshes_is_that_of_the_whole_gradients(worlds: Any, world: int, number: int) -> None:
    for result in of_ranks(worlds[world], f"norms {number}"):
        assert result["taken"] == pytest.approx(result["whole"], rel=1e-5)
        assert result["clipped"] == pytest.approx(min(result["whole"], 0.5), rel=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_gets_the_same_data_and_draws_the_same_numbers(worlds: Any, world: int) -> None:
    results = of_ranks(worlds[world], "given")
    groups = [results[start : start + 2] for start in range(0, world, 2)]
    for one, other in groups:
        assert one == other
    rows = [row for one, _ in groups for row in one["rows"]]
    assert sorted(rows) == list(range(16))


@pytest.mark.parametrize("world", [2, 4])
def test_a_tied_llama_from_the_meta_device_is_split_initialised_and_tied(worlds: Any, world: int) -> None:
    results = of_ranks(worlds[world], "meta")
    for result in results:
        assert same_weights(result["start"], results[0]["start"])
        assert result["tied"]
        assert result["start"].keys() == result["usual"].keys()
        for name, usual in result["usual"].items():
            exact = "norm" in name or "inv_freq" in name
            made = result["start"][name]
            assert torch.equal(made, usual) if exact else abs(made.std() / usual.std() - 1) < 0.25
        assert not same_weights(result["start"], result["weights"])


@pytest.mark.parametrize("which", REFUSALS)
def test_what_cannot_be_split_is_refused(worlds: Any, which: str) -> None:
    for said in of_ranks(worlds[2], f"refused {which}"):
        assert all(words in said for words in REFUSALS[which]), said


def test_heads_that_do_not_divide_are_refused(worlds: Any) -> None:
    for said in of_ranks(worlds[4], "refused heads"):
        assert "tensor_parallel=4 with num_key_value_heads=2" in said
