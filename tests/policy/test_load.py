"""Configs as plain mappings, whatever they came as, against what Hydra builds from the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.policy.load import plain_mapping
from support.running import faults_of

CONFIG: dict[str, Any] = {
    "precision": "16-mixed",
    "loss_scaling": {"init_scale": 1024, "hysteresis": 2},
    "pins": [{"pattern": "*norm*", "dtype": "fp32"}, {"pattern": "lm_head", "dtype": "bf16", "output": "fp32"}],
    "checkpointing": {"modules": ["*.h.*", "Block"], "mode": "selective", "save_ops": ["mm"]},
    "tf32": "high",
}


def as_yaml(tmp_path: Path, config: Any) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


FORMS: dict[str, Callable[[Path, Any], Any]] = {
    "dict": lambda _, config: config,
    "DictConfig": lambda _, config: OmegaConf.create(config),
    "path": as_yaml,
    "path as a string": lambda tmp, config: str(as_yaml(tmp, config)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_plain_mapping(form: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    found = plain_mapping(form(tmp_path, CONFIG))
    assert found == CONFIG
    assert (type(found), type(found["pins"]), type(found["pins"][0])) == (dict, list, dict)


HYDRA: dict[str, dict[str, Any]] = {
    "plain": {"precision": "bf16-mixed"},
    "pieces": {
        "precision": "16-mixed",
        "loss_scaling": {"_target_": "lightning_mp.LossScaling", "init_scale": 8.0},
        "checkpointing": {"_target_": "lightning_mp.Checkpointing", "modules": "*.h.*"},
        "nonfinite": {"_target_": "lightning_mp.NonFinite", "action": "raise"},
        "pins": [{"_target_": "lightning_mp.Pin", "pattern": "*norm*", "dtype": "fp32"}],
    },
    "convert": {"_convert_": "all", "precision": "bf16-true", "pins": {"*norm*": "fp32"}},
    "recursive": {"_recursive_": True, "precision": "bf16-true"},
    **{
        name: {"precision": "16-mixed", "loss_scaling": {"_target_": f"lightning_mp.LossScaling.{name}", **given}}
        for name, given in (
            ("static", {"scale": 128.0}),
            ("deepspeed", {"initial_scale_power": 12}),
            ("megatron", {"min_scale": 2.0}),
            ("torch", {"growth_interval": 100}),
        )
    },
}


@pytest.mark.parametrize("config", HYDRA.values(), ids=HYDRA)
def test_a_config_with_targets_means_what_hydra_makes_of_it(config: dict[str, Any]) -> None:
    config = {"_target_": "lightning_mp.MixedPrecisionPlan", **config}
    assert MixedPrecisionPlan.from_config(config).policy == instantiate(config).policy


@pytest.mark.parametrize(("word", "precision"), [("bf16", "bf16-mixed"), (16, "16-mixed"), ("fp16-true", "16-true")])
def test_a_word_is_the_plan_of_that_precision(word: Any, precision: str) -> None:
    assert MixedPrecisionPlan.from_config(word).policy == MixedPrecisionPlan(precision).policy


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ("nowhere.yaml", "config 'nowhere.yaml', which is no file"),
        (Path("nowhere.yaml"), "config 'nowhere.yaml', which is no file"),
        (3, "a config of type int"),
        (None, "a config of type NoneType"),
        ([("precision", "auto")], "a config of type list"),
        (OmegaConf.create(["precision"]), "a config of type list"),
    ],
    ids=str,
)
def test_what_is_no_config_is_refused(config: Any, given: str) -> None:
    assert faults_of(lambda: plain_mapping(config))[0].problem == given


def test_a_misspelt_word_is_answered_with_the_near_ones() -> None:
    with pytest.raises(PlanError, match="Did you mean '16-mixed', '16-true'"):
        MixedPrecisionPlan.from_config("fp-16")


@pytest.mark.parametrize("content", [["a", "b"], "just text", 3], ids=str)
def test_a_file_that_holds_no_plan_is_refused_by_name(content: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan\.yaml"):
        MixedPrecisionPlan.from_config(as_yaml(tmp_path, content))


PLACED = """\
precision: 16-mixed
loss_scaling:
  init_scale: 8
  growth_factor: 0.5
pins:
  - {pattern: '*norm*', dtype: fp32}
"""
#: what is written in place of a line of PLACED, and what is said of it
MISPLACED: dict[str, tuple[str, str, str]] = {
    "key": ("precision:", "precison:", "unknown key precison (plan.yaml:1)"),
    "key of a piece": ("init_scale", "init_scal", "unknown key loss_scaling.init_scal (plan.yaml:3)"),
    "value": ("16-mixed", "17-mixed", "precision='17-mixed' (plan.yaml:1)"),
    "value of a piece": ("init_scale: 8", "init_scale: 8", "growth_factor=0.5 (plan.yaml:4)"),
    "contradiction": ("16-mixed", "bf16-mixed", "loss_scaling with precision='bf16-mixed' (plan.yaml:2)"),
    "pin": ("dtype: fp32", "dtype: int8", "pin '*norm*': dtype='int8' (plan.yaml:6)"),
    "target": ("init_scale: 8", "_target_: a.B", "loss_scaling._target_: a.B (plan.yaml:3)"),
    "missing value": ("16-mixed", "???", "Missing mandatory value: precision"),
    "interpolation": ("init_scale: 8", "init_scale: ${a}", "(plan.yaml:3)"),
    "syntax": ("pins:", "pins: [", "line 6"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_fault_of_a_file_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    old, new, said = MISPLACED[name]
    path = tmp_path / "plan.yaml"
    path.write_text(PLACED.replace(old, new, 1))
    with pytest.raises(PlanError) as error:
        MixedPrecisionPlan.from_config(path)
    assert said in str(error.value)
    assert all("plan.yaml" in fault.problem for fault in error.value.faults)
    assert faults_of(lambda: MixedPrecisionPlan.from_config(yaml.safe_load(PLACED)))[0].problem == "growth_factor=0.5"
