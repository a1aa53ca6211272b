"""DeepSpeed's ZeRO stages under a plan, in two real processes: what they train is what DDP trains."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from support import zero
from support.ddp import BAD_RANK
from support.gloo import run_ranks
from support.models import same_weights
from support.zero_models import RULES

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo

STAGES = tuple(zero.ZERO)
WHOLE = ("1", "2")  # they keep half-precision weights without an fp32 copy
BAD = (1, 2, 5)
#: a run under a stage and the same under DDP: name → (function, keywords, stages)
COMPARED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{f"overflow {m}": ("trained", {"mode": m, "bad": (2,)}, STAGES) for m in ("16-mixed", "bf16-mixed")},
    **{f"overflow {m}": ("trained", {"mode": m, "bad": (2,)}, WHOLE) for m in ("16-true", "bf16-true")},
    "plain 32-true": ("trained", {"mode": "32-true"}, STAGES),
    "pins 16-true": ("trained", {"mode": "16-true", "pins": {"LayerNorm": "fp32"}}, WHOLE),
    "pins bf16-mixed": ("trained", {"mode": "bf16-mixed", "pins": {"net.3": "bf16"}}, WHOLE),
    "accumulated": (
        "trained",
        {"mode": "16-mixed", "optimizer": "sgd", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        STAGES,
    ),
    **{f"rule {r}": ("trained", {"mode": "16-mixed", "rule": r, "bad": BAD}, ("2", "3")) for r in RULES},
    "growing": ("trained", {"mode": "16-mixed", "rule": "grows"}, STAGES),
    "clipped": ("trained", {"mode": "16-mixed", "optimizer": "sgd", "gradient_clip_val": 0.1}, ()),
    "window": ("window", {"mode": "16-mixed"}, STAGES),
    "window bf16-mixed": ("window", {"mode": "bf16-mixed"}, ("1", "3")),
    "manual": ("manual", {"mode": "bf16-mixed"}, ("1", "2", "3")),
    "manual clipped": ("manual", {"mode": "16-mixed", "clip": 0.1}, ("2", "3")),
    "every step": ("every_step", {"mode": "16-mixed"}, ("1", "2", "3")),
    "every step bf16-true": ("every_step", {"mode": "bf16-true"}, ("2",)),
    "norms": ("language", {"mode": "bf16-mixed", "pins": {"*norm*": "fp32"}, "lora": False}, ("1", "2", "3")),
    "whole 32-true": ("language", {"mode": "32-true", "pins": {}, "lora": False}, ("3",)),
    "checkpointed": (
        "language",
        {"mode": "16-mixed", "pins": {"*norm*": "fp32"}, "checkpointing": "LlamaDecoderLayer"},
        ("1", "2", "3"),
    ),
    "adapters": ("language", {"mode": "bf16-mixed", "pins": {"lora_*": "bf16"}}, WHOLE),
    "half base": ("language", {"mode": "bf16-mixed", "pins": {"lora_*": "fp32", "*proj": "bf16"}}, ("1", "2", "3")),
    "partitioned": ("made_partitioned", {"mode": "16-mixed"}, ("3", "3 offload")),
    "partitioned frozen": ("made_partitioned", {"mode": "bf16-mixed", "pin": "bf16"}, ("3",)),
}
CROSSED = ("2", "16-mixed", "lambda")
JSON_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-2, "torch_adam": True},
}
#: stage, mode, schedule
RESUMED = [
    ("2", "16-true", "lambda"),
    ("1", "bf16-true", "onecycle"),
    ("2", "16-true", "sequential"),
    *((stage, "16-mixed", "onecycle") for stage in ("1", "3", "2 offload", "3 offload")),
    CROSSED,
]
#: what the JSON alone says: name → (mode, keywords)
FROM_JSON: dict[str, tuple[str, dict[str, Any]]] = {
    "pins 16-true": ("16-true", {"pins": {"LayerNorm": "fp32"}, "config": {"optimizer": JSON_OPTIMIZER}}),
    "overflow 16-mixed": ("16-mixed", {"bad": (2,), "config": {"zero_optimization": {"compute_grad_norm": False}}}),
    "overflow bf16-true": ("bf16-true", {"bad": (2,), "config": {"zero_optimization": {"compute_grad_norm": False}}}),
    "clipped": ("16-mixed", {"optimizer": "sgd", "config": {"gradient_clipping": 0.1}}),
}
STOPPED = [
    ("2", "bf16-mixed", "gradient", "skip"),
    ("3", "16-mixed", "batch", "skip"),
    ("1", "16-mixed", "loss", "raise"),
]
AS_ON_CUDA = [("1", "16-mixed"), ("2", "16-mixed"), ("3", "16-mixed"), ("2", "16-true")]
Scenario = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def _scenarios(folder: Path) -> list[Scenario]:
    scenarios: list[Scenario] = [
        (f"{name}, {stage}", function, (stage,), keywords)
        for name, (function, keywords, stages) in COMPARED.items()
        for stage in (None, *stages)
    ]
    for mode, schedule in dict.fromkeys((mode, schedule) for _, mode, schedule in RESUMED):
        stages = [stage for stage, *rest in RESUMED if rest == [mode, schedule]]
        scenarios += [
            (f"resumed {mode} {schedule}, {stage}", "resumed", (stage, mode, schedule, str(folder)), {})
            for stage in (None, *stages)
        ]
    scenarios += [
        *((f"cuda {m}, {s}", "trained_as_on_cuda", (s, m), {"bad": (2,)}) for s, m in AS_ON_CUDA),
        *((f"json, {key}", "trained", ("2", mode), words) for key, (mode, words) in FROM_JSON.items()),
        *((f"longspec, {stage}", "longspec", (stage,), {}) for stage in ("1", "2", "3")),
        *((f"two backwards, {stage}", "manual", (stage, "16-mixed"), {"backwards": 2}) for stage in ("1", "3")),
        *((f"stopped {case}", "stopped", case, {}) for case in STOPPED),
        *((f"own {rule}", "own_scaler", (rule, [step in BAD for step in range(8)]), {}) for rule in RULES),
        *((f"ddp to {stage}", "crossed", (stage, _saved(folder, None)), {}) for stage in ("2", "3")),
        ("plain loop", "plain_loop", (), {}),
        ("2 to ddp", "crossed", (None, _saved(folder, "2")), {}),
    ]
    return scenarios


def _saved(folder: Path, stage: str | None) -> str:
    return str(folder / f"{stage} {CROSSED[1]} {CROSSED[2]}" / "4.ckpt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    folder = tmp_path_factory.mktemp("zero")
    return [pickle.loads(result) for result in run_ranks(zero.run, _scenarios(folder), timeout=240)]


def _both(ranks: list[dict[str, Any]], key: str) -> list[Any]:
    results = [rank[key] for rank in ranks]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return results


def _pair(ranks: list[dict[str, Any]], name: str, stage: str) -> tuple[Any, Any]:
    """The run under the stage and the one under DDP, after checking that ranks agree."""
    ours, theirs = _both(ranks, f"{name}, {stage}"), _both(ranks, f"{name}, None")
    for one, other in (ours, theirs):
        if "weights" in one:
            assert same_weights(one["weights"], other["weights"])
    return ours[0], theirs[0]


def _cases(*names: str) -> Any:
    chosen = [(name, stage) for name in COMPARED if name.split(" ")[0] in names for stage in COMPARED[name][2]]
    return pytest.mark.parametrize(("name", "stage"), chosen, ids=lambda value: value)


def _far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@_cases("overflow", "plain", "pins", "window", "partitioned", "checkpointed", "half", "norms", "adapters", "whole")
def test_the_weights_are_ddps_with_overflows_and_without(ranks: Any, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    # Stage 3's hooks change the order in which gradients of a residual stream are added: half precision rounds anew.
    assert _far(ours["weights"], theirs["weights"]) <= (1e-3 if (name, stage) == ("norms", "3") else 1e-6)
    if "skipped" in ours:
        assert ours["skipped"] == theirs["skipped"]
        assert ours["counts"] == theirs["counts"]
        assert any(ours["skipped"]) == (name.split(" ")[0] in ("overflow", "window"))


@_cases("overflow", "pins", "partitioned", "half", "norms", "adapters")
def test_every_parameter_is_stored_as_under_ddp(ranks: Any, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert {n: w.dtype for n, w in ours["weights"].items()} == {n: w.dtype for n, w in theirs["weights"].items()}
    if "dtypes" in ours:
        assert ours["dtypes"] == theirs["dtypes"]


@_cases("norms", "checkpointed")
def test_pinned_norms_run_in_fp32(ranks: Any, name: str, stage: str) -> None:
    ours, _ = _pair(ranks, name, stage)
    assert ours["norms"] == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("stage", WHOLE)
def test_adapters_pinned_to_bf16_train_on_a_frozen_fp32_base(ranks: Any, stage: str) -> None:
    ours, _ = _pair(ranks, "adapters", stage)
    kinds = {(dtype, name in ours["trainable"]) for name, dtype in ours["dtypes"].items()}
    assert kinds == {(torch.bfloat16, True), (torch.float32, False)}


@_cases("accumulated")
def test_accumulation_clipping_and_the_norm_are_ddps(ranks: Any, name: str, stage: str) -> None:
    """Windows of three of eight batches, so that the last is a part of one."""
    ours, theirs = _pair(ranks, name, stage)
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6
    assert ours["counts"] == theirs["counts"] == (3, 0)
    assert ours["norms"][2:] == pytest.approx(theirs["norms"][2:], rel=1e-5)


@_cases("overflow")
def test_a_skipped_step_has_no_finite_norm(ranks: Any, name: str, stage: str) -> None:
    ours, _ = _pair(ranks, name, stage)
    assert [math.isfinite(norm) for norm in ours["norms"]] == [step != 2 for step in range(8)]


@_cases("rule")
def test_the_scale_follows_the_plans_rule(ranks: Any, name: str, stage: str) -> None:
    """On the step the scale grows too, gradients are divided by the scale they were multiplied with."""
    ours, theirs = _pair(ranks, name, stage)
    assert ours["scales"] == theirs["scales"]
    assert ours["error"] == theirs["error"]
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6
    if name in ("rule deepspeed", "rule floor"):
        assert ours["scales"] == ranks[0][name.replace("rule", "own")]
    if name == "rule raise":  # 2, then 1 at step 1; step 2 overflows at the minimum, on every rank
        one, other = _both(ranks, f"{name}, {stage}")
        assert one["error"] == other["error"] == ("LossScaleError", BAD_RANK, 2, "net.3")
    if name == "rule grows":
        assert max(ours["scales"][5:]) > min(ours["scales"][:5])


@pytest.mark.parametrize("stage", STAGES)
def test_steps_on_which_the_scale_grows_are_those_of_a_plain_loop(ranks: Any, stage: str) -> None:
    ours, _ = _pair(ranks, "growing", stage)
    assert ours["scales"] == [8.0, 16.0, 16.0, 32.0, 32.0, 64.0, 64.0, 128.0]
    assert _far(ours["weights"], ranks[0]["plain loop"]) <= 1e-6


@_cases("manual")
def test_manual_optimization_is_ddps(ranks: Any, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6
    assert ours["under_autocast"] == theirs["under_autocast"] == {False}


@pytest.mark.parametrize("stage", ["1", "3"])
def test_two_backwards_before_a_step_are_refused(ranks: Any, stage: str) -> None:
    for result in _both(ranks, f"two backwards, {stage}"):
        assert "given two manual_backward() before a step" in result["error"]
        assert "add the losses up" in result["error"]


@_cases("every")
def test_every_kind_of_step_runs_in_the_plans_context_before_fit_and_after(ranks: Any, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["seen"] == theirs["seen"]
    half = name.endswith("true")
    context = (not half, torch.bfloat16 if half else torch.float16, torch.bfloat16 if half else torch.float32)
    assert ours["seen"] == dict.fromkeys(("training", "validation", "test", "predict"), context)


@_cases("every")
def test_fitting_again_leaves_no_hooks_of_the_run_before(ranks: Any, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6
    assert ours["hooks"] == 1


@pytest.mark.parametrize(("stage", "mode", "how", "action"), STOPPED)
def test_the_error_names_the_guilty_rank_on_every_rank(
    ranks: Any, stage: str, mode: str, how: str, action: str
) -> None:
    one, other = _both(ranks, f"stopped {(stage, mode, how, action)}")
    module = {"gradient": "net.3", "loss": "net.3", "batch": "net.0"}[how]
    assert one == other == {"rank": BAD_RANK, "step": 2 if action == "raise" else 5, "module": module}


@pytest.mark.parametrize(("stage", "mode", "schedule"), RESUMED)
def test_a_resumed_run_is_the_whole_one(ranks: Any, stage: str, mode: str, schedule: str) -> None:
    """Weights and optimizer state (by the weights after four more steps), scale, counts and schedule."""
    for result in _both(ranks, f"resumed {mode} {schedule}, {stage}"):
        whole, again = result["whole"], result["resumed"]
        assert same_weights(whole["weights"], again["weights"])
        assert whole["counts"] == again["counts"] == (7, 1)
        for key in ("scales", "rates", "skipped"):
            assert whole[key][4:] == again[key]


@pytest.mark.parametrize(("stage", "mode", "schedule"), RESUMED)
def test_the_schedule_is_held_on_skips_and_each_group_keeps_its_rate(
    ranks: Any, stage: str, mode: str, schedule: str
) -> None:
    ours, theirs = (_both(ranks, f"resumed {mode} {schedule}, {where}")[0]["whole"] for where in (stage, None))
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6
    assert theirs["rates"][1] == theirs["rates"][0]  # step 1 was skipped
    order = [0, 0, 1] if mode.endswith("-true") else [0, 1]  # the pin splits the first group
    assert ours["rates"] == [[rates[group] for group in order] for rates in theirs["rates"]]


@pytest.mark.parametrize("way", ["ddp to 2", "ddp to 3", "2 to ddp"])
def test_a_checkpoint_crosses_between_ddp_and_zero(ranks: Any, way: str) -> None:
    stage = "2" if way.startswith("2") else None
    before = _both(ranks, f"resumed {CROSSED[1]} {CROSSED[2]}, {stage}")[0]["whole"]
    one, other = _both(ranks, way)
    assert same_weights(one["start"], other["start"])
    assert one["counts"] == (3, 1)
    assert one["rates"] == before["rates"][4:]
    assert one["scales"] == before["scales"][4:]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_real_fp16_block_reaches_the_engine_and_its_scaler(ranks: Any, stage: str) -> None:
    for result in _both(ranks, f"longspec, {stage}"):
        assert result["block"] == zero.WHOLE_FP16
        assert result["scaler"] == {
            "cur_scale": 2.0**16,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
            "dynamic": True,
        }


@pytest.mark.parametrize(("stage", "mode"), AS_ON_CUDA)
def test_with_fp16_enabled_in_the_json_nothing_changes(ranks: Any, stage: str, mode: str) -> None:
    """As on CUDA, where DeepSpeed takes fp16: its casts are kept out all the same."""
    ours, theirs = _both(ranks, f"cuda {mode}, {stage}")[0], _both(ranks, f"overflow {mode}, None")[0]
    assert ours["dtypes"] == theirs["dtypes"]
    assert ours["skipped"] == theirs["skipped"]
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6


@pytest.mark.parametrize("name", FROM_JSON)
def test_what_the_json_alone_says_holds(ranks: Any, name: str) -> None:
    """An optimizer whose group a pin splits, no gradient norm to find an overflow by, clipping."""
    ours, theirs = _both(ranks, f"json, {name}")[0], _both(ranks, f"{name}, None")[0]
    assert ours["skipped"] == theirs["skipped"]
    assert ours["dtypes"] == theirs["dtypes"]
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6


def test_nothing_is_left_behind_in_the_process(ranks: Any) -> None:
    for rank in ranks:
        assert rank["process after"] == rank["process before"]
        assert rank["process before"]["linear"] == "torch._C._nn"
