"""The DeepSpeed JSON of a plan, for DeepSpeed alone; the installed DeepSpeed is the judge of what it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mp import Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite
from lightning_mp.deepspeed.merge import compose
from support.deepspeed_json import DEEPSPEED, WHOLE_FP16, faults_of, the_fault

WRITABLE = ("32-true", "bf16-mixed", "16-mixed")
BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


@pytest.fixture(scope="session")
def parse() -> Callable[[dict[str, Any]], Any]:
    """DeepSpeed's own reading of a config; without a process group it takes the world for one rank."""
    return pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig


def plan(precision: str = "16-mixed", **fields: Any) -> MixedPrecisionPlan:
    if precision == "16-mixed":
        fields.setdefault("loss_scaling", DEEPSPEED)
    return MixedPrecisionPlan(precision, **fields)  # type: ignore[arg-type]


@st.composite
def said_by_deepspeed(draw: st.DrawFn) -> MixedPrecisionPlan:
    """Any plan that a DeepSpeed JSON can say."""
    precision = draw(st.sampled_from(WRITABLE))
    fields: dict[str, Any] = {
        "reduce_dtype": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "buffer_dtype": draw(st.sampled_from([None, "fp32", "bf16", "fp16"])),
    }
    if precision == "bf16-mixed":
        fields["nonfinite"] = draw(st.sampled_from(["skip", "ignore"]))
    if precision == "16-mixed":
        power = draw(st.integers(0, 32))
        dynamic = LossScaling.deepspeed(
            initial_scale_power=power,
            loss_scale_window=draw(st.integers(1, 5000)),
            hysteresis=draw(st.integers(1, 5)),
            consecutive_hysteresis=draw(st.booleans()),
            min_loss_scale=draw(st.integers(1, 2**power)),
        )
        fields["loss_scaling"] = draw(st.sampled_from([dynamic, LossScaling.static(draw(st.floats(1e-3, 1e9)))]))
    return plan(precision, **fields)


@given(written=said_by_deepspeed(), stage=st.sampled_from([1, 2, 3]), offload=st.booleans())
def test_what_deepspeed_can_say_comes_back_as_it_was(
    written: MixedPrecisionPlan, stage: int, offload: bool, parse: Callable[..., Any]
) -> None:
    config = written.to_deepspeed(stage=stage, offload_optimizer=offload)
    assert "_comment" not in config
    seen = parse(json.loads(json.dumps(config)))
    assert seen.zero_optimization_stage == stage
    assert seen.float16_config.enabled == (written.policy.precision == "16-mixed")
    assert seen.bfloat16_config.enabled == (written.policy.precision == "bf16-mixed")
    back = MixedPrecisionPlan.from_deepspeed(config)
    assert back.policy == written.policy
    assert back.deepspeed_notes is not None
    assert not back.deepspeed_notes.refused


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", WRITABLE)
def test_the_plans_own_strategies_get_the_same_but_for_the_bf16_engine(precision: str, stage: int) -> None:
    policy = plan(precision).policy
    written = plan(precision).to_deepspeed(stage=stage, offload_optimizer=True)
    alone = compose(policy, stage=stage, offload_optimizer=True)
    merged = compose(policy, written, stage=stage, offload_optimizer=True)
    assert {key: value for key, value in merged.items() if key not in BATCH} == alone
    changed = {key for key in alone if written[key] != alone[key]}
    assert changed == ({"bf16"} if precision == "bf16-mixed" else set())


def test_longspecs_block_key_for_key() -> None:
    config = plan().to_deepspeed(stage=1)
    assert config["fp16"] == WHOLE_FP16
    assert list(config["fp16"]) == list(WHOLE_FP16)
    assert MixedPrecisionPlan.from_deepspeed({"fp16": WHOLE_FP16}).to_deepspeed(stage=1) == config


