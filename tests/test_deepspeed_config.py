"""The JSON a DeepSpeed engine gets: what a plan writes, how a user's own is merged, and every contradiction.

The installed DeepSpeed is the judge of what it accepts, and of the lists of its keys.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_mp.deepspeed_config import Composed, add_trainer, compose, read
from lightning_mp.deepspeed_keys import BLOCKS, REFUSED, REMOVED_ZERO, TOP
from lightning_mp.errors import PlanError
from lightning_mp.loss_scaling import LossScaling
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from support.scales import scalings

DATA = Path(__file__).parent / "support" / "data" / "deepspeed_configs.json"
REAL: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
RESOLVED = tuple(name for name in PRECISIONS if name != "auto")
OFF = {"enabled": False}
DEEPSPEED = LossScaling.deepspeed()

# LongSpec's block, sail-sg/LongSpec longspec/train/conf/exp/qwq_glide_8gpu_slim6b.yaml
WHOLE_FP16 = {
    "enabled": True,
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}


def policy(precision: str = "16-mixed", **fields: Any) -> PrecisionPolicy:
    return PrecisionPolicy(precision=precision, **fields)


def composed(precision: str = "16-mixed", user: Any = None, /, *, stage: int = 2, **words: Any) -> Composed:
    """``compose`` for a precision; LossScaling.deepspeed() is the rule where there is one."""
    flags = {
        name: words.pop(name) for name in ("offload_optimizer", "offload_parameters", "fp16_supported") & words.keys()
    }
    if precision.startswith("16"):
        words.setdefault("loss_scaling", DEEPSPEED)
    return compose(policy(precision, **words), user, stage=stage, **flags)


def faults_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PlanError) as error:
        call()
    assert str(error.value).startswith("DeepSpeed config: ")
    return [str(fault) for fault in error.value.faults]


def the_fault(call: Callable[[], object]) -> str:
    (fault,) = faults_of(call)
    return fault


def with_trainer(config: Mapping[str, Any], **words: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"clip_norm": None, "accumulate": 1, "world_size": 1, "micro_batch": None}
    return add_trainer(config, **(defaults | words))


@pytest.fixture(scope="module")
def parse() -> Callable[[dict[str, Any]], Any]:
    """DeepSpeed's own reading of a config; without a process group it takes the world for one rank."""
    config = pytest.importorskip("deepspeed.runtime.config")
    return config.DeepSpeedConfig


# --- what a plan writes -------------------------------------------------------------------------------------------


def test_the_whole_fp16_block_arrives_key_for_key() -> None:
    config, notes = composed().config, composed().notes
    assert config["fp16"] == WHOLE_FP16
    assert list(config["fp16"]) == list(WHOLE_FP16)
    assert {key: type(value) for key, value in config["fp16"].items()} == {
        key: type(value) for key, value in WHOLE_FP16.items()
    }
    assert notes == ()


