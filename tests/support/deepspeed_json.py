"""Short words for tests of the DeepSpeed JSON: compose it, and count its faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.deepspeed_config.merge import Composed, add_trainer, compose
from lightning_mp.errors import Fault, PlanError
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling

DATA = Path(__file__).parent / "data" / "deepspeed_configs.json"
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


#: the keys of it that say how the scale moves
RULE = {key: value for key, value in WHOLE_FP16.items() if key not in ("enabled", "auto_cast")}


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


def faults_of(call: Callable[[], object]) -> list[Fault]:
    with pytest.raises(PlanError) as error:
        call()
    assert str(error.value).startswith("DeepSpeed config: ")
    return list(error.value.faults)


def the_fault(call: Callable[[], object]) -> Fault:
    (fault,) = faults_of(call)
    return fault


def with_trainer(config: Mapping[str, Any], **words: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"clip_norm": None, "accumulate": 1, "world_size": 1, "micro_batch": None}
    return add_trainer(config, **(defaults | words))