def test_a_path_gets_the_same_as_json(tmp_path: Path, parse: Callable[..., Any]) -> None:
    path = tmp_path / "ds.json"
    config = plan(tf32="high").to_deepspeed(path, stage=3)
    assert json.loads(path.read_text(encoding="utf-8")) == config
    assert parse(json.loads(path.read_text(encoding="utf-8"))).zero_optimization_stage == 3
    assert MixedPrecisionPlan.from_deepspeed(path).policy == plan().policy


REFUSED: list[tuple[MixedPrecisionPlan, list[str]]] = [
    (plan(loss_scaling=LossScaling(growth_factor=4.0)), ["loss_scaling.growth_factor=4.0"]),
    (plan(loss_scaling=LossScaling(backoff_factor=0.25)), ["loss_scaling.backoff_factor=0.25"]),
    (plan(loss_scaling=LossScaling(init_scale=0.5, min_scale=0)), ["init_scale=0.5", "min_scale=0"]),
    (plan(loss_scaling=LossScaling(max_scale=2.0**20)), ["loss_scaling.max_scale=1048576.0"]),
    (plan(loss_scaling=LossScaling(min_scale=1.5)), ["loss_scaling.min_scale=1.5"]),
    (plan("bf16-true"), ["precision='bf16-true'"]),
    (plan("16-true", loss_scaling=LossScaling(growth_factor=3)), ["precision='16-true'", "growth_factor=3"]),
    (plan("auto"), ["precision='auto'"]),
    (plan("bf16-mixed", nonfinite="raise"), ["nonfinite='raise'"]),
]


@pytest.mark.parametrize(("written", "words"), REFUSED, ids=[str(words) for _, words in REFUSED])
def test_what_deepspeed_would_do_with_other_numbers_is_refused(
    written: MixedPrecisionPlan, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    found = faults_of(lambda: written.to_deepspeed(path, stage=2))
    assert len(found) == len(words), found
    assert all(word in fault.problem for word, fault in zip(words, found, strict=True))
    assert not path.exists()


def test_faults_of_plan_and_arguments_come_together() -> None:
    wrong = plan(loss_scaling=LossScaling(growth_factor=4.0, backoff_factor=0.25))
    found = faults_of(lambda: wrong.to_deepspeed(stage=4, gradient_clipping=-1, train_micro_batch_size_per_gpu=0))
    assert [fault.problem.partition("=")[0] for fault in found] == [
        "loss_scaling.growth_factor",
        "loss_scaling.backoff_factor",
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
        "stage",
    ]
    assert "choose 'ddp'" in the_fault(lambda: plan().to_deepspeed(stage=0)).fix


#: fields that a JSON has no key for, and how their line begins
UNSAID: list[tuple[dict[str, Any], list[str]]] = [
    ({"pins": {"*norm*": "fp32", "lm_head": "bf16"}}, ["pins={'*norm*': 'fp32', 'lm_head': 'bf16'}:"]),
    ({"tf32": "high"}, ["tf32='high':"]),
    ({"checkpointing": Checkpointing(modules="*.h.*")}, ["checkpointing={'modules': ['*.h.*']"]),
    ({"nonfinite": NonFinite(max_consecutive=3)}, ["nonfinite.max_consecutive=3:"]),
    (
        {"loss_scaling": LossScaling()},
        ["loss_scaling.growth_delay=0:", "loss_scaling.max_scale=None:", "loss_scaling.at_min='hold':"],
    ),
]


@pytest.mark.parametrize(("fields", "lines"), UNSAID, ids=[str(lines) for _, lines in UNSAID])
def test_what_json_has_no_key_for_stands_in_a_comment(
    fields: dict[str, Any], lines: list[str], parse: Callable[..., Any]
) -> None:
    config = plan(**fields).to_deepspeed(stage=2)
    assert next(iter(config)) == "_comment"
    assert [line.startswith(words) for line, words in zip(config["_comment"], lines, strict=True)] == [True] * len(
        lines
    )
    assert parse(config).float16_config.enabled
