"""FSDP2 under a plan, in two real processes: every run is that of DDP, from where a model is made to its last step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from support.comparing import of_training, same_runs
from support.fsdp2_halves import EQUAL, HEAD, LAYERS, Bytes, Kinds, PastItsPin, Read
from support.fsdp2_models import (
    Bare,
    CannotMake,
    Direct,
    Dtypes,
    LlamaOnMeta,
    OnMeta,
    Parts,
    Refused,
    Shapes,
    UsersOwn,
)
from support.models import same_weights
from support.ranks import Ranks
from support.sharded import RATE, Both, Ranked

pytestmark = pytest.mark.gloo

PINS = {"pins": {"LayerNorm": "fp32"}}
CLIP = {"gradient_clip_val": 0.5}


WAYS: dict[str, Both] = {
    "Direct": Both("16-mixed", Direct, PINS | CLIP),
    "Shapes": Both("bf16-mixed", Shapes, {**CLIP, "num_sanity_val_steps": 1}),
    "Parts": Both("16-mixed", Parts, {"pins": {"LayerNorm": "fp32", "net.3": "fp32"}, **CLIP}, {"wrap": None}),
}
HALF = {"bf16-true": "bfloat16", "16-true": "float16"}
DTYPES: dict[str, Dtypes] = {
    "bf16": Dtypes("bf16-mixed", {"reduce_dtype": "bf16"}),
    "true": Dtypes("bf16-true", PINS),
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
    "left whole": (
        partial(UsersOwn, "32-true", (F32, F32), {"norm_alone": True}),
        ("4 trained parameters", "'net.0.weight'"),
    ),
    "computes otherwise": (
        partial(UsersOwn, "16-mixed", (F32, F32), {"param_dtype": torch.float16}),
        ("param_dtype=torch.float16",),
    ),
}
REFUSALS: dict[str, tuple[str, ...]] = {
    "no plan": ("MixedPrecisionPlan(",),
    "wrap": ("'Lineal'", "'Linear'"),
    "mesh": ("device_mesh=(2, 2)", "2 processes", "start 4"),
    "tied pin": ("of the whole model", "embed_tokens.weight in bfloat16", "norm.weight in float32", "untie"),
    "several": ("3 errors", "pin 'Lineal'", "checkpointing pattern 'nothing'", "wrap= 'Blok'"),
    "lbfgs": ("LBFGS, which evaluates its closure again, on sharded parameters", "AdamW"),
    "weights": ("2 errors", "'logit_scale'", "value.view(1)", "'table' with max_norm=0.5"),
    "penalty": ("'net.0.weight' used in the step outside of the unit",),
    "second storage": ("6 parameters sharded already", "bf16"),
}


def _equal(ranks: Ranks, case: Any, within: float) -> list[Any]:
    """Each rank's pair of runs, after seeing that the two are one; and that ranks hold one set of weights."""
    results = ranks.run(case)
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], within)
    assert same_weights(*(result["sharded"]["weights"] for result in results))
    return results


def _within(case: Any) -> float:
    """Nothing where no sum has another order: no norm of all shards is taken, and each shard is whole vectors."""
    by_norm = "gradient_clip_val" in case.options and "gradient_clip_algorithm" not in case.options
    return of_training(case.mode, RATE) if by_norm or getattr(case.module, "func", case.module) is not Ranked else 0.0


@pytest.mark.parametrize("case", DTYPES)
def test_what_is_stored_gathered_and_reduced_is_what_the_plan_says(ranks: Ranks, case: str) -> None:
    said = DTYPES[case]
    storage = HALF.get(said.mode, "float32")
    norm = "float32" if said.options.get("pins") else storage
    reduced = {"bf16": "bfloat16", "fp16": "float16"}.get(said.options.get("reduce_dtype", ""), "float32")
    for result in ranks.run(said):
        assert {name: norm if ".1." in name else storage for name in result["stored"]} == result["stored"]
        products = {"bf16-mixed": "bfloat16"}.get(said.mode, storage)
        assert result["gathered"] == {products, norm}
        assert result["reduced"] == {reduced}


# ------------------------------------------------------------------ how users write it


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_written_as_for_ddp(ranks: Ranks, way: str) -> None:
    """Own parameters, ``self(x)``, shapes of weights read in the step, frozen parts."""
    _equal(ranks, WAYS[way], _within(WAYS[way]))


# ------------------------------------------------------------------ models


