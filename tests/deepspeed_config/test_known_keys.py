"""Keys of the DeepSpeed JSON that are refused, unknown or ill typed; the installed DeepSpeed judges the lists."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_mp.deepspeed_config.schema import BLOCKS, REFUSED
from support.deepspeed_json import RESOLVED, composed, nested, the_fault, with_trainer

#: what is refused whatever the precision, and a word of the reason
REFUSED_BY_NAME: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16.fp16_master_weights_and_grads": True}, "fp16.fp16_master_weights_and_grads=True", "what is stored"),
    ({"bf16.bf16_master_weights_and_grads": True}, "bf16.bf16_master_weights_and_grads=True", "what is stored"),
    ({"bf16.bf16_optimizer_states": True}, "bf16.bf16_optimizer_states=True", "what is stored"),
    (
        {"torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"]},
        "torch_autocast.lower_precision_safe_modules=['torch.nn.Linear']",
        "pins=",
    ),
    ({"torch_autocast.lower_precision_safe_modules": []}, "lower_precision_safe_modules=[]", "pins="),
    ({"amp.enabled": True}, "amp={'enabled': True}", "precision comes from the plan"),
    ({"amp.opt_level": "O1"}, "amp={'opt_level': 'O1'}", "precision comes from the plan"),
    ({"fp8.enabled": True}, "fp8={'enabled': True}", "precision comes from the plan"),
    ({"elasticity.enabled": True}, "elasticity={'enabled': True}", "removed"),
    ({"sparse_gradients": True}, "sparse_gradients=True", "removed"),
]


@pytest.mark.parametrize("precision", RESOLVED)
@pytest.mark.parametrize(("user", "given", "reason"), REFUSED_BY_NAME, ids=[row[1] for row in REFUSED_BY_NAME])
def test_what_chooses_formats_behind_the_plan_is_refused_with_its_reason(
    precision: str, user: dict[str, Any], given: str, reason: str
) -> None:
    fault = the_fault(lambda: composed(precision, nested(user)))
    assert given in fault.given
    assert reason in fault.allowed
    assert fault.fix.startswith("remove ")


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16.inital_scale_power": 16}, "fp16.inital_scale_power", "did you mean 'initial_scale_power'?"),
    ({"bf16.enable": True}, "bf16.enable", "did you mean 'enabled'?"),
    ({"bfloat16.enable": True}, "bfloat16.enable", "did you mean 'enabled'?"),
    ({"torch_autocast.dtpye": "bf16"}, "torch_autocast.dtpye", "did you mean 'dtype'?"),
    ({"zero_optimization.stag": 2}, "zero_optimization.stag", "did you mean 'stage'?"),
    (
        {"zero_optimization.offload_optimizer.devise": "cpu"},
        "zero_optimization.offload_optimizer.devise",
        "remove it",
    ),
    ({"compile.deepcompil": True}, "compile.deepcompil", "did you mean 'deepcompile'?"),
    ({"data_types.grad_acum_dtype": "fp32"}, "data_types.grad_acum_dtype", "did you mean 'grad_accum_dtype'?"),
    ({"zero_optimisation": {}}, "zero_optimisation", "'zero_optimization'"),
    ({"stage": 2}, "stage", "move it into zero_optimization"),
    ({"fp16.qqq": 1}, "fp16.qqq", "remove it"),
    ({7: 1}, "7", "remove it"),
]


@pytest.mark.parametrize(("user", "key", "fix"), UNKNOWN, ids=[row[1] for row in UNKNOWN])
def test_an_unknown_key_is_refused_with_the_nearest_known_one(user: dict[str, Any], key: str, fix: str) -> None:
    for precision in RESOLVED:
        fault = the_fault(lambda precision=precision: composed(precision, nested(user)))
        assert fault.given == f"unknown key {key}"
        assert fix in fault.fix


def test_quotes_are_blamed_only_where_they_are_the_fault() -> None:
    quoted = the_fault(lambda: composed("16-mixed", {"fp16": {"hysteresis": "2"}}))
    assert quoted.fix == "write it without quotes"
    device = the_fault(lambda: composed("16-mixed", {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}))
    assert device.fix == "correct it"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({name: value}, f"{name}={value!r}", "an object")
        for name in ("fp16", "bf16", "data_types")
        for value in (True, 3)
    ],
    ({"zero_optimization": True}, "zero_optimization=True", "an object"),
    ({"zero_optimization.stage": "2"}, "zero_optimization.stage='2'", "0, 1, 2, 3"),
    ({"zero_optimization.stage": True}, "zero_optimization.stage=True", "0, 1, 2, 3"),
    ({"zero_optimization.stage": 2.5}, "zero_optimization.stage=2.5", "0, 1, 2, 3"),
    ({"zero_optimization.overlap_comm": "perhaps"}, "zero_optimization.overlap_comm='perhaps'", "a valid boolean"),
    ({"zero_optimization.reduce_bucket_size": "5e8"}, "reduce_bucket_size='5e8'", "a valid integer"),
    ({"zero_optimization.reduce_bucket_size": 0}, "reduce_bucket_size=0", "greater than 0"),
    ({"zero_optimization.offload_param": "cpu"}, "zero_optimization.offload_param='cpu'", "an object"),
    ({"zero_optimization.offload_param.device": "gpu"}, "device='gpu'", "'none', 'cpu' or 'nvme'"),
    ({"fp16.enabled": "true"}, "fp16.enabled='true'", "true, false"),
    ({"fp16.enabled": 1}, "fp16.enabled=1", "true, false"),
    *[({"fp16.loss_scale": value}, "fp16.loss_scale=", "number >= 0") for value in (-1, True, "0", math.nan)],
    *[({"fp16.loss_scale_window": value}, "loss_scale_window=", "number >= 1") for value in (0, 1.5, "9", math.inf)],
    ({"fp16.initial_scale_power": 1.5}, "fp16.initial_scale_power=1.5", "a whole number"),
    ({"torch_autocast.dtype": "fp64"}, "torch_autocast.dtype='fp64'", "fp32, bf16, fp16"),
    ({"communication_data_type": "float32"}, "communication_data_type='float32'", "fp32, bf16, fp16"),
    ({"data_types.param_dtype": 16}, "data_types.param_dtype=16", "fp32, bf16, fp16"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping='1.0'", "a finite number >= 0"),
    ({"train_batch_size": 0}, "train_batch_size=0", "a whole number >= 1"),
    ({"optimizer": "AdamW"}, "optimizer='AdamW'", "an object"),
]


@pytest.mark.parametrize(("user", "given", "allowed"), WRONG, ids=[json.dumps(row[0]) for row in WRONG])
def test_a_wrong_type_is_a_fault_and_only_one(user: dict[str, Any], given: str, allowed: str) -> None:
    for precision in RESOLVED:
        fault = the_fault(lambda precision=precision: composed(precision, nested(user)))
        assert given in fault.given
        assert allowed in fault.allowed


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
    assert {key for key in written.asked if key not in BLOCKS[""] and key not in REFUSED} <= {"curriculum_learning"}
    assert {"train_batch_size", "fp16", "zero_optimization", "compile", "wandb", "timers"} <= written.asked


def test_the_blocks_keys_are_deepspeeds_own() -> None:
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    for name, model in {"fp16": precision.DeepSpeedFP16Config, "bf16": precision.DeepSpeedBF16Config}.items():
        assert set(BLOCKS[name]) == set(model.model_fields), name


def test_the_keys_deepspeed_removed_are_refused_by_name() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    assert set(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())) <= set(REFUSED)
