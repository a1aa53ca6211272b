"""FSDP2 under a plan, in two real processes: every run is that of DDP, from where a model is made to its last step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import fsdp2
from support.comparing import of_ranks, same
from support.gloo import run_ranks
from support.models import same_weights
from support.oracles import MODES

pytestmark = pytest.mark.gloo

PINS = {"pins": {"LayerNorm": "fp32"}}
CLIP = {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
HALVES = {"accumulate_grad_batches": 2}
OPTIMIZERS = ("adamw", "momentum", "sgd", "groups", "adagrad")
WAYS = ("Direct", "Parts", "Returns", "Frozen", "Attends")
RUNS = ("validate", "predict", "failed", "new trainer", "new plan", "same trainer")

#: name → mode, what the module is made with, what the plan and the Trainer get, what the strategy gets
RANKED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{mode: (mode, {"bad": (2,)}, PINS, {}) for mode in MODES},
    **{name: ("16-mixed", {"bad": (2,), "optimizer": name, "schedule": True}, PINS | CLIP, {}) for name in OPTIMIZERS},
    "by value": ("16-mixed", {"bad": (2,)}, BY_VALUE, {}),
    "accumulation": ("16-mixed", {}, PINS | HALVES, {}),
    "overflow in a window": ("16-mixed", {"bad": (2, 5)}, PINS | HALVES | CLIP, {}),
    "one shard": ("16-mixed", {}, PINS | CLIP, {"device_mesh": (2, 1)}),
    "reduced in bf16": ("bf16-true", {}, {"reduce_dtype": "bf16"}, {}),
}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "checkpointed": ("16-mixed", {**PINS, "checkpointing": "Net"}, {}),
    "prefetched": ("bf16-mixed", {**PINS, "checkpointing": "Net"}, {"prefetch": 1}),
    "offloaded": ("16-mixed", PINS | CLIP, {"cpu_offload": True}),
    "resharded": ("16-mixed", PINS | CLIP, {"reshard_after_forward": True}),
}
#: how many backward passes come before a step, overflows by batch, units, optimizer
BY_HAND: dict[str, tuple[str, str, dict[int, str], Any, str]] = {
    "in turns": ("turns", "16-mixed", {3: "net"}, "Linear", "adamw"),
    "in turns, all in the root": ("turns", "16-mixed", {3: "net other"}, None, "fused"),
    "in turns, a unit a net": ("turns", "32-true", {}, "Sequential", "momentum"),
    "together": ("together", "16-mixed", {3: "other"}, "Linear", "fused"),
    "together, all in the root": ("together", "bf16-mixed", {}, None, "adamw"),
}
#: what is compiled: its class, whether it was checkpointed by then, and whether sharded
COMPILED = {
    "pinned": [("Net", False, False)] * 2,
    "checkpointed": [("Net", True, False)] * 2,
    "both": [("Net", True, False)] * 2,
}
HALF = {"bf16-true": "bfloat16", "16-true": "float16"}
DTYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("bf16-mixed", {}),
    "bf16": ("bf16-mixed", {"reduce_dtype": "bf16"}),
    "true": ("bf16-true", PINS),
    "true in fp16": ("16-true", {"reduce_dtype": "fp16"}),
}
STOPS = [(mode, how) for mode in ("bf16-mixed", "16-mixed") for how in ("batch", "gradient", "loss")]
SHARED_UNITS = ["model.transformer.h.0", "model.transformer.h.1"]
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "16-mixed", {"pins": {"*norm*": "fp32"}}, {}),
    "tied llama": ("tied llama", "32-true", {"pins": {"*norm*": "fp32"}, **CLIP}, {}),
    "gpt2": ("gpt2", "bf16-mixed", {"pins": {"ln_*": "fp32"}}, {}),
    "checkpointed llama": ("llama", "bf16-true", {"checkpointing": "LlamaDecoderLayer"}, {"prefetch": 2}),
}
META = [(where, layer) for where in ("init", "configure_model", "init_module") for layer in ("net", "tied", "nanogpt")]
META_WRAP = {"net": "Linear", "tied": "Tied", "nanogpt": "LayerNorm"}
F32, BF16 = torch.float32, torch.bfloat16
#: a user's own sharding: mode, the dtypes of net and norm, its MixedPrecisionPolicy, what is said (or nothing)
USERS: dict[str, tuple[str, Any, dict[str, Any], tuple[str, ...]]] = {
    "mixed": ("16-mixed", (F32, F32), {}, ()),
    "true": ("bf16-true", (BF16, F32), {"reduce_dtype": F32}, ()),
    "reduces in half": ("bf16-true", (BF16, F32), {}, ("'net' with MixedPrecisionPolicy(reduce_dtype=None)",)),
    "stored otherwise": ("bf16-true", (F32, F32), {}, ("4 parameters", "'net.0.weight' in torch.float32", "bf16")),
    "left whole": ("32-true", (F32, F32), {"norm_alone": True}, ("4 trained parameters", "'net.0.weight'", "2 data-")),
    "computes otherwise": ("16-mixed", (F32, F32), {"param_dtype": torch.float16}, ("param_dtype=torch.float16",)),
}
REFUSALS: dict[str, tuple[str, ...]] = {
    "no plan": ("MixedPrecisionPlan(",),
    "wrap": ("'Lineal'", "'Linear'"),
    "wrap class": ("'Bilinear'", "'Linear'"),
    "wrap empty": ("'ReLU'", "no parameters"),
    "mesh": ("device_mesh=(2, 2)", "2 processes", "start 4"),
    "sizes": ("3 data-parallel ranks", "2 processes"),
    "tensor": ("tensor_parallel=3", "2 processes"),
    "tied pin": ("of the whole model", "embed_tokens.weight in bfloat16", "norm.weight in float32", "untie"),
    "several": ("3 faults", "pin 'Lineal'", "checkpointing pattern 'nothing'", "wrap= 'Blok'"),
    "lbfgs": ("LBFGS on sharded parameters", "AdamW"),
    "compile": ("compile=True beside checkpointing", "'net.0.norm'"),
    "second storage": ("6 parameters sharded already", "bf16"),
}


def _scenarios() -> list[tuple[str, str, tuple[Any, ...]]]:
    models, ways = "fsdp2_models:", "fsdp2_ways:"
    strategies = ("stock", "own")
    return [
        *((f"ranked {key}", "ranked", case) for key, case in RANKED.items()),
        *((f"blocks {key}", "blocks", case) for key, case in BLOCKS.items()),
        *((f"compiled {key}", f"{models}compiled", (key,)) for key in COMPILED),
        *((f"way {way}", f"{ways}way", _way(way)) for way in WAYS),
        *((f"by hand {key}", f"{ways}by_hand", case) for key, case in BY_HAND.items()),
        *((f"again {how}", f"{ways}again", (how,)) for how in RUNS),
        ("restored", f"{ways}restored", ()),
        ("averaged", f"{ways}averaged", ()),
        *((f"model {key}", f"{models}language", case) for key, case in MODELS.items()),
        *((f"meta {w} {k}", f"{models}on_meta", (w, k, "bf16-true", {"wrap": META_WRAP[k]})) for w, k in META),
        *((f"meta {kind}", f"{models}llama_on_meta", (kind, "bf16-mixed")) for kind in ("llama", "tied llama")),
        *((f"cannot make {kind}", f"{models}not_initialised", (kind,)) for kind in ("bare", "forgotten")),
        ("starts", f"{models}different_starts", ()),
        *((f"stopped {mode} {how}", f"{models}stopped", (mode, how)) for mode, how in STOPS),
        *((f"dtypes {key}", f"{models}dtypes", case) for key, case in DTYPES.items()),
        *((f"users {key} {s}", f"{models}users", (s, *case[:3])) for key, case in USERS.items() for s in strategies),
        *((f"refused {which}", f"{models}refusal", (which,)) for which in REFUSALS),
    ]


def _way(way: str) -> tuple[Any, ...]:
    pins = {"pins": {"norm*": "fp32"}} if way == "Attends" else PINS
    wrap = {"Parts": None, "Attends": "TransformerEncoderLayer"}.get(way, "Linear")
    return way, "32-true" if way == "Attends" else "16-mixed", {"wrap": wrap}, pins | CLIP


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    return run_ranks(fsdp2.run, _scenarios(), timeout=240)


def _equal(ranks: Any, key: str) -> list[Any]:
    """Each rank's pair of runs, after seeing that the two are one; and that ranks hold one set of weights."""
    results = of_ranks(ranks, key)
    for result in results:
        for what, expected in result["ddp"].items():
            assert same(expected, result["fsdp2"][what]), what
    assert same_weights(*(result["fsdp2"]["weights"] for result in results))
    return results


