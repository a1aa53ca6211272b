"""The DeepSpeed JSON that a plan writes; the installed DeepSpeed is the judge of what it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.deepspeed_config.merge import compose
from lightning_mp.errors import PlanError
from lightning_mp.policy.loss_scaling import LossScaling
from support.deepspeed_json import OFF, RESOLVED, composed, policy, the_fault, with_trainer
from support.scales import scalings


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


def test_what_json_has_no_key_for_is_noted() -> None:
    (note,) = composed(loss_scaling=LossScaling(growth_factor=4.0)).notes
    for words in ("growth_factor=4.0", "growth_delay=0", "max_scale=None", "at_min='hold'"):
        assert words in note
    assert "backoff_factor" not in note


def test_an_unresolved_precision_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="auto") as error:
        compose(policy("auto"), stage=2)
    assert not isinstance(error.value, PlanError)


def test_what_was_written_can_be_merged_again() -> None:
    for precision in RESOLVED:
        first = composed(precision, stage=3, offload_optimizer=True)
        assert composed(precision, first.config, stage=3, offload_optimizer=True) == first


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


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_parameters_need_stage_3(stage: int) -> None:
    fault = the_fault(lambda: composed(stage=stage, offload_parameters=True))
    assert fault.given == f"offload_parameters=True with stage={stage}"
    assert fault.allowed == "offloaded parameters at stage 3"
    user = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    fault = the_fault(lambda: composed("16-mixed", user, stage=stage))
    assert fault.given == f"zero_optimization.offload_param={{'device': 'cpu'}} with stage={stage}"


@pytest.mark.parametrize("stage", [0, 4, -1])
def test_a_stage_that_does_not_shard_is_refused(stage: int) -> None:
    fault = the_fault(lambda: composed(stage=stage))
    assert (fault.given, fault.allowed, fault.fix[:12]) == (f"stage={stage}", "1, 2, 3", "choose 'ddp'")
