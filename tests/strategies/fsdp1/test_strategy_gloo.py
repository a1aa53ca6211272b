"""FSDP1 under a plan, in real processes: the weights are DDP's, the dtypes the plan's, the checkpoints anybody's."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from lightning_mp import NonFinite, PlanError
from lightning_mp.strategies.fsdp1.strategy import PlanFSDP1Strategy
from support.comparing import of_training, same_runs
from support.fsdp1 import DifferentStarts, Dtypes, Even, Frozen, OnMeta, Overwritten, Refused, Saved, Transformers
from support.fsdp2_ways import Again
from support.models import same_weights
from support.oracles import CALM_SCALE, MODES, SCALED
from support.ranks import Ranks, run_ranks
from support.sharded import BAD_RANK, PINS, RATE, Both, Ranked, Stopped, fsdp1

pytestmark = pytest.mark.gloo

OPTIMIZERS = ("fused", "momentum")
PINNED = {"pinned": {"pins": PINS}, "bare": {}}
BAD_STEP = 2
SAVED = [
    *((saver, "full", optimizer) for saver in ("fsdp1", "ddp") for optimizer in ("groups", "fused", "sgd")),
    *(("fsdp1", "sharded", optimizer) for optimizer in ("groups", "momentum", "sgd")),
]
SHARDINGS: dict[str, dict[str, Any]] = {
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "hybrid 1 2": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)},
    "classes": {"wrap": None, "auto_wrap_policy": {nn.Linear}},
    "size": {"wrap": None, "auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=100)},
    "root only": {"wrap": None},
    "cpu offload": {"cpu_offload": True},
}
CLIP = {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
OVERFLOWS = partial(Even, bad=(BAD_STEP,), schedule=True)


def _both(mode: str, module: Any = Even, options: Any = (), **strategy: Any) -> Both:
    return Both(mode, module, dict(options), strategy, "fsdp1")


#: what means the same as under DDP
OPTIONS: dict[str, Both] = {
    "value": _both("bf16-mixed", options=BY_VALUE),
    "accumulate": _both("bf16-mixed", options={"accumulate_grad_batches": 2}),
    "groups": _both("bf16-mixed", partial(Even, optimizer="groups")),
    "adagrad": _both("bf16-mixed", partial(Even, optimizer="adagrad")),
    "frozen": _both("bf16-mixed", Frozen, {"pins": PINS, **CLIP}),
}
BLOCKS, NORMS = {"checkpointing": "LlamaDecoderLayer"}, {"pins": {"*norm*": "fp32"}}
MODELS = {
    "llama 32-true": Transformers("llama", "32-true", BLOCKS),
    "llama bf16-mixed": Transformers("llama", "bf16-mixed", BLOCKS | NORMS),
    "llama 16-true": Transformers("llama", "16-true", BLOCKS | NORMS),
    "gpt2 bf16-mixed": Transformers("gpt2", "bf16-mixed", {"pins": {"ln_*": "fp32"}}),
}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp1")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_ddp_bit_for_bit(ranks: Ranks, mode: str, pinned: str, optimizer: str) -> None:
    one, other = ranks.run(_both(mode, partial(Even, optimizer=optimizer), PINNED[pinned]))
    assert one["sharded"]["losses"] == one["ddp"]["losses"]
    assert same_weights(one["sharded"]["weights"], one["ddp"]["weights"])
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_overflowing_is_everybodys_skip(ranks: Ranks, mode: str, pinned: str, optimizer: str) -> None:
    one, other = ranks.run(_both(mode, partial(OVERFLOWS, optimizer=optimizer), PINNED[pinned]))
    for result in (one, other):
        ours, ddp = result["sharded"], result["ddp"]
        assert ours["skipped"] == [step == BAD_STEP for step in range(8)]
        assert ours["counts"] == (7, 1)
        assert ours["lrs"] == ddp["lrs"]
        assert ours["lrs"][BAD_STEP] == ours["lrs"][BAD_STEP + 1]
        halved = [CALM_SCALE] * BAD_STEP + [CALM_SCALE / 2] * (8 - BAD_STEP)
        assert ours["scales"] == (halved if mode in SCALED else [])
        assert same_weights(ours["weights"], ddp["weights"])
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_the_norm_that_is_clipped_by_is_ddps(ranks: Ranks, mode: str, pinned: str) -> None:
    for result in ranks.run(_both(mode, options=PINNED[pinned] | CLIP)):
        assert len(result["ddp"]["norms"]) == 8
        assert all(map(math.isfinite, result["ddp"]["norms"]))
        assert same_runs(result["sharded"], result["ddp"], of_training(mode, RATE))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharding_and_wrapping_change_no_number(ranks: Ranks, sharding: str) -> None:
    """But for the norm that is clipped by, which is summed in another order."""
    one, other = ranks.run(_both("16-mixed", OVERFLOWS, CLIP, **SHARDINGS[sharding]))
    assert same_runs(one["sharded"], one["ddp"], of_training("16-mixed", RATE))
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_may_hold_no_part_of_a_parameter(ranks: Ranks, mode: str) -> None:
    for result in ranks.run(_both(mode, partial(Ranked, bad=(0,)), PINNED["pinned"])):
        assert result["sharded"]["counts"] == (7, 1)
        assert same_runs(result["sharded"], result["ddp"], of_training(mode, RATE))


def test_shards_in_groups_that_are_replicas_of_each_other() -> None:
    """The norm is a sum over one shard group; over all four processes it would count everything twice."""
    results = run_ranks(_both("16-mixed", partial(Even, bad=(BAD_STEP,)), CLIP, **HYBRID), world=4)
    for result in results:
        assert result["sharded"]["counts"] == (7, 1)
        assert same_runs(result["sharded"], result["ddp"], of_training("16-mixed", RATE))
        assert same_weights(result["sharded"]["weights"], results[0]["sharded"]["weights"])


@pytest.mark.parametrize("key", OPTIONS)
def test_host_options_and_optimizers_mean_what_they_mean_under_ddp(ranks: Ranks, key: str) -> None:
    """Groups by ``dim()`` see the shapes of the module, not those of flat pieces; what is frozen stays."""
    for result in ranks.run(OPTIONS[key]):
        assert same_runs(result["sharded"], result["ddp"], of_training(OPTIONS[key].mode, RATE))


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_declared_is_what_is_seen(ranks: Ranks, mode: str, pinned: str) -> None:
    stored = {"bf16-true": "bfloat16", "16-true": "float16"}.get(mode, "float32")
    compute = {"bf16": "bfloat16", "16": "float16"}.get(mode.split("-")[0], "float32")
    norm = "float32" if pinned == "pinned" else stored
    for seen in ranks.run(Dtypes(mode, PINNED[pinned])):
        assert seen["stored"] == {name: norm if name.startswith("net.1.") else stored for name in seen["stored"]}
        assert seen["gathered"] == {stored, norm}
        assert seen["reduced"] == {"float32"}
        if pinned == "pinned":
            assert seen["normed"] == {"float32"}
            assert seen["handed on"] == {compute if mode.endswith("true") else "float32"}


def test_gradients_are_reduced_in_reduce_dtype(ranks: Ranks) -> None:
    for seen in ranks.run(Dtypes("bf16-mixed", {"reduce_dtype": "bf16"})):
        assert seen["reduced"] == {"bfloat16"}
        assert seen["gathered"] == {"float32"}


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("how", SAVED, ids=" ".join)
def test_a_run_goes_on_from_its_checkpoint_under_either_strategy(
    ranks: Ranks, folder: Path, how: tuple[str, str, str]
) -> None:
    for result in ranks.run(Saved(folder, *how)):
        runs = result["runs"]
        assert result["folder"] == (how[1] == "sharded")
        assert set(runs) == ({"to the end", "fsdp1"} if how[1] == "sharded" else {"to the end", "fsdp1", "ddp"})
        for name in runs:
            assert runs[name]["counts"] == (7, 1)
            assert runs[name]["scales"][-4:] == runs["to the end"]["scales"][-4:]
            assert same_weights(runs[name]["weights"], runs["to the end"]["weights"]), name


def test_formats_are_saved_over_each_other_before_any_step(ranks: Ranks, folder: Path) -> None:
    for result in ranks.run(Overwritten(folder)):
        assert len(result) == 3
        for first, from_checkpoint in result:
            assert same_weights(first["weights"], from_checkpoint["weights"])


def test_the_checkpoint_notes_what_is_stored(ranks: Ranks, folder: Path) -> None:
    notes = ranks.run(Saved(folder, "fsdp1", "full", "groups"))[0]["notes"]
    assert notes["strategy"] == "PlanFSDP1Strategy"
    assert notes["dtypes"] == dict.fromkeys(("net.0.weight", "net.1.weight", "net.1.bias", "net.3.weight"), "fp32")


# ------------------------------------------------------------------ several runs


@pytest.mark.parametrize("how", ["same trainer", "new trainer", "validate"])
def test_a_module_runs_again(ranks: Ranks, how: str) -> None:
    for result in ranks.run(Again(how, "fsdp1", even=True)):
        assert result["sharded"]["losses"] == result["ddp"]["losses"]
        assert same_weights(result["sharded"]["weights"], result["ddp"]["weights"])


def test_another_plan_on_a_sharded_module_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(Refused("another plan")):
        assert "in float32, where this plan stores bfloat16" in message
        assert "reduce_dtype='bf16'" in message
        assert "sharding_strategy=NO_SHARD" in message


def test_the_error_names_rank_and_module(ranks: Ranks) -> None:
    one, other = ranks.run(Stopped("bf16-mixed", "batch", NonFinite(max_consecutive=2), fsdp1, {"pins": PINS}))
    assert one == other
    assert (one["rank"], one["step"], one["module"]) == (BAD_RANK, 4, "net.0")
    assert "_fsdp" not in one["message"]


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("key", MODELS)
def test_a_transformers_model_trains_as_under_ddp(ranks: Ranks, key: str) -> None:
    one, other = ranks.run(MODELS[key])
    assert one["sharded"]["losses"] == one["ddp"]["losses"]
    assert same_weights(one["sharded"]["weights"], one["ddp"]["weights"])
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])
    layers = {"llama": "model.model.layers.", "gpt2": "model.transformer.h."}[key.split()[0]]
    assert {f"{layers}0", f"{layers}1"} <= one["units"]
    norms = {name for name in one["units"] if "norm" in name or "ln_" in name}
    assert len(norms) == (0 if key == "llama 32-true" else 5)


def test_every_rank_starts_from_rank_zeros_weights(ranks: Ranks) -> None:
    one, other = ranks.run(DifferentStarts())
    assert same_weights(one["weights"], other["weights"])


def test_a_module_on_the_meta_device_is_initialised_alike(ranks: Ranks) -> None:
    one, other = ranks.run(OnMeta())
    assert same_weights(one["weights"], other["weights"])
    assert {str(weight.dtype) for weight in one["weights"].values()} == {"torch.bfloat16", "torch.float32"}
    assert all(map(math.isfinite, one["losses"]))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}, ["reduce_dtype='float16'"]),
        ({"activation_checkpointing_policy": {nn.Linear}}, ["checkpointing='"]),
        ({"wrap": "Linear", "auto_wrap_policy": {nn.Linear}}, ["wrap='Linear'", "auto_wrap_policy={"]),
        ({"use_orig_params": False}, ["use_orig_params=True"]),
        ({"state_dict_type": "half"}, ["state_dict_type='half'", "'full' or 'sharded'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_contradicts_a_plan_is_refused_at_construction(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        PlanFSDP1Strategy(**options)
    assert all(text in str(error.value) for text in said)


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(PlanError, match="3 faults"):
        PlanFSDP1Strategy(mixed_precision=MixedPrecision(), activation_checkpointing=nn.Linear, use_orig_params=False)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("wrapped", ["wrapped in FullyShardedDataParallel already", "configure_model"]),
        ("integer", ["'count' in int8", "mp_fsdp2"]),
        ("no plan", ["PlanFSDP1Strategy with FSDPPrecision", "MixedPrecisionPlan"]),
        ("wrap", ["'Lineal'", "'Linear'"]),
        ("mesh", ["device_mesh=(2, 2) with 2 processes"]),
        ("manual", ["automatic_optimization=False"]),
        ("ignored", ["'net.0.weight', which is trained"]),
        ("one shard", ["device_mesh=(2, 1)", "NO_SHARD"]),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_step(ranks: Ranks, which: str, said: list[str]) -> None:
    for message in ranks.run(Refused(which)):
        assert all(text in message for text in said), message


def test_a_policy_with_keywords_for_one_module_is_refused() -> None:
    from lightning_mp.errors import Faults
    from lightning_mp.strategies.fsdp1.wrapping import chosen_by

    faults, root = Faults(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    policy = CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else False)
    assert chosen_by(policy, root, faults) == [root[0]]
    assert "keywords for single modules" in str(faults.found[0])