# ------------------------------------------------------------------ the step


@pytest.mark.parametrize("case", RANKED)
def test_steps_norms_skips_scales_and_schedules_are_ddps(ranks: Any, case: str) -> None:
    """And one rank's overflow is everybody's skip."""
    _, module, options, _ = RANKED[case]
    bad = module.get("bad", ())
    for result in _equal(ranks, f"ranked {case}"):
        batches = 8 // options.get("accumulate_grad_batches", 1)
        assert result["fsdp2"]["counts"] == (batches - len(bad), len(bad))
        assert bool(result["fsdp2"]["norms"]) == (options.get("gradient_clip_val") == 0.5)
        if module.get("schedule"):
            assert result["fsdp2"]["lrs"][2] == result["fsdp2"]["lrs"][3]


@pytest.mark.parametrize("case", BLOCKS)
def test_checkpointing_prefetch_and_offload_change_no_number(ranks: Any, case: str) -> None:
    _equal(ranks, f"blocks {case}")


@pytest.mark.parametrize("case", COMPILED)
def test_blocks_are_compiled_after_checkpointing_and_before_sharding(ranks: Any, case: str) -> None:
    for result in _equal(ranks, f"compiled {case}"):
        assert result["order"] == COMPILED[case]
        assert result["graphs"] > 0  # torch falls back to eager without a word


