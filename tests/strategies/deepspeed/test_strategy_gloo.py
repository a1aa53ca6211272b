"""DeepSpeed's ZeRO stages under a plan, in two real processes: what they train is what DDP trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.comparing import of_sums, of_training, same
from support.deepspeed_json import WHOLE_FP16
from support.models import same_weights
from support.ranks import Case, Ranks
from support.sharded import BAD_RANK, RATE
from support.zero import (
    ZERO,
    Crossed,
    EveryStep,
    HalfGathers,
    Llama,
    LongSpec,
    MadePartitioned,
    Manual,
    OwnScaler,
    PlainLoop,
    ProcessState,
    ReadsAWeight,
    Resumed,
    Stopped,
    Trained,
    Windows,
)
from support.zero_models import RULES

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo

STAGES = tuple(ZERO)
WHOLE = ("1", "2")  # they keep half-precision weights without an fp32 copy
BAD = (1, 2, 5)
BLOCKS, NORMS = {"checkpointing": "LlamaDecoderLayer"}, {"pins": {"*norm*": "fp32"}}


def _trained(mode: str, **options: Any) -> Callable[[str | None], Case]:
    return lambda stage: Trained(stage, mode, options)


def _of(kind: Callable[..., Case], *given: Any, **options: Any) -> Callable[[str | None], Case]:
    return lambda stage: kind(stage, *given, **options)


#: a run under a stage and the same under DDP (``None``): name → the case of a stage, stages
COMPARED: dict[str, tuple[Callable[[str | None], Case], tuple[str, ...]]] = {
    **{f"overflow {m}": (_trained(m, bad=(2,)), STAGES) for m in ("16-mixed", "bf16-mixed")},
    **{f"overflow {m}": (_trained(m, bad=(2,)), WHOLE) for m in ("16-true", "bf16-true")},
    "plain 32-true": (_trained("32-true"), STAGES),
    "pins 16-true": (_trained("16-true", pins={"LayerNorm": "fp32"}), WHOLE),
    "pins bf16-mixed": (_trained("bf16-mixed", pins={"net.3": "bf16"}), WHOLE),
    "accumulated": (
        _trained("16-mixed", optimizer="sgd", accumulate_grad_batches=3, gradient_clip_val=0.1),
        STAGES,
    ),
    **{f"rule {r}": (_trained("16-mixed", rule=r, bad=BAD), ("2", "3")) for r in RULES},
    "growing": (_trained("16-mixed", rule="grows"), STAGES),
    "clipped": (_trained("16-mixed", optimizer="sgd", gradient_clip_val=0.1), ()),
    "window": (_of(Windows, "16-mixed"), STAGES),
    "window bf16-mixed": (_of(Windows, "bf16-mixed"), ("1", "3")),
    "unfinished": (_of(Windows, "bf16-mixed", epochs=2), ("1", "2", "3")),
    "manual": (_of(Manual, "bf16-mixed"), ("1", "2", "3")),
    "manual clipped": (_of(Manual, "16-mixed", clip=0.1), ("2", "3")),
    "every step": (_of(EveryStep, "16-mixed"), ("1", "2", "3")),
    "every step bf16-true": (_of(EveryStep, "bf16-true"), ("2",)),
    "norms": (_of(Llama, "bf16-mixed", **NORMS, lora=False), ("1", "2", "3")),
    "whole 32-true": (_of(Llama, "32-true", {}, lora=False), ("3",)),
    "checkpointed": (_of(Llama, "16-mixed", **NORMS, **BLOCKS), ("1", "2", "3")),
    "adapters": (_of(Llama, "bf16-mixed", {"lora_*": "bf16"}), WHOLE),
    "half base": (_of(Llama, "bf16-mixed", {"lora_*": "fp32", "*proj": "bf16"}), ("1", "2", "3")),
    "partitioned": (_of(MadePartitioned, "16-mixed"), ("3", "3 offload")),
    "partitioned 32-true": (_of(MadePartitioned, "32-true"), ("3",)),
    "partitioned with fp16": (_of(MadePartitioned, "16-mixed", fp16=True), ("3",)),
    "partitioned frozen": (_of(MadePartitioned, "bf16-mixed", "bf16"), ("3",)),
}
CROSSED = ("16-mixed", "lambda")
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
    ("2", *CROSSED),
]
WITHOUT_NORM = {"zero_optimization": {"compute_grad_norm": False}}
#: what the JSON alone says
FROM_JSON: dict[str, Trained] = {
    "pins 16-true": Trained("2", "16-true", {"pins": {"LayerNorm": "fp32"}, "config": {"optimizer": JSON_OPTIMIZER}}),
    "overflow 16-mixed": Trained("2", "16-mixed", {"bad": (2,), "config": WITHOUT_NORM}),
    "overflow bf16-true": Trained("2", "bf16-true", {"bad": (2,), "config": WITHOUT_NORM}),
    "clipped": Trained("2", "16-mixed", {"optimizer": "sgd", "config": {"gradient_clipping": 0.1}}),
}
STOPPED = [
    ("2", "bf16-mixed", "gradient", "skip"),
    ("3", "16-mixed", "batch", "skip"),
    ("1", "16-mixed", "loss", "raise"),
]
AS_ON_CUDA = [("1", "16-mixed"), ("2", "16-mixed"), ("3", "16-mixed"), ("2", "16-true")]
#: A step on a piece of a tensor rounds its last fp32 bits another way than a step on the whole of it.
LAST_BITS = of_training("32-true", RATE)


@pytest.fixture(scope="module", autouse=True)
def process_before(ranks: Ranks) -> list[dict[str, Any]]:
    """What the processes were before anything ran in them."""
    return ranks.run(ProcessState("before"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


def _pair(ranks: Ranks, name: str, stage: str) -> tuple[Any, Any]:
    """The run under the stage and the one under DDP, after checking that ranks agree."""
    case, _ = COMPARED[name]
    ours, theirs = ranks.run(case(stage)), ranks.run(case(None))
    for one, other in (ours, theirs):
        if "weights" in one:
            assert same_weights(one["weights"], other["weights"])
    return ours[0], theirs[0]


def _cases(*names: str) -> Any:
    chosen = [(name, stage) for name in COMPARED if name.split(" ")[0] in names for stage in COMPARED[name][1]]
    return pytest.mark.parametrize(("name", "stage"), chosen, ids=lambda value: value)


@_cases("overflow", "plain", "pins", "window", "partitioned", "checkpointed", "half", "norms", "adapters", "whole")
def test_the_weights_are_ddps_with_overflows_and_without(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    # Stage 3's hooks change the order in which gradients of a residual stream are added: half precision rounds anew.
    reordered = (name, stage) == ("norms", "3")
    assert same(ours["weights"], theirs["weights"], of_training("bf16-mixed", RATE) if reordered else LAST_BITS)
    if "skipped" in ours:
        assert ours["skipped"] == theirs["skipped"]
        assert ours["counts"] == theirs["counts"]
        assert any(ours["skipped"]) == (name.split(" ")[0] in ("overflow", "window"))


@pytest.mark.older_cpu
@_cases("overflow", "pins", "partitioned", "half", "norms", "adapters")
def test_every_parameter_is_stored_as_under_ddp(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert {n: w.dtype for n, w in ours["weights"].items()} == {n: w.dtype for n, w in theirs["weights"].items()}
    if "dtypes" in ours:
        assert ours["dtypes"] == theirs["dtypes"]


@_cases("norms", "checkpointed")
def test_pinned_norms_run_in_fp32(ranks: Ranks, name: str, stage: str) -> None:
    ours, _ = _pair(ranks, name, stage)
    assert ours["norms"] == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("stage", WHOLE)
def test_adapters_pinned_to_bf16_train_on_a_frozen_fp32_base(ranks: Ranks, stage: str) -> None:
    ours, _ = _pair(ranks, "adapters", stage)
    kinds = {(dtype, name in ours["trainable"]) for name, dtype in ours["dtypes"].items()}
    assert kinds == {(torch.bfloat16, True), (torch.float32, False)}


@_cases("accumulated")
def test_accumulation_clipping_and_the_norm_are_ddps(ranks: Ranks, name: str, stage: str) -> None:
    """Windows of three of eight batches, so that the last is a part of one."""
    ours, theirs = _pair(ranks, name, stage)
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    assert ours["counts"] == theirs["counts"] == (3, 0)
    assert ours["norms"][2:] == pytest.approx(theirs["norms"][2:], rel=of_sums(32))


@_cases("unfinished")
def test_nothing_is_stepped_of_a_window_that_an_epoch_left_out(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    assert ours["counts"] == theirs["counts"]


@_cases("overflow")
def test_a_skipped_step_has_no_finite_norm(ranks: Ranks, name: str, stage: str) -> None:
    ours, _ = _pair(ranks, name, stage)
    assert [math.isfinite(norm) for norm in ours["norms"]] == [step != 2 for step in range(8)]


@_cases("rule")
def test_the_scale_follows_the_plans_rule(ranks: Ranks, name: str, stage: str) -> None:
    """On the step the scale grows too, gradients are divided by the scale they were multiplied with."""
    ours, theirs = _pair(ranks, name, stage)
    assert ours["scales"] == theirs["scales"]
    assert ours["error"] == theirs["error"]
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    if name in ("rule deepspeed", "rule floor"):
        assert ours["scales"] == ranks.run(OwnScaler(name.partition(" ")[2], BAD))[0]
    if name == "rule raise":  # 2, then 1 at step 1; step 2 overflows at the minimum, on every rank
        one, other = ranks.run(COMPARED[name][0](stage))
        assert one["error"] == other["error"] == ("LossScaleError", BAD_RANK, 2, "net.3")
    if name == "rule grows":
        assert max(ours["scales"][5:]) > min(ours["scales"][:5])


@pytest.mark.parametrize("stage", STAGES)
def test_steps_on_which_the_scale_grows_are_those_of_a_plain_loop(ranks: Ranks, stage: str) -> None:
    ours, _ = _pair(ranks, "growing", stage)
    assert ours["scales"] == [8.0, 16.0, 16.0, 32.0, 32.0, 64.0, 64.0, 128.0]
    assert same(ours["weights"], ranks.run(PlainLoop())[0], LAST_BITS)


@_cases("manual")
def test_manual_optimization_is_ddps(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    assert ours["under_autocast"] == theirs["under_autocast"] == {False}


@pytest.mark.parametrize("stage", ["1", "3"])
def test_two_backwards_before_a_step_are_refused(ranks: Ranks, stage: str) -> None:
    for result in ranks.run(Manual(stage, "16-mixed", backwards=2)):
        assert "two manual_backward() before a step" in result["error"]
        assert "add the losses up" in result["error"].lower()


@_cases("every")
def test_every_kind_of_step_runs_in_the_plans_context_before_fit_and_after(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert same(ours["losses"], theirs["losses"], LAST_BITS)
    assert ours["seen"] == theirs["seen"]
    half = name.endswith("true")
    context = (not half, torch.bfloat16 if half else torch.float16, torch.bfloat16 if half else torch.float32)
    assert ours["seen"] == dict.fromkeys(("training", "validation", "test", "predict"), context)


@_cases("every")
def test_fitting_again_leaves_no_hooks_of_the_run_before(ranks: Ranks, name: str, stage: str) -> None:
    ours, theirs = _pair(ranks, name, stage)
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    assert ours["hooks"] == 1


@pytest.mark.parametrize(("stage", "mode", "how", "action"), STOPPED)
def test_the_error_names_the_guilty_rank_on_every_rank(
    ranks: Ranks, stage: str, mode: str, how: str, action: str
) -> None:
    one, other = ranks.run(Stopped(stage, mode, how, action))
    module = {"gradient": "net.3", "loss": "net.3", "batch": "net.0"}[how]
    assert one == other == {"rank": BAD_RANK, "step": 2 if action == "raise" else 5, "module": module}


@pytest.mark.parametrize(("stage", "mode", "schedule"), RESUMED)
def test_a_resumed_run_is_the_whole_one(ranks: Ranks, folder: Path, stage: str, mode: str, schedule: str) -> None:
    """Weights and optimizer state (by the weights after four more steps), scale, counts and schedule."""
    for result in ranks.run(Resumed(stage, mode, schedule, folder)):
        whole, again = result["whole"], result["resumed"]
        assert same_weights(whole["weights"], again["weights"])
        assert whole["counts"] == again["counts"] == (7, 1)
        for key in ("scales", "rates", "skipped"):
            assert whole[key][4:] == again[key]


@pytest.mark.parametrize(("stage", "mode", "schedule"), RESUMED)
def test_the_schedule_is_held_on_skips_and_each_group_keeps_its_rate(
    ranks: Ranks, folder: Path, stage: str, mode: str, schedule: str
) -> None:
    ours, theirs = (ranks.run(Resumed(where, mode, schedule, folder))[0]["whole"] for where in (stage, None))
    assert same(ours["weights"], theirs["weights"], LAST_BITS)
    assert theirs["rates"][1] == theirs["rates"][0]  # step 1 was skipped
    order = [0, 0, 1] if mode.endswith("-true") else [0, 1]  # the pin splits the first group
    if mode.endswith("-mixed") and stage in WHOLE:
        order += [0, 1]  # half copies of both come last
    assert ours["rates"] == [[rates[group] for group in order] for rates in theirs["rates"]]


@pytest.mark.parametrize(("writer", "reader"), [(None, "2"), (None, "3"), ("2", None)])
def test_a_checkpoint_crosses_between_ddp_and_zero(
    ranks: Ranks, folder: Path, writer: str | None, reader: str | None
) -> None:
    saved = Resumed(writer, *CROSSED, folder)
    before = ranks.run(saved)[0]["whole"]
    one, other = ranks.run(Crossed(reader, saved.saved))
    assert same_weights(one["start"], other["start"])
    assert one["counts"] == (3, 1)
    groups = 2  # ZeRO-2 has half copies in further ones, of the same rates
    assert [rates[:groups] for rates in one["rates"]] == [rates[:groups] for rates in before["rates"][4:]]
    assert one["scales"] == before["scales"][4:]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_real_fp16_block_reaches_the_engine_and_its_scaler(ranks: Ranks, stage: str) -> None:
    for result in ranks.run(LongSpec(stage)):
        assert result["block"] == WHOLE_FP16
        assert result["scaler"] == {
            "cur_scale": 2.0**16,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
            "dynamic": True,
        }


@pytest.mark.parametrize(("stage", "mode"), AS_ON_CUDA)
def test_with_fp16_enabled_in_the_json_nothing_changes(ranks: Ranks, stage: str, mode: str) -> None:
    """As on CUDA, where DeepSpeed takes fp16: its casts are kept out all the same."""
    ours, theirs = (
        ranks.run(case)[0]
        for case in (Trained(stage, mode, {"bad": (2,)}, as_on_cuda=True), COMPARED[f"overflow {mode}"][0](None))
    )
    assert ours["dtypes"] == theirs["dtypes"]
    assert ours["skipped"] == theirs["skipped"]
    assert same(ours["weights"], theirs["weights"], LAST_BITS)


@pytest.mark.parametrize("name", FROM_JSON)
def test_what_the_json_alone_says_holds(ranks: Ranks, name: str) -> None:
    """An optimizer whose group a pin splits, no gradient norm to find an overflow by, clipping."""
    ours, theirs = ranks.run(FROM_JSON[name])[0], ranks.run(COMPARED[name][0](None))[0]
    assert ours["skipped"] == theirs["skipped"]
    assert ours["dtypes"] == theirs["dtypes"]
    assert same(ours["weights"], theirs["weights"], LAST_BITS)


def test_nothing_is_left_behind_in_the_process(ranks: Ranks, process_before: list[dict[str, Any]]) -> None:
    assert ranks.run(ProcessState("after")) == process_before
    assert {before["linear"] for before in process_before} == {"torch._C._nn"}


# ------------------------------------------------------------------ what is gathered in half precision

#: of a step of ZeRO-3 that keeps no parameter whole: 2 bytes an element of the weights that qualify, 4 another
GATHERED = {"llama": 319_360, "gpt2": 386_048}


@pytest.mark.parametrize("kind", GATHERED)
def test_stage_3_gathers_in_half_precision_and_trains_what_it_did(ranks: Ranks, kind: str) -> None:
    for result in ranks.run(HalfGathers("bf16-mixed", kind)):
        assert sum(result["steps"][2]["gathered"]) == GATHERED[kind]
        assert same(result["half"], result["stored"])
        assert any((weight != weight.bfloat16()).any() for weight in result["half"]["weights"].values())


def test_stage_3_refuses_another_use_of_such_a_weight_in_the_first_step(ranks: Ranks) -> None:
    for said in ranks.run(ReadsAWeight()):
        assert "net.2.weight" in said
        assert "pins={'net.2': 'fp32'}" in said
