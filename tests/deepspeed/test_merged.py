"""A user's own DeepSpeed JSON merged with the plan's and the Trainer's, and every contradiction between them."""

import json
import math
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_mp.deepspeed.merge import completed
from lightning_mp.deepspeed.read import BLOCKS
from lightning_mp.errors import PlanError
from lightning_mp.policy.pieces import LossScaling
from support.deepspeed_json import (
    OFF,
    RESOLVED,
    WHOLE_FP16,
    anything,
    composed,
    faults_of,
    nested,
    parse,
    policy,
    the_fault,
    with_trainer,
)
from support.scales import scalings


def test_the_whole_config_of_a_plan_alone() -> None:
    assert composed("bf16-mixed", stage=3) == {
        "zero_optimization": {"stage": 3},
        "fp16": OFF,
        "bf16": OFF,
        "torch_autocast": OFF,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_the_rest_of_a_users_json_is_kept_and_the_users_dict_is_neither_changed_nor_shared() -> None:
    user = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "compute_grad_norm": False},
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "data_types": {"keep_in_fp32_modules": ["gate"]},
        "steps_per_print": 2000,
        "comms_config": {"verbose": False},
        "amp": OFF,
    }
    before = deepcopy(user)
    made = composed("bf16-mixed", user)
    kept = set(user) - {"data_types", "amp"}
    assert {key: made[key] for key in kept} == {key: user[key] for key in kept}
    assert made["data_types"] == {"keep_in_fp32_modules": ["gate"], "grad_accum_dtype": "fp32"}
    made["optimizer"]["params"]["betas"].append(0)
    with_trainer(made)["optimizer"]["params"]["betas"].append(1)
    assert user == before


