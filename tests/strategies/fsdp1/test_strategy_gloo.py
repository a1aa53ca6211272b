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

from lightning_mp import PlanError
from lightning_mp.strategies.fsdp1.strategy import PlanFSDP1Strategy
from support import fsdp1
from support.gloo import run_ranks
from support.models import same_weights
from support.oracles import CALM_SCALE, MODES, SCALED

pytestmark = pytest.mark.gloo

OPTIMIZERS = ("fused", "plain")
PINNED = {"pinned": {"pins": fsdp1.PINS}, "bare": {}}
SAVED = [
    *((saver, "full", optimizer) for saver in ("fsdp1", "ddp") for optimizer in ("groups", "fused", "bare")),
    *(("fsdp1", "sharded", optimizer) for optimizer in ("groups", "plain", "bare")),
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
AGAIN = ("same trainer", "new trainer", "validate")
OPTIONS: dict[str, dict[str, Any]] = {
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
}
LANGUAGE = {
    "llama 32-true": ("llama", "32-true", {"checkpointing": "LlamaDecoderLayer"}),
    "llama bf16-mixed": ("llama", "bf16-mixed", {"pins": {"*norm*": "fp32"}, "checkpointing": "LlamaDecoderLayer"}),
    "llama 16-true": ("llama", "16-true", {"pins": {"*norm*": "fp32"}, "checkpointing": "LlamaDecoderLayer"}),
    "gpt2 bf16-mixed": ("gpt2", "bf16-mixed", {"pins": {"ln_*": "fp32"}}),
}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
REFUSED = ("manual", "one shard", "ignored", "wrapped", "integer", "no plan", "wrap", "mesh")


def _scenarios(folder: Path) -> list[tuple[str, str, tuple[Any, ...]]]:
    trained = [(m, p, o) for m in MODES for p in PINNED for o in OPTIMIZERS]
    overflow = {"bad": (fsdp1.BAD_STEP,), "schedule": True}
    clip = {"gradient_clip_val": 0.5}
    return [
        *((f"clean {m} {p} {o}", "both", (m, {"optimizer": o}, PINNED[p], {})) for m, p, o in trained),
        *((f"overflow {m} {p} {o}", "both", (m, {"optimizer": o, **overflow}, PINNED[p], {})) for m, p, o in trained),
        *((f"clip {m} {p}", "both", (m, {}, {**PINNED[p], **clip}, {})) for m in MODES for p in PINNED),
        *((f"sharding {key}", "both", ("16-mixed", overflow, clip, how)) for key, how in SHARDINGS.items()),
        *((f"option {key}", "both", ("bf16-mixed", {}, options, {})) for key, options in OPTIONS.items()),
        *((f"uneven {m}", "both", (m, {"even": False, "bad": (0,)}, PINNED["pinned"], {})) for m in MODES),
        *((f"optimizer {o}", "both", ("bf16-mixed", {"optimizer": o}, {}, {})) for o in ("groups", "adagrad")),
        *((f"dtypes {m} {p}", "dtypes", (m, PINNED[p])) for m in MODES for p in PINNED),
        ("dtypes bf16", "dtypes", ("bf16-mixed", {"reduce_dtype": "bf16"})),
        *((f"saved {' '.join(how)}", "checkpoint", (str(folder), *how)) for how in SAVED),
        ("overwritten", "overwritten", (str(folder),)),
        *((f"again {how}", "again", (how,)) for how in AGAIN),
        *((f"language {key}", "language", arguments) for key, arguments in LANGUAGE.items()),
        *((f"refused {which}", "refused", (which,)) for which in REFUSED),
        ("another plan", "another_plan", ()),
        ("stopped", "stopped", ()),
        ("starts", "different_starts", ()),
        ("meta", "on_meta", ()),
        ("frozen", "frozen", ()),
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    return run_ranks(fsdp1.run, _scenarios(tmp_path_factory.mktemp("fsdp1")), timeout=240)


def _both(ranks: list[dict[str, Any]], key: str) -> list[Any]:
    results = [rank[key] for rank in ranks]
    for rank, result in enumerate(results):
        failed = isinstance(result, str) and result.startswith("Traceback")
        assert not failed, f"rank {rank}:\n{result}"
    return results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_ddp_bit_for_bit(ranks: Any, mode: str, pinned: str, optimizer: str) -> None:
    one, other = _both(ranks, f"clean {mode} {pinned} {optimizer}")
    assert one["fsdp1"]["losses"] == one["ddp"]["losses"]
    assert same_weights(one["fsdp1"]["weights"], one["ddp"]["weights"])
    assert same_weights(one["fsdp1"]["weights"], other["fsdp1"]["weights"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_overflowing_is_everybodys_skip(ranks: Any, mode: str, pinned: str, optimizer: str) -> None:
    one, other = _both(ranks, f"overflow {mode} {pinned} {optimizer}")
    for result in (one, other):
        ours, ddp = result["fsdp1"], result["ddp"]
        assert ours["skipped"] == [step == fsdp1.BAD_STEP for step in range(8)]
        assert ours["counts"] == (7, 1)
        assert ours["lrs"] == ddp["lrs"]
        assert ours["lrs"][fsdp1.BAD_STEP] == ours["lrs"][fsdp1.BAD_STEP + 1]
        halved = [CALM_SCALE] * fsdp1.BAD_STEP + [CALM_SCALE / 2] * (8 - fsdp1.BAD_STEP)
        assert ours["scales"] == (halved if mode in SCALED else [])
        assert same_weights(ours["weights"], ddp["weights"])
    assert same_weights(one["fsdp1"]["weights"], other["fsdp1"]["weights"])


@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_the_norm_that_is_clipped_by_is_ddps(ranks: Any, mode: str, pinned: str) -> None:
    for result in _both(ranks, f"clip {mode} {pinned}"):
        assert len(result["ddp"]["norms"]) == 8
        assert result["fsdp1"]["norms"] == pytest.approx(result["ddp"]["norms"], rel=1e-5)


def _close(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharding_and_wrapping_change_no_number(ranks: Any, sharding: str) -> None:
    """To the last bits, since the norm that is clipped by is summed in another order."""
    one, other = _both(ranks, f"sharding {sharding}")
    assert one["fsdp1"]["norms"] == pytest.approx(one["ddp"]["norms"], rel=1e-4, nan_ok=True)
    assert one["fsdp1"]["skipped"] == one["ddp"]["skipped"]
    _close(one["fsdp1"], one["ddp"])
    assert same_weights(one["fsdp1"]["weights"], other["fsdp1"]["weights"])


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_may_hold_no_part_of_a_parameter(ranks: Any, mode: str) -> None:
    for result in _both(ranks, f"uneven {mode}"):
        assert result["fsdp1"]["counts"] == (7, 1)
        _close(result["fsdp1"], result["ddp"])


def test_shards_in_groups_that_are_replicas_of_each_other() -> None:
    """The norm is a sum over one shard group; over all four processes it would count everything twice."""
    scenario = ("hybrid", "both", ("16-mixed", {"bad": (fsdp1.BAD_STEP,)}, {"gradient_clip_val": 0.5}, HYBRID))
    results = [result["hybrid"] for result in run_ranks(fsdp1.run, [scenario], world=4, timeout=120)]
    assert not any(isinstance(result, str) for result in results), results
    for result in results:
        assert result["fsdp1"]["norms"] == pytest.approx(result["ddp"]["norms"], rel=1e-5, nan_ok=True)
        assert result["fsdp1"]["counts"] == (7, 1)
        _close(result["fsdp1"], result["ddp"])
        assert same_weights(result["fsdp1"]["weights"], results[0]["fsdp1"]["weights"])


@pytest.mark.parametrize("key", ["option value", "option accumulate", "optimizer groups", "optimizer adagrad"])
def test_host_options_and_optimizers_mean_what_they_mean_under_ddp(ranks: Any, key: str) -> None:
    """An optimizer with groups by ``dim()`` sees the shapes of the module, not those of flat pieces."""
    for result in _both(ranks, key):
        _close(result["fsdp1"], result["ddp"])


def test_frozen_parameters_stay_and_the_others_train(ranks: Any) -> None:
    for result in _both(ranks, "frozen"):
        _close(result["fsdp1"], result["ddp"])


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_declared_is_what_is_seen(ranks: Any, mode: str, pinned: str) -> None:
    stored = {"bf16-true": "bfloat16", "16-true": "float16"}.get(mode, "float32")
    compute = {"bf16": "bfloat16", "16": "float16"}.get(mode.split("-")[0], "float32")
    norm = "float32" if pinned == "pinned" else stored
    for seen in _both(ranks, f"dtypes {mode} {pinned}"):
        assert seen["stored"] == {name: norm if name.startswith("net.1.") else stored for name in seen["stored"]}
        assert seen["gathered"] == {stored, norm}
        assert seen["reduced"] == {"float32"}
        if pinned == "pinned":
            assert seen["normed"] == {"float32"}
            assert seen["handed on"] == {compute if mode.endswith("true") else "float32"}


def test_gradients_are_reduced_in_reduce_dtype(ranks: Any) -> None:
    for seen in _both(ranks, "dtypes bf16"):
        assert seen["reduced"] == {"bfloat16"}
        assert seen["gathered"] == {"float32"}


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("how", SAVED, ids=" ".join)
def test_a_run_goes_on_from_its_checkpoint_under_either_strategy(ranks: Any, how: tuple[str, str, str]) -> None:
    for result in _both(ranks, f"saved {' '.join(how)}"):
        runs = result["runs"]
        assert result["folder"] == (how[1] == "sharded")
        assert set(runs) == ({"to the end", "fsdp1"} if how[1] == "sharded" else {"to the end", "fsdp1", "ddp"})
        for name in runs:
            assert runs[name]["counts"] == (7, 1)
            assert runs[name]["scales"][-4:] == runs["to the end"]["scales"][-4:]
            assert same_weights(runs[name]["weights"], runs["to the end"]["weights"]), name


def test_formats_are_saved_over_each_other_before_any_step(ranks: Any) -> None:
    for result in _both(ranks, "overwritten"):
        assert len(result) == 3
        for first, from_checkpoint in result.values():
            assert same_weights(first["weights"], from_checkpoint["weights"])


def test_the_checkpoint_notes_what_is_stored(ranks: Any) -> None:
    notes = _both(ranks, "saved fsdp1 full groups")[0]["notes"]
    assert notes["strategy"] == "PlanFSDP1Strategy"
    assert notes["dtypes"] == dict.fromkeys(("net.0.weight", "net.1.weight", "net.1.bias", "net.3.weight"), "fp32")


# ------------------------------------------------------------------ several runs


@pytest.mark.parametrize("how", AGAIN)
def test_a_module_runs_again(ranks: Any, how: str) -> None:
    for result in _both(ranks, f"again {how}"):
        assert result["fsdp1"]["losses"] == result["ddp"]["losses"]
        assert same_weights(result["fsdp1"]["weights"], result["ddp"]["weights"])


def test_another_plan_on_a_sharded_module_is_refused(ranks: Any) -> None:
    for message in _both(ranks, "another plan"):
        assert "in float32, where this plan stores bfloat16" in message
        assert "reduce_dtype='bf16'" in message
        assert "sharding_strategy=NO_SHARD" in message


def test_the_error_names_rank_and_module(ranks: Any) -> None:
    one, other = _both(ranks, "stopped")
    assert one == other
    assert (one["rank"], one["step"], one["module"]) == (fsdp1.BAD_RANK, 4, "net.0")
    assert "_fsdp" not in one["message"]


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("key", LANGUAGE)
def test_a_transformers_model_trains_as_under_ddp(ranks: Any, key: str) -> None:
    one, other = _both(ranks, f"language {key}")
    assert one["fsdp1"]["losses"] == one["ddp"]["losses"]
    assert same_weights(one["fsdp1"]["weights"], one["ddp"]["weights"])
    assert same_weights(one["fsdp1"]["weights"], other["fsdp1"]["weights"])
    layers = {"llama": "model.model.layers.", "gpt2": "model.transformer.h."}[key.split()[0]]
    assert {f"{layers}0", f"{layers}1"} <= one["units"]
    norms = {name for name in one["units"] if "norm" in name or "ln_" in name}
    assert len(norms) == (0 if key == "llama 32-true" else 5)


def test_every_rank_starts_from_rank_zeros_weights(ranks: Any) -> None:
    one, other = _both(ranks, "starts")
    assert same_weights(one["weights"], other["weights"])


def test_a_module_on_the_meta_device_is_initialised_alike(ranks: Any) -> None:
    one, other = _both(ranks, "meta")
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
def test_what_cannot_run_is_refused_before_the_first_step(ranks: Any, which: str, said: list[str]) -> None:
    for message in _both(ranks, f"refused {which}"):
        assert all(text in message for text in said), message


def test_a_policy_with_keywords_for_one_module_is_refused() -> None:
    from lightning_mp.errors import Faults
    from lightning_mp.strategies.fsdp1.wrapping import chosen_by

    faults, root = Faults(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    policy = CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else False)
    assert chosen_by(policy, root, faults) == [root[0]]
    assert "keywords for single modules" in str(faults.found[0])
