"""Real DeepSpeed configs, and anything at all."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_mp.deepspeed_config.merge import add_trainer
from lightning_mp.deepspeed_config.read import read_policy
from lightning_mp.errors import PlanError
from lightning_mp.policy.loss_scaling import LossScaling
from support.deepspeed_json import REAL, RESOLVED, WHOLE_FP16, anything, composed, faults_of, with_trainer

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
            assert REFUSED_REAL[name] in " ".join(map(str, refused))
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


def run_alone(code: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=env)
    return done.stdout.strip()


def test_none_of_this_needs_torch() -> None:
    code = (
        "import sys, lightning_mp.deepspeed_config.merge as d, lightning_mp.policy as p;"
        "d.add_trainer(d.compose(p.PrecisionPolicy(precision='16-mixed'), {'fp16': {}}, stage=2).config,"
        " clip_norm=None, accumulate=1, world_size=1, micro_batch=None);"
        "print([name for name in ('torch', 'lightning', 'deepspeed') if name in sys.modules])"
    )
    assert run_alone(code) == "[]"


def test_without_deepspeed_every_config_reads_as_the_same_policy_and_its_blocks_are_left() -> None:
    code = (
        "import sys; sys.modules['deepspeed'] = None;"
        "from support.deepspeed_json import REAL; from lightning_mp.errors import PlanError;"
        "from lightning_mp.deepspeed_config.read import read_policy\n"
        "for name, entry in REAL.items():\n"
        "    try:\n"
        "        policy, notes = read_policy(entry['config'])\n"
        "        print(name, policy, sorted(notes.refused))\n"
        "    except PlanError as error:\n"
        "        print(name, error.faults)\n"
    )
    alone = dict(line.split(" ", 1) for line in run_alone(code).splitlines())
    for name, entry in REAL.items():
        try:
            policy, notes = read_policy(entry["config"])
        except PlanError as error:
            expected = str(error.faults)
        else:
            ours = [key for key in sorted(notes.refused) if not key.startswith(("zero_optimization.", "compile."))]
            expected = f"{policy} {ours}"
        assert alone[name] == expected