@pytest.mark.parametrize("case", DTYPES)
def test_what_is_stored_gathered_and_reduced_is_what_the_plan_says(ranks: Any, case: str) -> None:
    mode, options = DTYPES[case]
    storage = HALF.get(mode, "float32")
    norm = "float32" if options.get("pins") else storage
    reduced = {"bf16": "bfloat16", "fp16": "float16"}.get(options.get("reduce_dtype", ""), "float32")
    for result in of_ranks(ranks, f"dtypes {case}"):
        assert {name: norm if ".1." in name else storage for name in result["stored"]} == result["stored"]
        assert result["all"] == {storage, norm}
        assert result["reduce"] == {reduced}


@pytest.mark.parametrize(("mode", "how"), STOPS)
def test_the_error_names_the_guilty_rank_and_module_on_every_rank(ranks: Any, mode: str, how: str) -> None:
    one, other = of_ranks(ranks, f"stopped {mode} {how}")
    assert one == other
    assert (one["rank"], one["step"]) == (fsdp2.BAD_RANK, 2 if how == "loss" else 4)
    assert one["module"] == {"batch": "net.0"}.get(how, "net.3")


# ------------------------------------------------------------------ how users write it


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_written_as_for_ddp(ranks: Any, way: str) -> None:
    """Own parameters, ``self(x)``, weights read in the step, frozen parts, torch's attention, more than a loss."""
    _equal(ranks, f"way {way}")


@pytest.mark.parametrize("case", BY_HAND)
def test_manual_optimization_is_ddps(ranks: Any, case: str) -> None:
    """Forward again after a step, several backward passes, clipping by hand, gradients in true units."""
    for result in _equal(ranks, f"by hand {case}"):
        assert len(result["fsdp2"]["true"]) == (16 if case.startswith("in turns") else 8)


@pytest.mark.parametrize("how", RUNS)
def test_a_module_runs_more_than_once(ranks: Any, how: str) -> None:
    for result in _equal(ranks, f"again {how}"):
        assert len(result["fsdp2"]["validated"]) >= 16
        assert len(result["fsdp2"]["predicted"]) == 64


