"""Every YAML file of the package composes with Hydra alone and builds what it names, in a project of the user's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

import lightning_mp.configs
from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.policy.precision_policy import PRESETS, preset
from lightning_mp.strategies.registry import STRATEGIES

CONFIGS = Path(lightning_mp.configs.__file__).parent
PROJECT = """\
defaults:
  - plan: fp32
  - strategy: auto
  - model: gpt2_tiny
  - data: library_text
  - trainer: cpu
  - callbacks: none
  - _self_
  - experiment: null
hydra:
  searchpath:
    - pkg://lightning_mp.configs
"""


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(PROJECT)
    return tmp_path


def composed(project: Path, overrides: Sequence[str] = ()) -> DictConfig:
    with initialize_config_dir(str(project), version_base="1.3"):
        return compose("mine", list(overrides))


def test_there_is_a_plan_for_every_preset_and_one_that_chooses() -> None:
    assert set(names("plan")) == {*PRESETS, "auto"}


@pytest.mark.parametrize("name", names("plan"))
def test_a_plan_is_the_preset_of_its_name(name: str, project: Path) -> None:
    config = composed(project, [f"plan={name}"])
    expected = preset(name) if name in PRESETS else MixedPrecisionPlan("auto").policy
    assert instantiate(config.plan).policy == expected
    assert MixedPrecisionPlan.from_config(config.plan).policy == expected


def test_there_is_a_strategy_for_every_name_of_the_factory() -> None:
    assert set(names("strategy")) == set(STRATEGIES)


@pytest.mark.parametrize("name", names("strategy"))
def test_a_strategy_is_what_the_factory_makes_of_its_name(name: str, project: Path) -> None:
    config = composed(project, [f"strategy={name}", "plan=bf16"])
    built, expected = instantiate(config.strategy), make_strategy(name, MixedPrecisionPlan("bf16-mixed"))
    assert type(built) is type(expected)


@pytest.mark.parametrize("name", names("callbacks"))
def test_callbacks_are_a_mapping_of_name_to_callback(name: str, project: Path) -> None:
    built = instantiate(composed(project, [f"callbacks={name}"]).callbacks)
    assert all(isinstance(callback, Callback) for callback in built.values())
    assert ("training_health" in built) == (name != "none")


@pytest.mark.parametrize("name", names("trainer"))
def test_a_trainer_section_is_what_lightnings_trainer_takes(name: str, project: Path) -> None:
    arguments = OmegaConf.to_container(composed(project, [f"trainer={name}"]).trainer, resolve=True)
    assert isinstance(arguments, dict)
    on_cpu: dict[str, Any] = {**arguments, "accelerator": "cpu", "devices": 1}
    assert isinstance(Trainer(**on_cpu), Trainer)


LARGE = ("gpt2_small", "llama_lora_1b", "neox_wide")


@pytest.mark.parametrize("name", [name for name in names("model") if name not in LARGE])
def test_a_model_is_a_lightning_module(name: str, project: Path) -> None:
    model = instantiate(composed(project, [f"model={name}"]).model, _convert_="all")
    assert isinstance(model, LightningModule)
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 300_000