def test_the_whole_config_of_a_plan_alone() -> None:
    assert composed("bf16-mixed", stage=3).config == {
        "zero_optimization": {"stage": 3},
        "fp16": OFF,
        "bf16": OFF,
        "torch_autocast": OFF,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.parametrize("precision", RESOLVED)
def test_the_half_engines_stay_off_and_only_fp16_plans_say_fp16(precision: str) -> None:
    config = composed(precision).config
    assert config["bf16"] == OFF
    assert config["torch_autocast"] == OFF
    assert config["fp16"] == (WHOLE_FP16 if precision.startswith("16") else OFF)


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(
    ("stage", "optimizer", "parameters"),
    [
        (stage, on, also)
        for stage in (1, 2, 3)
        for on in (False, True)
        for also in (False, True)
        if stage == 3 or not also
    ],
)
@pytest.mark.parametrize("precision", RESOLVED)
def test_deepspeed_reads_what_is_written(
    precision: str, stage: int, optimizer: bool, parameters: bool, supported: bool, parse: Callable[..., Any]
) -> None:
    flags = {"offload_optimizer": optimizer, "offload_parameters": parameters, "fp16_supported": supported}
    written = with_trainer(composed(precision, stage=stage, **flags).config, clip_norm=0.5, accumulate=4, micro_batch=2)
    seen = parse(json.loads(json.dumps(written)))
    assert seen.zero_optimization_stage == stage
    assert (seen.zero_config.offload_optimizer is not None) == optimizer
    assert (seen.zero_config.offload_param is not None) == parameters
    for block in (seen.zero_config.offload_optimizer, seen.zero_config.offload_param):
        assert block is None or block.device == "cpu"
    assert seen.float16_config.enabled == (precision.startswith("16") and supported)
    assert not seen.bfloat16_config.enabled
    assert not seen.torch_autocast_enabled
    assert str(seen.communication_data_type) == "torch.float32"
    assert seen.grad_accum_dtype == "fp32"
    assert (seen.gradient_clipping, seen.gradient_accumulation_steps) == (0.5, 4)
    assert (seen.train_micro_batch_size_per_gpu, seen.train_batch_size) == (2, 8)


@pytest.mark.parametrize("reduce", ["fp32", "bf16", "fp16"])
def test_gradients_are_sent_in_the_plans_format(reduce: str, parse: Callable[..., Any]) -> None:
    config = composed(reduce_dtype=reduce).config
    assert config["communication_data_type"] == reduce
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert str(parse(with_trainer(config)).communication_data_type) == f"torch.{names[reduce]}"


@settings(deadline=None)  # the first example imports DeepSpeed
@given(rule=scalings(), precision=st.sampled_from(["16-mixed", "16-true"]))
def test_deepspeed_reads_any_rule_as_far_as_it_can_be_said(rule: LossScaling, precision: str) -> None:
    read_fp16 = pytest.importorskip("deepspeed.runtime.precision_config").get_float16_config
    made = composed(precision, loss_scaling=rule)
    block, seen = made.config["fp16"], read_fp16(made.config)
    said = [note.partition(":")[0] for note in made.notes]
    assert seen.loss_scale == (0 if rule.dynamic else rule.init_scale)
    assert (seen.loss_scale_window, seen.hysteresis) == (rule.growth_interval, rule.hysteresis)
    assert seen.consecutive_hysteresis == rule.consecutive_hysteresis
    for key, number in (("initial_scale_power", rule.init_scale), ("min_loss_scale", rule.min_scale)):
        assert (key in block) != (f"fp16.{key}" in said), "a key is written, or a note says why not"
        if key in block:
            assert {"initial_scale_power": seen.initial_dynamic_scale(), "min_loss_scale": seen.min_loss_scale}[
                key
            ] == number


@pytest.mark.parametrize(
    ("rule", "key", "words"),
    [
        (LossScaling(init_scale=3000.0), "initial_scale_power", "init_scale=3000.0"),
        (LossScaling(init_scale=0.5, min_scale=0), "initial_scale_power", "init_scale=0.5"),
        (LossScaling.torch(), "min_loss_scale", "min_scale=0.0"),
        (LossScaling(min_scale=1.5), "min_loss_scale", "min_scale=1.5"),
    ],
)
def test_a_number_deepspeed_cannot_take_is_left_out_with_a_note(rule: LossScaling, key: str, words: str) -> None:
    made = composed(loss_scaling=rule)
    assert key not in made.config["fp16"]
    (note,) = [note for note in made.notes if key in note]
    assert words in note


def test_what_json_has_no_key_for_is_noted() -> None:
    (note,) = composed(loss_scaling=LossScaling(growth_factor=4.0)).notes
    for words in ("growth_factor=4.0", "growth_delay=0", "max_scale=None", "at_min='hold'"):
        assert words in note
    assert "backoff_factor" not in note


def test_a_static_scale_is_written_as_a_static_scale(parse: Callable[..., Any]) -> None:
    made = composed(loss_scaling=LossScaling.static(128.0))
    assert made.config["fp16"]["loss_scale"] == 128.0
    assert parse(with_trainer(made.config)).float16_config.loss_scale == 128.0
    assert made.notes == ()


def test_on_a_device_deepspeed_refuses_fp16_is_off_and_a_note_says_so() -> None:
    made = composed(fp16_supported=False)
    assert made.config["fp16"] == WHOLE_FP16 | {"enabled": False}
    assert len(made.notes) == 1
    assert made.notes[0].startswith("fp16.enabled=False")


def test_an_unresolved_precision_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="auto") as error:
        compose(policy("auto"), stage=2)
    assert not isinstance(error.value, PlanError)


def test_what_was_written_can_be_merged_again() -> None:
    for precision in RESOLVED:
        first = composed(precision, stage=3, offload_optimizer=True)
        assert composed(precision, first.config, stage=3, offload_optimizer=True) == first


# --- a user's own JSON that agrees --------------------------------------------------------------------------------


def test_the_rest_of_a_users_json_is_kept() -> None:
    user = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "data_types": {"keep_in_fp32_modules": ["gate"]},
        "steps_per_print": 2000,
        "comms_config": {"verbose": False},
        "seq_parallel_communication_data_type": "bf16",
    }
    made = composed("bf16-mixed", user)
    kept = set(user) - {"zero_optimization", "data_types"}
    assert {key: made.config[key] for key in kept} == {key: user[key] for key in kept}
    assert made.config["zero_optimization"] == user["zero_optimization"]
    assert made.config["data_types"] == {"keep_in_fp32_modules": ["gate"], "grad_accum_dtype": "fp32"}
    assert made.notes == ()


def test_the_users_dict_is_neither_changed_nor_shared() -> None:
    user = {
        "fp16": {"enabled": "auto"},
        "optimizer": {"params": {"betas": [0.9, 0.95]}},
        "_comment": "mine",
        "amp": OFF,
    }
    before = deepcopy(user)
    config = composed("16-mixed", user).config
    config["optimizer"]["params"]["betas"].append(0)
    with_trainer(config)["optimizer"]["params"]["betas"].append(1)
    assert user == before
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95, 0]