def test_a_run_leaves_nothing_but_pins_and_another_plan_removes_those(ranks: Any) -> None:
    for left in of_ranks(ranks, "restored"):
        assert left == {"checkpointed": [], "hooks": [], "pinned": ["net.1"], "still": [], "forward": False}


def test_weights_written_around_validation_are_those_that_count(ranks: Any) -> None:
    _equal(ranks, "averaged")


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("case", MODELS)
def test_transformers_models_are_cut_at_their_blocks_and_pins(ranks: Any, case: str) -> None:
    kind, _, options, _ = MODELS[case]
    for result in of_ranks(ranks, f"model {case}"):
        assert same(result["ddp"]["losses"], result["fsdp2"]["losses"], 1e-4)
        assert same(result["ddp"]["weights"], result["fsdp2"]["weights"], 1e-4, 1e-5)
        blocks = [name for name in result["units"] if name.endswith((".0", ".1"))]
        assert blocks == (SHARED_UNITS if kind == "gpt2" else ["model.model.layers.0", "model.model.layers.1"])
        assert len(result["units"]) == 2 + (5 if "pins" in options else 0)


@pytest.mark.parametrize(("where", "layer"), META)
def test_a_plain_module_made_on_the_meta_device_is_initialised_alike_on_all_ranks(
    ranks: Any, where: str, layer: str
) -> None:
    one, other = of_ranks(ranks, f"meta {where} {layer}")
    assert same_weights(one["start"], other["start"])
    assert same_weights(one["weights"], other["weights"])
    assert not same_weights(one["start"], one["weights"])
    start = one["start"]
    if layer == "tied":
        assert "net.0.second.weight" not in start
        assert start["net.0.scale"].unique().tolist() == [0.5]
        assert start["net.0.shift"].unique().tolist() == [0.25]
    elif layer == "nanogpt":
        assert start["net.0.layers.0.weight"].unique().tolist() == [0.125]
        assert start["net.0.layers.2.running_var"].unique().tolist() == [1.0]
    else:
        assert start["net.0.norm.weight"].dtype == F32
        assert start["net.0.norm.weight"].unique().tolist() == [1.0]
        assert 0 < start["net.0.up.weight"].abs().max() <= 0.25


@pytest.mark.parametrize("kind", ["llama", "tied llama"])
def test_a_llama_made_on_the_meta_device_is_initialised_as_usual(ranks: Any, kind: str) -> None:
    one, other = of_ranks(ranks, f"meta {kind}")
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


def test_what_nothing_can_initialise_is_refused_by_name(ranks: Any) -> None:
    for said in of_ranks(ranks, "cannot make bare"):
        for words in ("3 faults", "pin 'Lineal'", "module 'Late'", "module 'net.0'", "reset_parameters"):
            assert words in said
    for said in of_ranks(ranks, "cannot make forgotten"):
        assert "'net.0.left'" in said
        assert "'net.0.weight'" not in said


def test_ranks_start_from_the_first_ones_weights(ranks: Any) -> None:
    one, other = of_ranks(ranks, "starts")
    assert same_weights(one["weights"], one["first"])
    assert same_weights(other["weights"], one["first"])
    assert not same_weights(other["first"], one["first"])


@pytest.mark.parametrize("strategy", ["stock", "own"])
@pytest.mark.parametrize("case", USERS)
def test_a_users_own_sharding_means_the_same_or_is_refused(ranks: Any, case: str, strategy: str) -> None:
    said = USERS[case][3]
    if not said:
        _equal(ranks, f"users {case} {strategy}")
        return
    for result in of_ranks(ranks, f"users {case} {strategy}"):
        assert all(words in result for words in (*said, "mp_fsdp2"))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("which", REFUSALS)
def test_bad_input_is_refused_before_the_first_step(ranks: Any, which: str) -> None:
    for said in of_ranks(ranks, f"refused {which}"):
        assert all(words in said for words in REFUSALS[which]), said