@pytest.mark.parametrize(("where", "layer"), [("init_module", "net"), ("configure_model", "tied")])
def test_a_plain_module_made_on_the_meta_device_is_initialised_alike_on_all_ranks(
    ranks: Ranks, where: str, layer: str
) -> None:
    one, other = ranks.run(OnMeta(where, layer))
    assert same_weights(one["start"], other["start"])
    assert same_weights(one["weights"], other["weights"])
    assert not same_weights(one["start"], one["weights"])
    start = one["start"]
    if layer == "tied":
        assert "net.0.second.weight" not in start
        assert start["net.0.scale"].unique().tolist() == [0.5]
        assert start["net.0.shift"].unique().tolist() == [0.25]
    else:
        assert start["net.0.norm.weight"].dtype == F32
        assert start["net.0.norm.weight"].unique().tolist() == [1.0]
        assert 0 < start["net.0.up.weight"].abs().max() <= 0.25


@pytest.mark.parametrize("kind", ["tied llama"])
def test_a_llama_made_on_the_meta_device_is_initialised_as_usual(ranks: Ranks, kind: str) -> None:
    one, other = ranks.run(LlamaOnMeta(kind))
    assert same_weights(one["start"], other["start"])
    assert one["tied"] == (kind == "tied llama")
    assert one["start"].keys() == one["usual"].keys()
    for name, usual in one["usual"].items():
        made = one["start"][name]
        if "norm" in name or "inv_freq" in name:
            assert torch.equal(made, usual)
        else:
            assert abs(made.std() / usual.std() - 1) < 0.25
    assert not same_weights(one["start"], one["weights"])


def test_what_nothing_can_initialise_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks.run(CannotMake(Bare, {"Lineal": "fp32"}, gain=True)):
        for words in ("3 errors", "pin 'Lineal'", "module 'Late'", "module 'net.0'", "reset_parameters"):
            assert words.lower() in said.lower()


@pytest.mark.parametrize("strategy", ["stock", "own"])
@pytest.mark.parametrize("case", USERS)
def test_a_users_own_sharding_means_the_same_or_is_refused(ranks: Ranks, case: str, strategy: str) -> None:
    own, said = USERS[case]
    sharded = own(stock=strategy == "stock")
    if not said:
        _equal(ranks, sharded, 0.0)
        return
    for result in ranks.run(sharded):
        assert all(words.lower() in result.lower() for words in (*said, "mp_fsdp2"))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("which", REFUSALS)
def test_bad_input_is_refused_before_the_first_step(ranks: Ranks, which: str) -> None:
    for said in ranks.run(Refused(which)):
        assert all(words.lower() in said.lower() for words in REFUSALS[which]), said


# ---------------------------------------------------------------------- gathered in half precision


#: bytes that all gathers of a step bring in: 2 an element of the weights that qualify, 4 another
GATHERED = {"llama": 542_464, "gpt2": 684_288}
#: elements of a block, and of the rest, as they are cut on two processes
ELEMENTS = {"llama": (36_992, 32_320), "gpt2": (49_984, 20_352)}


@pytest.mark.parametrize("kind", GATHERED)
def test_bytes_gathered_and_kept(ranks: Ranks, kind: str) -> None:
    block, rest = ELEMENTS[kind]
    for result in ranks.run(Bytes(kind)):
        assert same_runs(result["ddp"], result["sharded"], 0.0)
        for step in result["steps"][1:]:  # in the first, ranks tell each other their order of units
            assert sum(step["gathered"]) == GATHERED[kind]
            blocks = sorted(step["gathered"])[-2 * LAYERS :] if kind == "gpt2" else step["gathered"]
            assert sum(size <= 1.01 * 2 * block for size in blocks) >= 2 * LAYERS
            assert sorted(step["reduced"]) == sorted([4 * block] * LAYERS + [4 * rest])
        assert result["kept"] == [0] * len(result["kept"])


def test_a_block_that_runs_several_times_is_reduced_once(ranks: Ranks) -> None:
    block, rest = ELEMENTS["llama"]
    for result in ranks.run(Bytes("one block")):
        assert same_runs(result["ddp"], result["sharded"], 1e-5)
        assert all(sorted(step["reduced"]) == [4 * rest, 4 * block] for step in result["steps"][1:])


@pytest.mark.parametrize("case", EQUAL)
def test_steps_are_ddps_to_the_last_bit(ranks: Ranks, case: str) -> None:
    results = ranks.run(EQUAL[case])
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], 0.0)
    assert same_weights(*(result["sharded"]["weights"] for result in results))


def test_a_weight_read_elsewhere_is_refused_on_every_rank_with_the_pin_to_write(ranks: Ranks) -> None:
    for said in ranks.run(Read()):
        assert all(words in said for words in ("net.2.weight is fp16", "(pow, ", "pins={'net.2': 'fp32'}"))


@pytest.mark.parametrize("wrap", [Kinds, None])
def test_a_pinned_weight_that_is_computed_with_elsewhere_is_refused_with_its_pin(ranks: Ranks, wrap: Any) -> None:
    for said in ranks.run(Read(PastItsPin, HEAD, wrap)):
        assert "net.2.weight is pinned to fp32 ('net.2')" in said
        assert "(convolution, fsdp2_halves.py:" in said