AGREES: list[tuple[str, dict[str, Any], str | None]] = [
    ("bf16-mixed", {"bf16": {"enabled": True}}, "bf16.enabled=True"),
    ("bf16-true", {"bf16": {"enabled": True}}, "bf16.enabled=True"),
    ("bf16-mixed", {"bfloat16": {"enabled": True}}, "bfloat16.enabled=True"),
    ("bf16-mixed", {"bf16": {"enabled": False}, "fp16": {"enabled": False}}, None),
    ("bf16-mixed", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": False}}, "bf16.enabled=True"),
    ("bf16-mixed", {"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow=False"),
    ("bf16-mixed", {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "torch_autocast.enabled=True"),
    ("16-mixed", {"torch_autocast": {"enabled": True, "dtype": "half"}}, "torch_autocast.enabled=True"),
    ("32-true", {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, None),
    ("16-mixed", {"fp16": WHOLE_FP16}, None),
    ("16-true", {"fp16": WHOLE_FP16 | {"loss_scale_window": 1000.0, "min_loss_scale": 1.0}}, None),
    ("16-mixed", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": False}}, None),
    ("16-mixed", {"fp16": {"auto_cast": True}}, "fp16.auto_cast=True"),
    ("32-true", {"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 4}}, "fp16.hysteresis=4"),
    ("16-mixed", {"communication_data_type": "FP32"}, None),
    ("16-mixed", {"data_types": {"grad_accum_dtype": "float32"}}, None),
    ("bf16-true", {"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype='bf16'"),
    ("16-mixed", {"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype='fp32'"),
    ("32-true", {"amp": {"enabled": False, "opt_level": "O1"}}, "amp="),
    ("32-true", {"sparse_gradients": False}, "sparse_gradients=False"),
    ("32-true", {"zero_optimization": {"cpu_offload": True}}, "cpu_offload=True"),
]


@pytest.mark.parametrize(
    ("precision", "user", "note"), AGREES, ids=[f"{row[0]} {json.dumps(row[1])}" for row in AGREES]
)
def test_what_agrees_with_the_plan_is_taken_over_with_a_note_where_the_plan_does_it(
    precision: str, user: dict[str, Any], note: str | None, parse: Callable[..., Any]
) -> None:
    made = composed(precision, user)
    assert len(made.notes) == (note is not None)
    assert note is None or note in made.notes[0]
    assert made.config["bf16"] == OFF
    assert made.config["torch_autocast"] == OFF
    assert "bfloat16" not in made.config
    assert made.config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made.config["communication_data_type"] == "fp32"
    parse(with_trainer(made.config))


def test_auto_cast_is_the_users_own() -> None:
    assert composed("16-mixed", {"fp16": {"auto_cast": True}}).config["fp16"] == WHOLE_FP16 | {"auto_cast": True}


def test_buffers_the_plan_stores_in_the_same_format_agree() -> None:
    made = composed("bf16-mixed", {"data_types": {"buffer_dtype": "bfloat16"}}, buffer_dtype="bf16")
    assert made.config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types.buffer_dtype='bfloat16'" in made.notes[0]


def test_beside_a_static_scale_the_keys_of_the_dynamic_one_say_nothing() -> None:
    user = {"fp16": WHOLE_FP16 | {"loss_scale": 128, "loss_scale_window": 7, "min_loss_scale": 0.5}}
    made = composed("16-mixed", user, loss_scaling=LossScaling.static(128))
    assert made.config["fp16"]["loss_scale"] == 128
    assert "fp16.loss_scale_window=7" in made.notes[0]


@pytest.mark.parametrize("word", ["auto", None])
@pytest.mark.parametrize("precision", RESOLVED)
def test_auto_and_null_count_as_not_given_wherever_they_stand(precision: str, word: str | None) -> None:
    every = {name: dict.fromkeys(table, "auto") for name, table in BLOCKS.items() if "." not in name}
    zero = every["zero_optimization"]
    zero |= {"offload_optimizer": {"pin_memory": "auto"}, "zenflow": {"topk_ratio": "auto"}}
    user = {key: every.get(key, "auto") for key in TOP} | {"_comment": 1, "aio": {"block_size": "auto"}}
    user = json.loads(json.dumps(user).replace('"auto"', json.dumps(word)))
    config = composed(precision, user).config
    plain = composed(precision).config
    assert config.pop("aio") == config.pop("compile") == {}
    assert config["zero_optimization"] == {"offload_optimizer": {}, "zenflow": {}, "stage": 2}
    assert config | {"zero_optimization": 0} == plain | {"zero_optimization": 0}


# --- offloading ---------------------------------------------------------------------------------------------------


def test_offloading_is_written_with_deepspeeds_own_defaults() -> None:
    zero = composed(stage=3, offload_optimizer=True, offload_parameters=True).config["zero_optimization"]
    assert zero == {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("flag", [True, False])
def test_a_users_own_offloading_is_kept_whatever_the_strategys_name_says(flag: bool) -> None:
    own = {"device": "nvme", "nvme_path": "/fast", "pin_memory": True}
    user = {"zero_optimization": {"offload_optimizer": own, "offload_param": own}}
    zero = composed("16-mixed", user, stage=3, offload_optimizer=flag, offload_parameters=flag).config
    assert zero["zero_optimization"] == {"stage": 3, "offload_optimizer": own, "offload_param": own}


def test_a_block_without_a_device_gets_the_strategys() -> None:
    user = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
    zero = composed("16-mixed", user, offload_optimizer=True).config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert composed("16-mixed", user).config["zero_optimization"]["offload_optimizer"] == {"pin_memory": False}


def test_the_deprecated_flags_become_the_blocks_that_replaced_them(parse: Callable[..., Any]) -> None:
    user = {"zero_optimization": {"cpu_offload": True, "cpu_offload_param": True}}
    config = composed("16-mixed", user, stage=3, offload_optimizer=True).config
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert config["zero_optimization"] == zero
    parse(with_trainer(config))


def test_a_deprecated_flag_beside_its_block_leaves_the_block_alone(parse: Callable[..., Any]) -> None:
    own = {"device": "cpu", "pin_memory": False}
    user = {"zero_optimization": {"cpu_offload": True, "offload_optimizer": own}}
    config = composed("16-mixed", user).config
    assert config["zero_optimization"] == {"stage": 2, "offload_optimizer": own}
    parse(with_trainer(config))


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_parameters_need_stage_3(stage: int) -> None:
    fault = the_fault(lambda: composed(stage=stage, offload_parameters=True))
    assert fault.startswith(
        f"given offload_parameters=True with stage={stage}; allowed: offloaded parameters at stage 3"
    )
    user = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    fault = the_fault(lambda: composed("16-mixed", user, stage=stage))
    assert fault.startswith(f"given zero_optimization.offload_param={{'device': 'cpu'}} with stage={stage};")


@pytest.mark.parametrize("stage", [0, 4, -1])
def test_a_stage_that_does_not_shard_is_refused(stage: int) -> None:
    assert the_fault(lambda: composed(stage=stage)).startswith(
        f"given stage={stage}; allowed: 1, 2, 3; do: choose 'ddp'"
    )


# --- contradictions -----------------------------------------------------------------------------------------------

#: precision, the user's JSON, further words, and what the message shows of JSON and of plan
CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("16-mixed", {"bf16": {"enabled": True}}, {}, "bf16.enabled=True", "precision='16-mixed'"),
    ("32-true", {"bf16": {"enabled": True}}, {}, "bf16.enabled=True", "precision='32-true'"),
    ("16-true", {"bfloat16": {"enabled": True}}, {}, "bfloat16.enabled=True", "precision='16-true'"),
    *[
        (precision, {"fp16": {"enabled": True}}, {}, "fp16.enabled=True", f"precision={precision!r}")
        for precision in ("32-true", "bf16-mixed", "bf16-true")
    ],
    *[
        (precision, {"fp16": {"enabled": False}}, {}, "fp16.enabled=False", f"precision={precision!r}")
        for precision in ("16-mixed", "16-true")
    ],
    *[
        (
            precision,
            {"torch_autocast": {"enabled": True, "dtype": dtype}},
            {},
            f"torch_autocast.enabled=True with dtype={dtype!r}",
            f"precision={precision!r}",
        )
        for precision, dtype in (
            ("16-mixed", "bfloat16"),
            ("bf16-mixed", "torch.float16"),
            ("bf16-true", "bfloat16"),
            ("32-true", "bf16"),
            ("bf16-mixed", None),
        )
    ],
    ("16-mixed", {"fp16": {"initial_scale_power": 32}}, {}, "initial_scale_power=32 (2**32)", "init_scale=65536.0"),
    ("16-mixed", {"fp16": {"initial_scale_power": 9999}}, {}, "initial_scale_power=9999", "init_scale=65536.0"),
    (
        "16-mixed",
        {"fp16": {"initial_scale_power": 16}},
        {"loss_scaling": LossScaling(init_scale=3000.0)},
        "initial_scale_power=16 (2**16)",
        "init_scale=3000.0",
    ),
    ("16-mixed", {"fp16": {"loss_scale": 128}}, {}, "fp16.loss_scale=128", "fp16.loss_scale=0"),
    (
        "16-mixed",
        {"fp16": {"loss_scale": 0}},
        {"loss_scaling": LossScaling.static(512.0)},
        "fp16.loss_scale=0",
        "fp16.loss_scale=512.0",
    ),
    (
        "16-mixed",
        {"fp16": {"loss_scale": 128}},
        {"loss_scaling": LossScaling.static(512.0)},
        "fp16.loss_scale=128",
        "fp16.loss_scale=512.0",
    ),
    ("16-mixed", {"fp16": {"loss_scale_window": 500}}, {}, "loss_scale_window=500", "growth_interval=1000"),
    ("16-true", {"fp16": {"hysteresis": 4}}, {}, "fp16.hysteresis=4", "loss_scaling.hysteresis=2"),
    (
        "16-mixed",
        {"fp16": {"consecutive_hysteresis": True}},
        {},
        "fp16.consecutive_hysteresis=True",
        "loss_scaling.consecutive_hysteresis=False",
    ),
    ("16-mixed", {"fp16": {"min_loss_scale": 128}}, {}, "min_loss_scale=128", "min_scale=1"),
    (
        "16-mixed",
        {"fp16": {"min_loss_scale": 1}},
        {"loss_scaling": LossScaling.torch()},
        "min_loss_scale=1",
        "min_scale=0.0",
    ),
    ("16-mixed", {"communication_data_type": "fp16"}, {}, "communication_data_type='fp16'", "reduce_dtype='fp32'"),
    (
        "bf16-mixed",
        {"communication_data_type": "fp32"},
        {"reduce_dtype": "bf16"},
        "communication_data_type='fp32'",
        "reduce_dtype='bf16'",
    ),
    ("bf16-true", {"data_types": {"grad_accum_dtype": "bf16"}}, {}, "grad_accum_dtype='bf16'", "'fp32'"),
    ("bf16-mixed", {"data_types": {"param_dtype": "bf16"}}, {}, "param_dtype='bf16'", "stored as 'fp32'"),
    ("16-true", {"data_types": {"param_dtype": "fp32"}}, {}, "param_dtype='fp32'", "stored as 'fp16'"),
    ("bf16-mixed", {"data_types": {"buffer_dtype": "fp16"}}, {}, "buffer_dtype='fp16'", "buffer_dtype=None"),
    (
        "bf16-mixed",
        {"data_types": {"buffer_dtype": "fp16"}},
        {"buffer_dtype": "fp32"},
        "buffer_dtype='fp16'",
        "buffer_dtype='fp32'",
    ),
    ("16-mixed", {"zero_optimization": {"stage": 3}}, {"stage": 2}, "zero_optimization.stage=3", "stage=2"),
    ("16-mixed", {"zero_optimization": {"stage": 0}}, {"stage": 1}, "zero_optimization.stage=0", "stage=1"),
    (
        "16-mixed",
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"offload_optimizer": True},
        "zero_optimization.offload_optimizer.device='none'",
        "offload_optimizer=True",
    ),
    (
        "16-mixed",
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"offload_parameters": True, "stage": 3},
        "zero_optimization.offload_param.device='none'",
        "offload_parameters=True",
    ),
]


@pytest.mark.parametrize(
    ("precision", "user", "words", "written", "planned"),
    CONTRADICTIONS,
    ids=[f"{row[0]} {row[3]} {row[4]}" for row in CONTRADICTIONS],
)
def test_a_contradiction_shows_both_values(
    precision: str, user: dict[str, Any], words: dict[str, Any], written: str, planned: str
) -> None:
    fault = the_fault(lambda: composed(precision, user, **words))
    shown, allowed = fault.split("; allowed: ")
    left, right = shown.split(" in the JSON and ")
    assert left.startswith("given ")
    assert written in left
    assert planned in right
    assert right.endswith((" in the plan", " in the strategy"))
    assert allowed.startswith("the same in both; do: ")


def test_a_message_names_the_field_that_would_say_the_same() -> None:
    fault = the_fault(lambda: composed("16-mixed", {"fp16": {"initial_scale_power": 12}}))
    assert fault.endswith("do: remove fp16.initial_scale_power from the JSON, or set LossScaling(init_scale=2**12)")
    fault = the_fault(lambda: composed("16-mixed", {"fp16": {"loss_scale": 128}}))
    assert fault.endswith("or set loss_scaling=LossScaling.static(128)")


def test_every_contradiction_is_reported_at_once() -> None:
    user = {
        "amp": {"enabled": True},
        "nonsense": 1,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "hysteresis": 4, "loss_scale_window": "1000"},
        "zero_optimization": {"stage": 1, "offload_param": {"device": "disk"}},
        "communication_data_type": "bf16",
    }
    assert len(faults_of(lambda: composed("16-mixed", user))) == 9


# --- refused by name, unknown, wrong type -------------------------------------------------------------------------

#: what is refused whatever the precision, and a word of the reason
REFUSED_BY_NAME: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads=True", "what is stored"),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads=True", "what is stored"),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states=True", "what is stored"),
    (
        {"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]}},
        "torch_autocast.lower_precision_safe_modules=['torch.nn.Linear']",
        "pins=",
    ),
    ({"torch_autocast": {"lower_precision_safe_modules": []}}, "lower_precision_safe_modules=[]", "pins="),
    ({"amp": {"enabled": True}}, "amp={'enabled': True}", "precision comes from the plan"),
    ({"amp": {"opt_level": "O1"}}, "amp={'opt_level': 'O1'}", "precision comes from the plan"),
    ({"fp8": {"enabled": True}}, "fp8={'enabled': True}", "precision comes from the plan"),
    ({"elasticity": {"enabled": True}}, "elasticity={'enabled': True}", "removed"),
    ({"sparse_gradients": True}, "sparse_gradients=True", "removed"),
]


@pytest.mark.parametrize("precision", RESOLVED)
@pytest.mark.parametrize(("user", "given", "reason"), REFUSED_BY_NAME, ids=[row[1] for row in REFUSED_BY_NAME])
def test_what_chooses_formats_behind_the_plan_is_refused_with_its_reason(
    precision: str, user: dict[str, Any], given: str, reason: str
) -> None:
    fault = the_fault(lambda: composed(precision, user))
    assert given in fault
    assert reason in fault
    assert "; do: remove " in fault


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16": {"inital_scale_power": 16}}, "fp16.inital_scale_power", "did you mean 'initial_scale_power'?"),
    ({"bf16": {"enable": True}}, "bf16.enable", "did you mean 'enabled'?"),
    ({"bfloat16": {"enable": True}}, "bfloat16.enable", "did you mean 'enabled'?"),
    ({"torch_autocast": {"dtpye": "bf16"}}, "torch_autocast.dtpye", "did you mean 'dtype'?"),
    ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag", "did you mean 'stage'?"),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise",
        "did you mean 'device'?",
    ),
    (
        {"zero_optimization": {"offload_param": {"ratio": 0.5}}},
        "zero_optimization.offload_param.ratio",
        "move it into zero_optimization.offload_optimizer",
    ),
    ({"compile": {"deepcompil": True}}, "compile.deepcompil", "did you mean 'deepcompile'?"),
    ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype", "did you mean 'grad_accum_dtype'?"),
    ({"zero_optimisation": {}}, "zero_optimisation", "'zero_optimization'"),
    ({"stage": 2}, "stage", "move it into zero_optimization"),
    ({"fp16": {"qqq": 1}}, "fp16.qqq", "remove it"),
    ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size", "remove it: DeepSpeed 0.19"),
    ({7: 1}, "7", "remove it"),
]


@pytest.mark.parametrize(("user", "key", "fix"), UNKNOWN, ids=[row[1] for row in UNKNOWN])
def test_an_unknown_key_is_refused_with_the_nearest_known_one(user: dict[str, Any], key: str, fix: str) -> None:
    for precision in RESOLVED:
        fault = the_fault(lambda precision=precision: composed(precision, user))
        assert fault.startswith(f"given unknown key {key}; allowed: ")
        assert fix in fault.partition("; do: ")[2]


def test_quotes_are_blamed_only_where_they_are_the_fault() -> None:
    quoted = the_fault(lambda: composed("16-mixed", {"fp16": {"hysteresis": "2"}}))
    assert quoted.endswith("do: write it without quotes")
    device = the_fault(lambda: composed("16-mixed", {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}))
    assert device.endswith("do: correct it")


def test_an_unknown_key_inside_a_block_lists_the_known_ones() -> None:
    fault = the_fault(lambda: composed("16-mixed", {"fp16": {"inital_scale_power": 16}}))
    assert all(name in fault for name in BLOCKS["fp16"])
    assert fault.endswith("; do: did you mean 'initial_scale_power'?")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({name: value}, f"{name}={value!r}", "an object")
        for name in ("fp16", "bf16", "data_types")
        for value in (True, 3)
    ],
    ({"zero_optimization": True}, "zero_optimization=True", "an object"),
    ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage='2'", "0, 1, 2, 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=True", "0, 1, 2, 3"),
    ({"zero_optimization": {"stage": 2.5}}, "zero_optimization.stage=2.5", "0, 1, 2, 3"),
    ({"zero_optimization": {"overlap_comm": "true"}}, "zero_optimization.overlap_comm='true'", "true, false"),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size='5e8'", "a whole number >= 1"),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size=0", "a whole number >= 1"),
    ({"zero_optimization": {"offload_param": "cpu"}}, "zero_optimization.offload_param='cpu'", "an object"),
    ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "device='gpu'", "'none', 'cpu', 'nvme'"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled='true'", "true, false"),
    ({"fp16": {"enabled": 1}}, "fp16.enabled=1", "true, false"),
    *[({"fp16": {"loss_scale": value}}, "fp16.loss_scale=", "number >= 0") for value in (-1, True, "0", math.nan)],
    *[
        ({"fp16": {"loss_scale_window": value}}, "loss_scale_window=", "number >= 1")
        for value in (0, 1.5, "9", math.inf)
    ],
    ({"fp16": {"initial_scale_power": 1.5}}, "fp16.initial_scale_power=1.5", "a whole number"),
    ({"torch_autocast": {"dtype": "fp64"}}, "torch_autocast.dtype='fp64'", "fp32, bf16, fp16"),
    ({"communication_data_type": "float32"}, "communication_data_type='float32'", "fp32, bf16, fp16"),
    ({"data_types": {"param_dtype": 16}}, "data_types.param_dtype=16", "fp32, bf16, fp16"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping='1.0'", "a finite number >= 0"),
    ({"train_batch_size": 0}, "train_batch_size=0", "a whole number >= 1"),
    ({"optimizer": "AdamW"}, "optimizer='AdamW'", "an object"),
]


@pytest.mark.parametrize(("user", "given", "allowed"), WRONG, ids=[json.dumps(row[0]) for row in WRONG])
def test_a_wrong_type_is_a_fault_and_only_one(user: dict[str, Any], given: str, allowed: str) -> None:
    for precision in RESOLVED:
        fault = the_fault(lambda precision=precision: composed(precision, user))
        assert given in fault.partition("; allowed: ")[0]
        assert allowed in fault.partition("; allowed: ")[2]


# --- the lists of keys, against the installed DeepSpeed -----------------------------------------------------------


class Remembering(dict[str, Any]):
    """A dict that remembers which keys it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __copy__(self) -> Remembering:
        return self


def test_every_key_deepspeed_reads_is_known(parse: Callable[..., Any]) -> None:
    written = Remembering(with_trainer({"zero_optimization": {}, "bf16": {}}))
    parse(written)
    assert {key for key in written.asked if key not in TOP and key not in REFUSED} <= {"curriculum_learning"}
    assert {"train_batch_size", "fp16", "zero_optimization", "compile", "wandb", "timers"} <= written.asked


def test_the_blocks_keys_are_deepspeeds_own() -> None:
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    compiling = pytest.importorskip("deepspeed.compile.config")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    models = {
        "fp16": precision.DeepSpeedFP16Config,
        "bf16": precision.DeepSpeedBF16Config,
        "compile": compiling.CompileConfig,
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
    }
    for name, model in models.items():
        fields = model.model_fields
        aliases = {field.alias for field in fields.values() if field.alias}
        assert set(BLOCKS[name]) == set(fields) | aliases, name


def test_the_keys_deepspeed_removed_are_refused_by_name() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    assert set(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())) <= set(REFUSED)
    assert set(getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", ())) <= set(REMOVED_ZERO)


# --- reading ------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


FORMS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: SMALL,
    "DictConfig": lambda _: OmegaConf.create(SMALL),
    "path": lambda tmp: file_with(tmp, json.dumps(SMALL)),
    "path as a string": lambda tmp: str(file_with(tmp, json.dumps(SMALL))),
    "a byte order mark": lambda tmp: file_with(tmp, "\ufeff" + json.dumps(SMALL)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_reads_as_the_same_plain_dict(form: Callable[[Path], Any], tmp_path: Path) -> None:
    found = read(form(tmp_path))
    assert found == SMALL
    assert type(found) is dict
    assert type(found["fp16"]) is dict
    assert type(found["optimizer"]["params"]["betas"]) is list
    assert found["fp16"] is not SMALL["fp16"]


def test_a_config_from_omegaconf_composes_as_the_dict_does() -> None:
    user = {"scale": 16, "fp16": {"enabled": True, "initial_scale_power": "${scale}"}}
    assert the_fault(lambda: composed("16-mixed", OmegaConf.create(user))).startswith("given unknown key scale;")
    assert composed("16-mixed", OmegaConf.create(SMALL)) == composed("16-mixed", SMALL)


BROKEN: list[tuple[str, tuple[str, ...]]] = [
    ('{\n  // the scale\n  "fp16": {}\n}', ("line 2, column 3", "remove the comment there")),
    ('{\n  "fp16": {} // off\n}', ("line 2, column 14", "remove the comment there")),
    ('{\n  "fp16": {}, # off\n  "bf16": {}\n}', ("line 2, column 15", "remove the comment there")),
    ('{\n  "fp16": {\n}', ("line 3, column 2", "mend it there")),
    ("fp16: true", ("line 1, column 1", "mend it there")),
    ("", ("line 1, column 1",)),
    ("[1]", ("holding a list", "an object")),
    ('{"fp16": {}, "bf16": {"a": 1, "a": 2}, "fp16": {}}', ("'a' twice", "'fp16' twice", "keep one")),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_file_that_is_no_json_object_says_where_and_why(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = file_with(tmp_path, text)
    message = " ".join(faults_of(lambda: read(path)))
    assert str(path) in message
    assert all(word in message for word in words)


def test_a_missing_file_and_a_folder_are_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert the_fault(lambda path=path: read(path)).startswith(f"given {str(path)!r}, which is no file;")


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"_comment": "\xff\xfe"}')
    assert "JSON in UTF-8" in the_fault(lambda: read(path))


@pytest.mark.parametrize("source", [None, 3, [("fp16", {})]])
def test_what_is_neither_mapping_nor_path_is_refused(source: Any) -> None:
    assert the_fault(lambda: read(source)).startswith(f"given {source!r}; allowed: an object")


def test_a_config_that_does_not_resolve_is_a_fault_of_the_deepspeed_config() -> None:
    assert "does not resolve" in the_fault(lambda: read(OmegaConf.create({"fp16": {"enabled": "${nowhere}"}})))


# --- what the Trainer decides -------------------------------------------------------------------------------------


def test_the_trainer_fills_in_what_the_json_leaves_out() -> None:
    assert with_trainer({}) == {
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert with_trainer({}, clip_norm=0.5, accumulate=4, world_size=8, micro_batch=2) == {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
    }


def test_clipping_that_stands_in_the_json_alone_is_taken() -> None:
    assert with_trainer({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_a_whole_batch_alone_says_what_a_part_is() -> None:
    config = with_trainer({"train_batch_size": 256}, accumulate=4, world_size=8)
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["train_batch_size"] == 256


def test_what_json_and_trainer_both_say_alike_is_kept() -> None:
    user = {
        "gradient_clipping": 1,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 64,
    }
    assert with_trainer(user, clip_norm=1.0, accumulate=4, world_size=8, micro_batch=2) == user


def test_auto_is_the_trainers_to_say() -> None:
    user = dict.fromkeys(
        ("gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"),
        "auto",
    )
    assert with_trainer(user, clip_norm=1.0, accumulate=4, micro_batch=2) == {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
    }


TRAINER: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        {"gradient_clipping": 1.0},
        {"clip_norm": 0.5},
        ("gradient_clipping=1.0 in the JSON", "Trainer(gradient_clip_val=0.5)", "write Trainer(gradient_clip_val=1.0)"),
    ),
    (
        {"gradient_clipping": 0},
        {"clip_norm": 0.5},
        ("gradient_clipping=0 in the JSON", "Trainer(gradient_clip_val=0.5)"),
    ),
    (
        {"gradient_clipping": 1.0},
        {"clip_norm": 0.0},
        ("gradient_clipping=1.0 in the JSON", "Trainer(gradient_clip_val=0.0)"),
    ),
    (
        {"gradient_accumulation_steps": 4},
        {},
        (
            "gradient_accumulation_steps=4 in the JSON",
            "Trainer(accumulate_grad_batches=1)",
            "do: write Trainer(accumulate_grad_batches=4)",
        ),
    ),
    (
        {"gradient_accumulation_steps": 1},
        {"accumulate": 8},
        ("gradient_accumulation_steps=1 in the JSON", "Trainer(accumulate_grad_batches=8)"),
    ),
    (
        {"train_micro_batch_size_per_gpu": 4},
        {"micro_batch": 8},
        ("train_micro_batch_size_per_gpu=4 in the JSON", "a dataloader with batch_size=8"),
    ),
    (
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4},
        {"accumulate": 2, "world_size": 8},
        ("train_batch_size=100 in the JSON", "4 a device x 2 accumulated x 8 devices = 64", "train_batch_size: 64"),
    ),
    (
        {"train_batch_size": 100},
        {"micro_batch": 3, "world_size": 8},
        ("train_batch_size=100 in the JSON", "3 a device x 1 accumulated x 8 devices = 24"),
    ),
    ({"train_batch_size": 9}, {"world_size": 2}, ("train_batch_size=9 in the JSON", "x 2 devices = 2")),
    ({"gradient_clipping": "1.0"}, {"clip_norm": 1.0}, ("gradient_clipping='1.0'", "write it without quotes")),
    ({"train_batch_size": True}, {}, ("train_batch_size=True", "a whole number >= 1")),
]


@pytest.mark.parametrize(("user", "words", "shown"), TRAINER, ids=[f"{row[0]} {row[1]}" for row in TRAINER])
def test_what_the_trainer_says_otherwise_is_one_fault_with_both_values(
    user: dict[str, Any], words: dict[str, Any], shown: tuple[str, ...]
) -> None:
    fault = the_fault(lambda: with_trainer(user, **words))
    assert all(part in fault for part in shown), fault


def test_every_contradiction_with_the_trainer_is_reported_at_once() -> None:
    user = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 100,
    }
    assert len(faults_of(lambda: with_trainer(user, clip_norm=0.5, accumulate=2, micro_batch=3))) == 4


# --- real configs -------------------------------------------------------------------------------------------------

#: those that are refused for the precision they name, and the word for it
REFUSED_REAL = {
    "llamafactory-zero0": "stage=0",
    "llamafactory-zero3-fp8-now": "monitor_config",
    "llamafactory-zero3-fp8-then": "fp8",
    "dse-imagenet-zero1": "cuda_visible_devices",
    "dse-bf16-masters": "bf16_master_weights_and_grads",
    "dse-moq": "quantize_training",
    "axolotl-zero1-compile": "compile.backend",
    "longspec-zero1-cosine": "stage3_max_live_parameters='1e8'",
    "hf-zero3-fp16": "reduce_bucket_size=0",
}


def named_precisions(config: Mapping[str, Any]) -> list[str]:
    """The precisions a config asks for; ``"auto"`` leaves it to the Trainer's flags."""
    switches = {name: config.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
    if True in switches.values():
        return ["16-mixed", "16-true"] if switches["fp16"] is True else ["bf16-mixed", "bf16-true"]
    undecided = [
        precision for name, precision in (("fp16", "16-mixed"), ("bf16", "bf16-mixed")) if switches[name] == "auto"
    ]
    return [*undecided, "32-true"]


def named_rule(config: Mapping[str, Any]) -> LossScaling:
    block = config.get("fp16", {})
    return LossScaling.deepspeed(
        **{key: block[key] for key in WHOLE_FP16 if key in block and key not in ("enabled", "auto_cast")}
    )


def test_there_are_thirty_real_configs() -> None:
    assert len(REAL) == 30
    assert set(REFUSED_REAL) <= set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_a_real_config_composes_for_what_it_names_and_deepspeed_reads_it(name: str, parse: Callable[..., Any]) -> None:
    config = REAL[name]["config"]
    before = deepcopy(config)
    stage = config.get("zero_optimization", {}).get("stage", 1)
    for precision in named_precisions(config):
        words = {"loss_scaling": named_rule(config)} if precision.startswith("16") else {}
        if name in REFUSED_REAL:
            refused = faults_of(
                lambda precision=precision, words=words: composed(precision, config, stage=stage, **words)
            )
            assert REFUSED_REAL[name] in " ".join(refused)
            continue
        made = composed(precision, config, stage=stage, **words)
        accumulate = made.config.get("gradient_accumulation_steps", 1)
        micro = made.config.get("train_micro_batch_size_per_gpu", 1)
        whole = made.config.get("train_batch_size", micro * accumulate)
        world = max(whole // (micro * accumulate), 1) if "train_micro_batch_size_per_gpu" in made.config else 1
        final = add_trainer(made.config, clip_norm=None, accumulate=accumulate, world_size=world, micro_batch=None)
        final.pop("train_batch_size", None)  # this process is a world of one
        seen = parse(final)
        assert seen.zero_optimization_stage == stage
        assert seen.float16_config.enabled == precision.startswith("16")
        assert seen.gradient_clipping == (made.config.get("gradient_clipping", 0.0))
    assert config == before


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("precision", RESOLVED)
def test_a_real_config_under_any_plan_composes_or_is_refused(name: str, precision: str) -> None:
    for stage in (1, 2, 3):
        try:
            made = composed(precision, REAL[name]["config"], stage=stage, offload_optimizer=True)
            with_trainer(made.config)
        except PlanError:
            continue
        assert isinstance(made, Composed)


# --- anything at all ----------------------------------------------------------------------------------------------

keys = st.sampled_from([*TOP, *REFUSED, *{key for table in BLOCKS.values() for key in table}, "", "_x"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "fp16", "bf16", "cpu", "1", ""]),
    st.just(10**400),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)


@settings(deadline=None)
@given(
    user=st.dictionaries(keys, anything, max_size=5),
    precision=st.sampled_from(RESOLVED),
    stage=st.integers(0, 3),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example(user={"fp16": {"initial_scale_power": 10**400}}, precision="16-mixed", stage=1, flags=(False, False, True))
@example(user={"gradient_accumulation_steps": math.inf}, precision="32-true", stage=1, flags=(False, False, True))
def test_any_json_composes_or_is_refused_and_stays_as_it_was(
    user: dict[str, Any], precision: str, stage: int, flags: tuple[bool, bool, bool]
) -> None:
    before = repr(user)
    optimizer, parameters, supported = flags
    for call in (
        lambda: composed(
            precision,
            user,
            stage=stage,
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            fp16_supported=supported,
        ),
        lambda: with_trainer(user, clip_norm=1.0, micro_batch=2),
    ):
        try:
            call()
        except PlanError:  # noqa: PERF203 - either is right, anything else is not
            continue
    assert repr(user) == before


def test_none_of_this_needs_torch() -> None:
    code = (
        "import sys, lightning_mp.deepspeed_config as d, lightning_mp.policy as p;"
        "d.add_trainer(d.compose(p.PrecisionPolicy(precision='16-mixed'), {'fp16': {}}, stage=2).config,"
        " clip_norm=None, accumulate=1, world_size=1, micro_batch=None);"
        "print([name for name in ('torch', 'lightning', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
