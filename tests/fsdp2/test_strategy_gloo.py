"""FSDP2 under a plan, in two real processes: every run is that of DDP, from where a model is made to its last step."""

from functools import partial
from typing import Any

import pytest
import torch

from support.comparing import of_training, same_runs
from support.fsdp2_halves import EQUAL, HEAD, LAYERS, Bytes, Kinds, PastItsPin, Read
from support.fsdp2_models import Direct, LlamaOnMeta, OnMeta, Parts, Refused, Shapes, UsersOwn
from support.models import same_weights
from support.ranks import Ranks
from support.sharded import RATE, Both, initialised_as_usual

pytestmark = pytest.mark.gloo

PINS = {"pins": {"LayerNorm": "fp32"}}
CLIP = {"gradient_clip_val": 0.5}
WAYS: dict[str, Both] = {
    "Direct": Both("16-mixed", Direct, PINS | CLIP),
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
    "penalty": ("'net.0.weight' used in the step outside of the unit",),
    "second storage": ("6 parameters sharded already", "bf16"),
}


def _equal(ranks: Ranks, case: Any, within: float = 0.0) -> None:
    """Assert that each rank's two runs are one, and that ranks hold one set of weights."""
    results = ranks.run(case)
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], within)
    assert same_weights(*(result["sharded"]["weights"] for result in results))


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_written_as_for_ddp(ranks: Ranks, way: str) -> None:
    _equal(ranks, WAYS[way], of_training(WAYS[way].mode, RATE))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_module_on_the_meta_device_is_initialised_alike_on_all_ranks(ranks: Ranks, at_once: bool) -> None:
    one, other = ranks.run(OnMeta(at_once))
    assert same_weights(one["start"], other["start"])
    assert same_weights(one["weights"], other["weights"])
    assert not same_weights(one["start"], one["weights"])
    assert "net.0.second.weight" not in one["start"]
    assert one["start"]["net.0.scale"].unique().tolist() == [0.5]
    assert one["start"]["net.0.shift"].unique().tolist() == [0.25]
    assert 0 < one["start"]["net.0.first.weight"].abs().max() <= 0.25


def test_a_llama_on_the_meta_device_is_initialised_as_usual(ranks: Ranks) -> None:
    one, other = ranks.run(LlamaOnMeta())
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
    for said in ranks.run(Refused(which)):
        assert all(words.lower() in said.lower() for words in REFUSALS[which]), said


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
    _equal(ranks, EQUAL[case])


def test_a_weight_read_elsewhere_is_refused_on_every_rank_with_the_pin_to_write(ranks: Ranks) -> None:
    for said in ranks.run(Read()):
        assert all(words in said for words in ("net.2.weight is fp16", "(pow, ", "pins={'net.2': 'fp32'}"))


@pytest.mark.parametrize("wrap", [Kinds, None])
def test_a_pinned_weight_that_is_computed_with_elsewhere_is_refused_with_its_pin(ranks: Ranks, wrap: Any) -> None:
    for said in ranks.run(Read(PastItsPin, HEAD, wrap)):
        assert "net.2.weight is pinned to fp32 ('net.2')" in said
        assert "(convolution, fsdp2_halves.py:" in said
