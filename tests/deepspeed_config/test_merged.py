"""A user's own DeepSpeed JSON merged with the plan's, and every contradiction between the two."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from lightning_mp.deepspeed_config.merge import completed
from lightning_mp.deepspeed_config.schema import BLOCKS
from lightning_mp.policy.loss_scaling import LossScaling
from support.deepspeed_json import (
    OFF,
    RESOLVED,
    WHOLE_FP16,
    composed,
    faults_of,
    nested,
    policy,
    the_fault,
    with_trainer,
)


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


def test_what_only_the_strategys_stage_allows_is_kept() -> None:
    assert composed("bf16-mixed", {"zero_optimization": {"compute_grad_norm": False}}).config["zero_optimization"] == {
        "compute_grad_norm": False,
        "stage": 2,
    }


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
    ("bf16-mixed", {"bf16.enabled": True}, "bf16.enabled=True"),
    ("bf16-true", {"bf16.enabled": True}, "bf16.enabled=True"),
    ("bf16-mixed", {"bfloat16.enabled": True}, "bfloat16.enabled=True"),
    ("bf16-mixed", {"bf16.enabled": False, "fp16.enabled": False}, None),
    ("bf16-mixed", {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": False}, "bf16.enabled=True"),
    ("bf16-mixed", {"bf16.check_grad_overflow": False}, "bf16.check_grad_overflow=False"),
    (
        "bf16-mixed",
        {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.bfloat16"},
        "torch_autocast.enabled=True",
    ),
    ("16-mixed", {"torch_autocast.enabled": True, "torch_autocast.dtype": "half"}, "torch_autocast.enabled=True"),
    ("32-true", {"torch_autocast.enabled": False, "torch_autocast.dtype": "bfloat16"}, None),
    ("16-mixed", {"fp16": WHOLE_FP16}, None),
    ("16-true", {"fp16": WHOLE_FP16 | {"loss_scale_window": 1000.0, "min_loss_scale": 1.0}}, None),
    ("16-mixed", {"fp16.enabled": True, "fp16.fp16_master_weights_and_grads": False}, None),
    ("16-mixed", {"fp16.auto_cast": True}, "fp16.auto_cast=True"),
    ("32-true", {"fp16.enabled": False, "fp16.loss_scale": 0, "fp16.hysteresis": 4}, "fp16.hysteresis=4"),
    ("16-mixed", {"communication_data_type": "FP32"}, None),
    ("16-mixed", {"data_types.grad_accum_dtype": "float32"}, None),
    ("bf16-true", {"data_types.param_dtype": "bf16"}, "data_types.param_dtype='bf16'"),
    ("16-mixed", {"data_types.param_dtype": "fp32"}, "data_types.param_dtype='fp32'"),
    ("32-true", {"amp.enabled": False, "amp.opt_level": "O1"}, "amp="),
    ("32-true", {"sparse_gradients": False}, "sparse_gradients=False"),
    ("32-true", {"zero_optimization.cpu_offload": True}, "cpu_offload=True"),
]


@pytest.mark.parametrize(
    ("precision", "user", "note"), AGREES, ids=[f"{row[0]} {json.dumps(row[1])}" for row in AGREES]
)
def test_what_agrees_with_the_plan_is_taken_over_with_a_note_where_the_plan_does_it(
    precision: str, user: dict[str, Any], note: str | None, parse: Callable[..., Any]
) -> None:
    made = composed(precision, nested(user))
    assert len(made.notes) == (note is not None)
    assert note is None or note in made.notes[0]
    assert made.config["bf16"] == OFF
    assert made.config["torch_autocast"] == OFF
    assert "bfloat16" not in made.config
    assert made.config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made.config["communication_data_type"] == "fp32"
    parse(with_trainer(made.config))


def test_beside_a_static_scale_the_keys_of_the_dynamic_one_say_nothing() -> None:
    user = {"fp16": WHOLE_FP16 | {"loss_scale": 128, "loss_scale_window": 7, "min_loss_scale": 0.5}}
    made = composed("16-mixed", user, loss_scaling=LossScaling.static(128))
    assert made.config["fp16"]["loss_scale"] == 128
    assert "fp16.loss_scale_window=7" in made.notes[0]


@pytest.mark.parametrize("word", ["auto", None])
@pytest.mark.parametrize("precision", RESOLVED)
def test_auto_and_null_count_as_not_given_wherever_they_stand(precision: str, word: str | None) -> None:
    every: dict[str, Any] = {name: dict.fromkeys(table, "auto") for name, table in BLOCKS.items() if name}
    every["zero_optimization"] = {"offload_optimizer": {"pin_memory": "auto"}, "zenflow": {"topk_ratio": "auto"}}
    user = {key: every.get(key, "auto") for key in BLOCKS[""]} | {"_comment": 1, "aio": {"block_size": "auto"}}
    user = json.loads(json.dumps(user).replace('"auto"', json.dumps(word)))
    config = composed(precision, user).config
    plain = composed(precision).config
    assert config.pop("aio") == {}
    assert config["zero_optimization"] == {"offload_optimizer": {}, "zenflow": {}, "stage": 2}
    assert config | {"zero_optimization": 0} == plain | {"zero_optimization": 0}


AUTOCAST = [("16-mixed", "bfloat16"), ("bf16-mixed", "torch.float16"), ("bf16-true", "bfloat16"), ("32-true", "bf16")]
STATIC = {"loss_scaling": LossScaling.static(512.0)}

#: precision, the user's JSON, what the message shows of the plan, and further fields of the plan or of the strategy
CONTRADICTIONS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("16-mixed", {"bf16.enabled": True}, "precision='16-mixed'", {}),
    ("32-true", {"bf16.enabled": True}, "precision='32-true'", {}),
    ("16-true", {"bfloat16.enabled": True}, "precision='16-true'", {}),
    *[(mode, {"fp16.enabled": True}, f"precision={mode!r}", {}) for mode in ("32-true", "bf16-mixed", "bf16-true")],
    *[(mode, {"fp16.enabled": False}, f"precision={mode!r}", {}) for mode in ("16-mixed", "16-true")],
    *[
        (mode, {"torch_autocast.enabled": True, "torch_autocast.dtype": dtype}, f"precision={mode!r}", {})
        for mode, dtype in [*AUTOCAST, ("bf16-mixed", None)]
    ],
    ("16-mixed", {"fp16.initial_scale_power": 32}, "init_scale=65536.0", {}),
    ("16-mixed", {"fp16.initial_scale_power": 9999}, "init_scale=65536.0", {}),
    (
        "16-mixed",
        {"fp16.initial_scale_power": 16},
        "init_scale=3000.0",
        {"loss_scaling": LossScaling(init_scale=3000.0)},
    ),
    ("16-mixed", {"fp16.loss_scale": 128}, "fp16.loss_scale=0", {}),
    ("16-mixed", {"fp16.loss_scale": 0}, "fp16.loss_scale=512.0", STATIC),
    ("16-mixed", {"fp16.loss_scale": 128}, "fp16.loss_scale=512.0", STATIC),
    ("16-mixed", {"fp16.loss_scale_window": 500}, "growth_interval=1000", {}),
    ("16-true", {"fp16.hysteresis": 4}, "loss_scaling.hysteresis=2", {}),
    ("16-mixed", {"fp16.consecutive_hysteresis": True}, "loss_scaling.consecutive_hysteresis=False", {}),
    ("16-mixed", {"fp16.min_loss_scale": 128}, "min_scale=1", {}),
    ("16-mixed", {"fp16.min_loss_scale": 1}, "min_scale=0.0", {"loss_scaling": LossScaling.torch()}),
    ("16-mixed", {"communication_data_type": "fp16"}, "reduce_dtype='fp32'", {}),
    ("bf16-mixed", {"communication_data_type": "fp32"}, "reduce_dtype='bf16'", {"reduce_dtype": "bf16"}),
    ("bf16-true", {"data_types.grad_accum_dtype": "bf16"}, "'fp32'", {}),
    ("bf16-mixed", {"data_types.param_dtype": "bf16"}, "stored as 'fp32'", {}),
    ("16-true", {"data_types.param_dtype": "fp32"}, "stored as 'fp16'", {}),
    ("bf16-mixed", {"data_types.buffer_dtype": "fp16"}, "buffer_dtype=None", {}),
    ("bf16-mixed", {"data_types.buffer_dtype": "fp16"}, "buffer_dtype='fp32'", {"buffer_dtype": "fp32"}),
    ("16-mixed", {"zero_optimization.stage": 3}, "stage=2", {"stage": 2}),
    ("16-mixed", {"zero_optimization.stage": 0}, "stage=1", {"stage": 1}),
    (
        "16-mixed",
        {"zero_optimization.offload_optimizer.device": "none"},
        "offload_optimizer=True",
        {"offload_optimizer": True},
    ),
    (
        "16-mixed",
        {"zero_optimization.offload_param.device": "none"},
        "offload_parameters=True",
        {"offload_parameters": True, "stage": 3},
    ),
]


@pytest.mark.parametrize(
    ("precision", "user", "planned", "words"), CONTRADICTIONS, ids=[str(r) for r in CONTRADICTIONS]
)
def test_a_contradiction_shows_both_values(
    precision: str, user: dict[str, Any], planned: str, words: dict[str, Any]
) -> None:
    fault = the_fault(lambda: composed(precision, nested(user), **words))
    left, right = fault.given.split(" in the JSON and ")
    first, value = next(iter(user.items()))
    assert left.startswith(f"{first}={value!r}")
    assert all(repr(value) in left for value in user.values())
    assert planned in right
    assert right.endswith((" in the plan", " in the strategy"))
    assert fault.allowed == "the same in both"


@pytest.mark.parametrize("word", [True, "auto"])
def test_a_plan_without_a_rule_of_its_own_takes_the_jsons(word: Any) -> None:
    """As transformers' documentation writes it; nobody wrote growth_interval=2000."""
    user = {"fp16": {**WHOLE_FP16, "enabled": word, "loss_scale_window": 500}}
    made = composed("16-mixed", user, loss_scaling=None)
    assert made.config["fp16"] == WHOLE_FP16 | {"loss_scale_window": 500}
    assert completed(policy("16-mixed"), user).loss_scaling == LossScaling.deepspeed(loss_scale_window=500)
    kept = policy("16-mixed", loss_scaling=LossScaling(growth_interval=7))
    assert completed(kept, user) == kept
    for silent in (None, {}, {"fp16": {"enabled": word, "hysteresis": "auto"}}, {"fp16": {"hysteresis": -1}}):
        assert completed(policy("16-mixed"), silent) == policy("16-mixed")


def test_a_message_names_the_field_that_would_say_the_same() -> None:
    fault = the_fault(lambda: composed("16-mixed", {"fp16": {"initial_scale_power": 12}}))
    assert "fp16.initial_scale_power=12 (2**12) in the JSON" in fault.given
    assert fault.fix == "remove fp16.initial_scale_power from the JSON, or set LossScaling(init_scale=2**12)"
    fault = the_fault(lambda: composed("16-mixed", {"fp16": {"loss_scale": 128}}))
    assert fault.fix.endswith("or set loss_scaling=LossScaling.static(128)")


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
