"""Every field of a plan says the same as a dict, as a DictConfig, as a YAML file, and out of a checkpoint."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lightning_mp import FP8, Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite, Pin
from lightning_mp.policy import PrecisionPolicy
from support.models import Regression
from support.running import fit

#: between them every field of every piece has a value that is not its default
PLANS: dict[str, PrecisionPolicy] = {
    "scaled": PrecisionPolicy(
        precision="16-mixed",
        loss_scaling=LossScaling(
            init_scale=2048.0,
            growth_factor=4.0,
            backoff_factor=0.25,
            growth_interval=7,
            growth_delay=1,
            hysteresis=3,
            consecutive_hysteresis=True,
            min_scale=0.5,
            max_scale=float("inf"),
            at_min="raise",
        ),
        pins=(Pin("layer*", "fp32", "input"), Pin("*", "bf16")),
        tf32="high",
        checkpointing=Checkpointing(
            modules=("*.h.*", "Block"), mode="selective", every=2, save_ops=("mm",), preserve_rng=False
        ),
        nonfinite=NonFinite(action="raise", max_consecutive=3, save_batch=True, run_dir="runs/bad"),
        reduce_dtype="bf16",
        buffer_dtype="fp16",
    ),
    "fp8": PrecisionPolicy(
        precision="fp8-mixed",
        fp8=FP8(
            recipe="tensorwise",
            modules=("*.mlp.*", "Linear"),
            skip="head",
            all_gather=True,
            evaluate="fp8",
            emulate=True,
            small="convert",
        ),
    ),
    "static": PrecisionPolicy(precision="16-true", loss_scaling=LossScaling.static(64.0)),
    "deepspeed": PrecisionPolicy(precision="16-mixed", loss_scaling=LossScaling.deepspeed(hysteresis=4)),
    "default": PrecisionPolicy(),
}


def unchanged(piece: Any) -> set[str]:
    """The fields, those of pieces included, that have their default value."""
    found: set[str] = set()
    for item in fields(piece):
        value = getattr(piece, item.name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if is_dataclass(part):
                found |= {f"{item.name}.{name}" for name in unchanged(part)}
        if item.default is not MISSING and value == item.default:
            found.add(item.name)
    return found


def test_the_plans_below_leave_no_field_out() -> None:
    assert unchanged(PLANS["scaled"]) == {"loss_scaling.dynamic", "pins.output", "fp8", "nonfinite.on_budget"}
    assert not {name for name in unchanged(PLANS["fp8"]) if name.startswith("fp8")}
    assert "loss_scaling.dynamic" not in unchanged(PLANS["static"])
    # a run that rewinds wants a ModelCheckpoint, which not every way below has
    rewinds = PrecisionPolicy(nonfinite=NonFinite(on_budget="rewind"))
    assert PrecisionPolicy.from_dict(rewinds.to_dict()) == rewinds
    assert PLANS["scaled"].pins[0].output is not None


def as_yaml(policy: PrecisionPolicy, folder: Path) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(policy.to_dict()))
    return path


def as_resolved_config(policy: PrecisionPolicy, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(policy.to_dict())))
    return path


FORMS = {
    "dict": lambda policy, _: policy.to_dict(),
    "DictConfig": lambda policy, _: OmegaConf.create(policy.to_dict()),
    "YAML": as_yaml,
    "OmegaConf's YAML": as_resolved_config,
    "path as a string": lambda policy, folder: str(as_yaml(policy, folder)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("policy", PLANS.values(), ids=PLANS)
def test_a_plan_is_the_same_in_every_form(policy: PrecisionPolicy, form: Any, tmp_path: Path) -> None:
    assert MixedPrecisionPlan.from_config(form(policy, tmp_path)).policy == policy


@pytest.mark.parametrize("name", ["static", "deepspeed", "default"])
def test_a_checkpoint_holds_the_whole_plan(name: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit(Regression(), plugins=[MixedPrecisionPlan.from_policy(PLANS[name])], max_steps=1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert MixedPrecisionPlan.from_config(checkpoint["MixedPrecisionPlan"]["policy"]).policy == PLANS[name]
