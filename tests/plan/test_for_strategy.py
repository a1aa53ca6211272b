"""Which strategies a plan runs on, as a table; the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_mp import MixedPrecisionPlan, PlanError
from support.models import Regression
from support.running import trainer


class OwnFSDP(FSDPStrategy):
    """A user's subclass."""


class OwnDDP(DDPStrategy):
    """A user's subclass."""


def _faults(kind: Any, options: dict[str, Any], precision: str = "bf16-mixed", **fields: Any) -> tuple[Any, ...]:
    """What a plan says of the strategy, in a run on two processes."""
    module, plan = Regression(), MixedPrecisionPlan(precision, **fields)
    strategy = kind(cluster_environment=LightningEnvironment(), **options)
    module.trainer = trainer(plugins=[plan], strategy=strategy, devices=2)
    try:
        plan.convert_module(module)
    except PlanError as error:
        return error.faults
    return ()


STOCK = {
    "a subclass of FSDP": (OwnFSDP, {}, "mp_fsdp1"),
    "DeepSpeed": (DeepSpeedStrategy, {}, "mp_deepspeed_zero2"),
    "ZeRO-1": (DeepSpeedStrategy, {"stage": 1}, "mp_deepspeed_zero1"),
    "ZeRO-3": (DeepSpeedStrategy, {"stage": 3}, "mp_deepspeed_zero3"),
    "ZeRO-2 with offload": (DeepSpeedStrategy, {"stage": 2, "offload_optimizer": True}, "mp_deepspeed_zero2_offload"),
    "a JSON": (DeepSpeedStrategy, {"config": {"zero_optimization": {"stage": 3}}}, "mp_deepspeed_zero3"),
}


@pytest.mark.parametrize(("kind", "options", "instead"), STOCK.values(), ids=STOCK)
def test_a_stock_sharded_strategy_is_refused_with_the_name_of_the_one_that_does_it(
    kind: Any, options: dict[str, Any], instead: str
) -> None:
    (fault,) = _faults(kind, options)
    assert fault.problem == f"strategy {kind.__name__}"
    assert f"strategy={instead!r}" in fault.fix
    assert instead in StrategyRegistry.available_strategies()


HOOKS: dict[str, Any] = {
    "none": {},
    "options": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True},
    "allreduce": {"ddp_comm_hook": default_hooks.allreduce_hook},
    "fp16 compression": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "bf16 compression": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
    "compression around PowerSGD": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "PowerSGD": {"ddp_comm_hook": powerSGD_hook.powerSGD_hook},
}


@pytest.mark.parametrize(
    ("hook", "precision", "fields", "refused"),
    [
        ("none", "bf16-mixed", {}, False),
        ("options", "bf16-mixed", {}, False),
        ("allreduce", "32-true", {}, False),
        ("allreduce", "bf16-mixed", {}, False),
        ("allreduce", "16-mixed", {}, False),
        ("allreduce", "bf16-mixed", {"pins": {"LayerNorm": "fp32"}}, False),
        ("PowerSGD", "16-mixed", {}, False),
        # the hook would have to sum in another dtype than the gradients'
        ("allreduce", "bf16-true", {}, True),
        ("allreduce", "16-true", {}, True),
        ("allreduce", "bf16-mixed", {"reduce_dtype": "bf16"}, True),
        ("allreduce", "bf16-mixed", {"pins": {"LayerNorm": "bf16"}}, True),
        # gradients that are stored as they are summed need no hook of ours
        ("allreduce", "bf16-true", {"reduce_dtype": "bf16"}, False),
        # two would decide the dtype
        ("fp16 compression", "32-true", {}, True),
        ("bf16 compression", "bf16-mixed", {}, True),
        ("compression around PowerSGD", "32-true", {}, True),
    ],
)
def test_communication_hooks(hook: str, precision: str, fields: dict[str, Any], refused: bool) -> None:
    found = _faults(DDPStrategy, HOOKS[hook], precision, **fields)
    assert len(found) == refused
    for fault in found:
        assert HOOKS[hook]["ddp_comm_hook"].__name__ in fault.problem
        assert "remove the hook" in fault.fix