#: what agrees with the plan: the plan does it, and the engine is not told
AGREES: list[tuple[str, dict[str, Any]]] = [
    ("bf16-mixed", {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": False}),
    ("bf16-mixed", {"bf16.enabled": False, "fp16.enabled": False, "bf16.check_grad_overflow": False}),
    ("bf16-mixed", {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.bfloat16"}),
    ("16-mixed", {"fp16": WHOLE_FP16 | {"auto_cast": True}}),
    ("16-true", {"fp16": WHOLE_FP16 | {"loss_scale_window": 1000.0, "min_loss_scale": 1.0}}),
    ("16-mixed", {"communication_data_type": "FP32", "data_types.grad_accum_dtype": "float32"}),
    ("32-true", {"zero_optimization.zero_quantized_gradients": False, "gradient_allreduce_op": "mean"}),
    ("32-true", {"amp.enabled": False, "sparse_gradients": False, "zero_optimization.cpu_offload": True}),
]


@pytest.mark.parametrize(("precision", "user"), AGREES, ids=[f"{row[0]} {json.dumps(row[1])}" for row in AGREES])
def test_what_agrees_with_the_plan_is_the_plans_to_do(precision: str, user: dict[str, Any]) -> None:
    made = composed(precision, nested(user))
    assert made["bf16"] == made["torch_autocast"] == OFF
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"
    parse(with_trainer(made))


@pytest.mark.parametrize("word", ["auto", None])
@pytest.mark.parametrize("precision", RESOLVED)
def test_auto_and_null_count_as_not_given_wherever_they_stand(precision: str, word: str | None) -> None:
    every: dict[str, Any] = {name: dict.fromkeys(table, "auto") for name, table in BLOCKS.items() if name}
    every["zero_optimization"] = {"offload_optimizer": {"pin_memory": "auto"}}
    user = {key: every.get(key, "auto") for key in BLOCKS[""]} | {"_comment": 1}
    user = json.loads(json.dumps(user).replace('"auto"', json.dumps(word)))
    made, plain = composed(precision, user), composed(precision)
    assert made["zero_optimization"] == {"offload_optimizer": {}, "stage": 2}
    assert made | {"zero_optimization": 0} == plain | {"zero_optimization": 0}


OFFLOAD = "zero_optimization.offload_optimizer"
#: precision, the user's JSON, what the message shows of the plan, and further fields of the plan or of the strategy
CONTRADICTIONS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("16-mixed", {"bf16.enabled": True}, "precision='16-mixed'", {}),
    ("bf16-mixed", {"fp16.enabled": True}, "precision='bf16-mixed'", {}),
    ("bf16-mixed", {"torch_autocast.enabled": True, "torch_autocast.dtype": None}, "precision='bf16-mixed'", {}),
    ("16-mixed", {"fp16.initial_scale_power": 32}, "init_scale=65536.0", {}),
    ("16-mixed", {"fp16.initial_scale_power": 9}, "init_scale=3000.0", {"loss_scaling": LossScaling(init_scale=3e3)}),
    ("16-mixed", {"fp16.loss_scale": 128}, "loss_scaling=LossScaling(", {}),
    ("16-mixed", {"fp16.loss_scale_window": 500}, "loss_scaling.growth_interval=1000", {}),
    ("16-mixed", {"fp16.min_loss_scale": 1}, "min_scale=0.0", {"loss_scaling": LossScaling.torch()}),
    ("bf16-mixed", {"communication_data_type": "fp32"}, "reduce_dtype='bf16'", {"reduce_dtype": "bf16"}),
    ("bf16-mixed", {"seq_parallel_communication_data_type": "bf16"}, "reduce_dtype='fp32'", {}),
    ("bf16-mixed", {"data_types.param_dtype": "bf16"}, "precision='bf16-mixed'", {}),
    ("16-mixed", {"zero_optimization.stage": 3}, "stage=2", {"stage": 2}),
    ("16-mixed", {f"{OFFLOAD}.device": "none"}, "offload_optimizer=True", {"offload_optimizer": True}),
]


@pytest.mark.parametrize(
    ("precision", "user", "planned", "words"), CONTRADICTIONS, ids=[str(r) for r in CONTRADICTIONS]
)
def test_a_contradiction_is_shown(precision: str, user: dict[str, Any], planned: str, words: dict[str, Any]) -> None:
    fault = the_fault(lambda: composed(precision, nested(user), **words))
    left, right = fault.problem.split(" in the JSON and ")
    first, value = next(iter(user.items()))
    assert left.startswith(f"{first}={value!r}")
    assert planned in right
    assert right.endswith((" in the plan", " in the strategy"))


@pytest.mark.parametrize("word", [True, "auto"])
def test_a_plan_without_a_rule_of_its_own_takes_the_jsons(word: Any) -> None:
    """As transformers' documentation writes it; nobody wrote growth_interval=2000."""
    user = {"fp16": {**WHOLE_FP16, "enabled": word, "loss_scale_window": 500}}
    made = composed("16-mixed", user, loss_scaling=None)
    assert made["fp16"] == WHOLE_FP16 | {"loss_scale_window": 500}
    assert completed(policy("16-mixed"), user).loss_scaling == LossScaling.deepspeed(loss_scale_window=500)
    kept = policy("16-mixed", loss_scaling=LossScaling(growth_interval=7))
    assert completed(kept, user) == kept
    for silent in (None, {}, {"fp16": {"enabled": word, "hysteresis": "auto"}}, {"fp16": {"hysteresis": -1}}):
        assert completed(policy("16-mixed"), silent) == policy("16-mixed")


#: what is refused whatever the precision, and a word of what to do
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16.fp16_master_weights_and_grads": True}, "fp16.fp16_master_weights_and_grads=True", "remove"),
    ({"torch_autocast.lower_precision_safe_modules": [""]}, "lower_precision_safe_modules=['']", "remove"),
    *[
        ({f"zero_optimization.{key}": value}, f"zero_optimization.{key}={value!r}", f"remove zero_optimization.{key}")
        for key, value in {
            "zero_quantized_gradients": True,
            "zero_quantized_weights": True,
            "zero_quantized_nontrainable_weights": True,
            "zenflow": {"topk_ratio": 0.05},
        }.items()
    ],
    ({"weight_quantization.quantized_initialization": {"num_bits": 8}}, "weight_quantization=", "remove"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum'", "correct it"),
    ({"amp.opt_level": "O1"}, "amp={'opt_level': 'O1'}", "remove amp"),
    ({"sparse_gradients": True}, "sparse_gradients=True", "remove"),
    ({"fp16.inital_scale_power": 16}, "unknown key fp16.inital_scale_power", "did you mean 'initial_scale_power'?"),
    ({"bfloat16.enabled": True}, "unknown key bfloat16", "did you mean 'bf16'?"),
    ({"zero_optimisation": {}}, "unknown key zero_optimisation", "did you mean 'zero_optimization'?"),
    ({"fp16": True}, "fp16=True", "correct it"),
    ({"zero_optimization": 3}, "zero_optimization=3", "correct it"),
    ({"zero_optimization.offload_param": "cpu"}, "zero_optimization.offload_param='cpu'", "correct it"),
    ({"fp16.enabled": "true"}, "fp16.enabled='true'", "correct it"),
    *[({"fp16.loss_scale": value}, "fp16.loss_scale=", "correct it") for value in (-1, True, "0", math.nan)],
    ({"torch_autocast.dtype": "fp64"}, "torch_autocast.dtype='fp64'", "correct it"),
    ({"communication_data_type": "float32"}, "communication_data_type='float32'", "correct it"),
    ({"train_batch_size": 0}, "train_batch_size=0", "correct it"),
]


@pytest.mark.parametrize(("user", "given", "fix"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_a_json_may_not_hold_is_one_fault(user: dict[str, Any], given: str, fix: str) -> None:
    for precision in RESOLVED:
        fault = the_fault(lambda precision=precision: composed(precision, nested(user)))
        assert given in fault.problem
        assert fix in fault.fix


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", RESOLVED)
def test_deepspeed_reads_what_is_written(precision: str, stage: int) -> None:
    for optimizer, parameters, supported in ((True, stage == 3, True), (False, False, False)):
        flags = {"offload_optimizer": optimizer, "offload_parameters": parameters, "fp16_supported": supported}
        written = with_trainer(composed(precision, stage=stage, **flags), clip_norm=0.5, accumulate=4)
        seen = parse(json.loads(json.dumps(written)))
        assert seen.zero_optimization_stage == stage
        assert (seen.zero_config.offload_optimizer is not None) == optimizer
        assert (seen.zero_config.offload_param is not None) == parameters
        assert seen.float16_config.enabled == (precision.startswith("16") and supported)
        assert not seen.bfloat16_config.enabled
        assert not seen.torch_autocast_enabled
        assert (str(seen.communication_data_type), seen.grad_accum_dtype) == ("torch.float32", "fp32")
        assert (seen.gradient_clipping, seen.gradient_accumulation_steps) == (0.5, 4)
        assert (seen.train_micro_batch_size_per_gpu, seen.train_batch_size) == (1, 4)


@given(rule=scalings(), precision=st.sampled_from(["16-mixed", "16-true"]))
def test_deepspeed_reads_any_rule_as_far_as_it_can_be_said(rule: LossScaling, precision: str) -> None:
    read_fp16 = pytest.importorskip("deepspeed.runtime.precision_config").get_float16_config
    made = composed(precision, loss_scaling=rule)
    block, seen = made["fp16"], read_fp16(made)
    assert seen.loss_scale == (0 if rule.dynamic else rule.init_scale)
    if not rule.dynamic:
        return
    assert (seen.loss_scale_window, seen.hysteresis) == (rule.growth_interval, rule.hysteresis)
    assert seen.consecutive_hysteresis == rule.consecutive_hysteresis
    assert "initial_scale_power" not in block or seen.initial_dynamic_scale() == rule.init_scale
    assert "min_loss_scale" not in block or seen.min_loss_scale == rule.min_scale


def test_a_users_own_offloading_is_kept_and_completed() -> None:
    own = {"device": "nvme", "nvme_path": "/fast", "pin_memory": True}
    user: dict[str, Any] = {"zero_optimization": {"offload_optimizer": own, "offload_param": own}}
    for flag in (True, False):
        zero = composed("16-mixed", user, stage=3, offload_optimizer=flag, offload_parameters=flag)
        assert zero["zero_optimization"] == {"stage": 3, "offload_optimizer": own, "offload_param": own}
    user = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
    zero = composed("16-mixed", user, offload_optimizer=True)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    user = {"zero_optimization": {"cpu_offload": True, "cpu_offload_param": True}}
    config = composed("16-mixed", user, stage=3, offload_optimizer=True)
    cpu = {"device": "cpu"}
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    parse(with_trainer(config))


def test_a_stage_that_does_not_shard_what_is_asked_for_is_refused() -> None:
    assert "stage 3" in the_fault(lambda: composed(stage=1, offload_parameters=True)).fix
    user = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    assert "stage 3" in the_fault(lambda: composed("16-mixed", user, stage=2)).fix
    fault = the_fault(lambda: composed(stage=0))
    assert (fault.problem, fault.fix[:12]) == ("stage=0", "choose 'ddp'")


def test_the_trainer_fills_in_what_the_json_leaves_out() -> None:
    assert with_trainer({}, clip_norm=0.5, accumulate=4, world_size=8) == {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert with_trainer({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0
    config = with_trainer({"train_batch_size": 256}, accumulate=4, world_size=8)
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (8, 256)


def test_what_the_trainer_says_otherwise_is_one_fault_each_with_both_values() -> None:
    user = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 100,
    }
    found = faults_of(lambda: with_trainer(user, clip_norm=0.5, accumulate=2))
    said = "gradient_clip_val=0.5", "accumulate_grad_batches=2", "1 devices = 8"
    for fault, words in zip(found, said, strict=True):
        assert " in the JSON and " in fault.problem
        assert words in fault.problem


@given(
    user=anything(),
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
    names = ("offload_optimizer", "offload_parameters", "fp16_supported")
    with suppress(PlanError):  # either is right, anything else is not
        with_trainer(composed(precision, user, stage=stage, **dict(zip(names, flags, strict=True))), clip_norm=1.0)
    assert repr(user) == before
