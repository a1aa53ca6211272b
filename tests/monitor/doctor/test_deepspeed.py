"""A DeepSpeed JSON against plan and Trainer: both values, and what the run would do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed")

from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.monitor.doctor import doctor
from lightning_mp.monitor.findings import Finding
from support.doctor import CPU, net

NAME = "deepspeed_contradicts_trainer"


def _found(plan: Any, strategy: Any, trainer: Any = None) -> list[Finding]:
    findings = doctor(net(), plan, strategy, trainer, device=CPU)
    return [finding for finding in findings if finding.name == NAME]


def _ours(config: Any, plan: MixedPrecisionPlan | None = None) -> Any:
    return make_strategy("deepspeed_zero2", plan or MixedPrecisionPlan("bf16-mixed"), config=config)


@pytest.mark.parametrize(
    ("config", "trainer", "both"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, ("steps=4", "accumulate_grad_batches=2")),
        ({"gradient_accumulation_steps": 4}, {"devices": 2}, ("steps=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ("clipping=1.0", "gradient_clip_val=0.5")),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            {"devices": 8, "accumulate_grad_batches": 4},
            ("train_batch_size=64", "= 128"),
        ),
    ],
)
def test_json_and_trainer_disagree(config: Any, trainer: Any, both: tuple[str, str]) -> None:
    (finding,) = _found(MixedPrecisionPlan("bf16-mixed"), _ours(config), trainer)
    assert finding.severity == "error"
    assert all(value in finding.what for value in both)
    assert finding.where == next(iter(config))


def test_json_and_plan_disagree() -> None:
    findings = _found(MixedPrecisionPlan("bf16-mixed"), {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert [finding.where for finding in findings] == ["fp16.enabled"]
    assert "precision='bf16-mixed' in the plan" in findings[0].what


def test_every_contradiction_is_a_finding() -> None:
    config = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    assert len(_found(MixedPrecisionPlan("16-mixed"), config, trainer)) == 3


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, {"accumulate_grad_batches": 4}),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 1.0}),
        ({"gradient_clipping": 1.0}, {"accumulate_grad_batches": 2}),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": 4}, None),
        ({}, {"accumulate_grad_batches": 4}),
    ],
)
def test_what_agrees_or_cannot_be_known_is_healthy(config: Any, trainer: Any) -> None:
    assert _found(MixedPrecisionPlan("bf16-mixed"), _ours(config), trainer) == []


def test_lightnings_own_strategy_refuses_the_accumulation_and_lets_the_json_clip() -> None:
    strategy = DeepSpeedStrategy(config={"gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
    findings = _found("bf16-mixed", strategy, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5})
    assert [(finding.severity, finding.where) for finding in findings] == [
        ("error", "gradient_accumulation_steps"),
        ("warning", "gradient_clipping"),
    ]


def test_there_it_may_not_stand_in_the_json_at_all() -> None:
    strategy = DeepSpeedStrategy(config={"gradient_accumulation_steps": 4})
    (finding,) = _found("bf16-mixed", strategy, {"accumulate_grad_batches": 4})
    assert finding.severity == "error"
    assert "takes the Trainer's alone" in finding.fix


@pytest.mark.parametrize("strategy", [None, "auto", "ddp", "mp_deepspeed_zero2", DeepSpeedStrategy(stage=2)])
def test_without_a_json_there_is_nothing_to_contradict(strategy: Any) -> None:
    assert _found("bf16-mixed", strategy, {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}) == []


HALF = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("plan", "severity"),
    [(MixedPrecisionPlan("bf16-mixed"), "error"), ("bf16-mixed", "error"), ("32-true", "warning")],
    ids=str,
)
@pytest.mark.parametrize("key", [None, "plugins", "precision"])
def test_another_precision_in_the_json_of_lightnings_own_strategy(plan: Any, severity: str, key: str | None) -> None:
    """It refuses a plan; of its own precisions it sets the block beside the other one, or leaves that alone."""
    if (key == "plugins") == isinstance(plan, str) and key is not None:
        return
    findings = _found(plan if key is None else None, DeepSpeedStrategy(config=HALF), key and {key: plan})
    assert [(finding.severity, finding.where) for finding in findings] == [(severity, "fp16.enabled")]
    assert f"precision={getattr(plan, 'precision', plan)!r}" in findings[0].what


@pytest.mark.parametrize(
    ("plan", "config"),
    [
        (MixedPrecisionPlan("16-mixed"), HALF),
        (MixedPrecisionPlan("bf16-mixed"), {"bf16": {"enabled": True}, "fp16": {"enabled": False}}),
        ("16-mixed", HALF),
        ("bf16-mixed", {"bf16": {"enabled": "auto"}}),
        (MixedPrecisionPlan("bf16-mixed"), {}),
    ],
    ids=str,
)
def test_and_the_same_precision_is_no_contradiction(plan: Any, config: Any) -> None:
    assert _found(plan, DeepSpeedStrategy(config=config or None)) == []
